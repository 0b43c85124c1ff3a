"""Training text: where it comes from, its tokens on disk, and the batches that a peer draws."""

from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.allotment import Allotment
from lowcomm_node.data.corpus import open_corpus
from lowcomm_node.data.shards import Split, open_shards
from lowcomm_node.data.stream import TrainStream, held_out_windows
from lowcomm_node.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Dataset", "Split", "Tokenizer", "TrainStream", "held_out_windows", "open_data", "open_tokenizer"]


@dataclass(frozen=True)
class Dataset:
    """Tokens on disk, cut into what is trained on and what is only evaluated on."""

    name: str
    """Kind and file name; safe to show, as it tells no folder."""
    tokenizer: Tokenizer
    train: Split
    held_out: Split

    @property
    def vocab(self) -> int:
        """Tokens are below this number."""
        return self.tokenizer.vocab

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.train.tokens + self.held_out.tokens


def open_data(
    source: str, tokenizer: str, cache_dir: Path, field: str = "text", allotment: Allotment | None = None
) -> Dataset:
    """Open a source that the run offers or the machine's owner names; tokenized once into ``cache_dir``.

    ``allotment``: what the home may take of the disk.

    ``source`` is ``builtin:python``, a path, or ``text:``, ``jsonl:`` or ``parquet:`` and a path (file, folder or
    glob); ``field`` is the column of the last two. ``tokenizer`` is ``bytes`` or the path of a tokenizer.json. Raises
    ConfigError, DataError if the text is missing, malformed or too short, DiskFull.
    """
    corpus = open_corpus(source, field)
    encoder = open_tokenizer(tokenizer)
    train, held_out = open_shards(corpus, encoder, cache_dir, allotment)
    return Dataset(corpus.name, encoder, train, held_out)
