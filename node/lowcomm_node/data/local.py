"""Private text: an owner's files, or what every installation has, packed for this machine alone.

cache/
  .lock                         one maker at a time; others wait for it and find what it made
  SOURCE-VERSION.pack           tokens, with its .pieces and .json (`pack.py`), signed by nobody
  .SOURCE-VERSION.pack.packing  what a crash left behind (`packing.py`); the next maker goes on

A remote run can only choose what is built in or leave the choice to each owner; paths come from the
owner alone.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.corpus import BuiltinCorpus, PrivateText, open_corpus
from lowcomm_node.data.pack import Pack, Show, read_pack, token_type
from lowcomm_node.data.packing import FORMAT, Packer
from lowcomm_node.data.tokenizer import Tokenizer, open_tokenizer
from lowcomm_node.errors import DataError, NodeError
from lowcomm_node.storage.files import WRITING, DiskQuota, folder_lock

if TYPE_CHECKING:
    from lowcomm_node.data.packed import PackedHeldOut, PackedTraining

CHECKED_BYTES = 1 << 30  # more is not hashed at every start, which takes minutes: sizes must do


@dataclass(frozen=True)
class Split:
    """Tokens of training or of held-out text."""

    numbers: NDArray[Any] = field(repr=False)
    """uint16 or uint32, a memory map as a rule."""
    vocab: int

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return len(self.numbers)

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """``length`` tokens from number ``start`` on, int64. Raises DataError if one is not below
        ``vocab``: a GPU would answer that with the loss of its whole process."""
        tokens = self.numbers[start : start + length].astype(np.int64)
        if int(tokens.max()) >= self.vocab:
            raise DataError(
                f"Token {tokens.max()} is not below {self.vocab}: remove the data cache, it is "
                "damaged."
            )
        return tokens


@dataclass(frozen=True)
class Dataset:
    """Training and held-out text as tokens."""

    name: str
    """Kind and file name; safe to show, since it names no folder."""
    tokenizer: Tokenizer
    train: "Split | PackedTraining"
    held_out: "Split | PackedHeldOut"


def open_data(
    source: str,
    tokenizer: str | Tokenizer,
    cache_dir: Path,
    field: str = "text",
    disk_quota: DiskQuota | None = None,
    show: Show = lambda *_: None,
) -> Dataset:
    """Open a source (``open_corpus``), tokenized once into ``cache_dir`` (``open_tokenizer``).

    ``disk_quota``: of the home; ``show`` receives the progress. Raises ConfigError, DataError if
    the text is malformed or too short, DiskFull.
    """
    encoder = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    corpus = open_corpus(source, field, encoder.separator)
    cache_dir.mkdir(parents=True, exist_ok=True)
    origin = _digest([corpus.origin, field, encoder.name])
    version = _digest([FORMAT, corpus.fingerprint(), encoder.vocab])
    path = cache_dir / f"{origin}-{version}.pack"
    with folder_lock(cache_dir):
        pack = _read_sound(path)
        kept = (
            {path.name + end for end in ("", ".pieces", ".json")}
            if pack
            else {f".{path.name}.packing"}
        )
        # Edits to a text shall not fill the disk; earlier releases kept folders of tokens.
        for pattern in (f"{origin}-*", ".*.packing", f"{WRITING}*", "tokens-*"):
            for other in cache_dir.glob(pattern):
                if other.name not in kept:
                    _remove(other)
        pack = pack or _make(corpus, encoder, path, disk_quota or DiskQuota(cache_dir), show)
        # Mapped under the lock: a maker of a newer version may remove the file once we have it.
        text, kind = pack.text, f"<u{pack.text.token_bytes}"
        start = text.training_pieces * text.piece_bytes
        train = np.memmap(path, kind, "r", 0, (text.tokens,))
        held_out = np.memmap(path, kind, "r", start, (text.held_out_tokens,))
    vocab = encoder.vocab
    return Dataset(corpus.name, encoder, Split(train, vocab), Split(held_out, vocab))


def _read_sound(path: Path) -> Pack | None:
    """The pack at a path, if it is as it was made."""
    with suppress(OSError, DataError):
        pack = read_pack(path, is_private=True)
        if pack.text.size > CHECKED_BYTES or pack.first_wrong_piece() is None:
            return pack
    return None


def _make(
    corpus: BuiltinCorpus | PrivateText,
    tokenizer: Tokenizer,
    path: Path,
    disk_quota: DiskQuota,
    show: Show,
) -> Pack:
    """Tokenize a text, or go on with it."""
    packer = Packer(corpus, path, tokenizer, maker=None)
    room = disk_quota.room() + DiskQuota(packer.folder).used()
    token_bytes = token_type(tokenizer.vocab, masked=False).itemsize

    def show_and_check(done: int, total: int, tokens: int) -> None:
        # The number of tokens is known only now.
        disk_quota.require(tokens * token_bytes, f"The text of {corpus.name}", room)
        show(done, total, tokens)

    try:
        return packer.pack(show=lambda _: show_and_check)
    except NodeError:
        _remove(packer.folder)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
