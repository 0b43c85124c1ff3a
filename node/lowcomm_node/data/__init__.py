"""Training text: its sources, its tokens on disk, and the batches that a peer draws."""

from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.data.corpus import open_corpus
from lowcomm_node.data.shards import Split, Tell, Tokenized, open_shards
from lowcomm_node.data.tokenizer import Tokenizer, open_tokenizer
from lowcomm_node.storage.files import DiskQuota

__all__ = [
    "Dataset",
    "Split",
    "Tokenized",
    "Tokenizer",
    "open_data",
    "open_tokenizer",
]


@dataclass(frozen=True)
class Dataset:
    """Tokens on disk, split into training and held-out text."""

    name: str
    """Kind and file name; safe to show, since it names no folder."""
    tokenizer: Tokenizer
    train: Split
    held_out: Split

    @property
    def vocab(self) -> int:
        """Exclusive upper bound of the tokens."""
        return self.tokenizer.vocab

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.train.tokens + self.held_out.tokens


def open_data(
    source: str,
    tokenizer: str | Tokenizer,
    cache_dir: Path,
    field: str = "text",
    disk_quota: DiskQuota | None = None,
    tell: Tell = lambda _: None,
) -> Dataset:
    """Open a source chosen by the run or the machine's owner; tokenized once into ``cache_dir``.

    ``disk_quota``: of the home; ``tell`` receives the progress of tokenizing.

    ``source`` is ``builtin:python``, ``builtin:stories``, or the path of a file, folder or glob,
    whose kind follows from its files, or ``text:``, ``jsonl:`` or ``parquet:`` and a path, of which
    ``field`` is the column. ``tokenizer`` is ``bytes``, ``builtin:stories``, the path of a
    tokenizer.json, or an open one. Raises ConfigError, DataError if the text is missing, malformed
    or too short, DiskFull.
    """
    corpus = open_corpus(source, field)
    encoder = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    train, held_out = open_shards(corpus, encoder, cache_dir, disk_quota, tell)
    return Dataset(corpus.name, encoder, train, held_out)
