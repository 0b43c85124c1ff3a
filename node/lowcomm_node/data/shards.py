"""Tokens on disk: made once, memory-mapped by every process that trains on them.

cache/
  .lock                    one maker at a time; others wait for it and find what it made
  tokens-<fingerprint>/
    manifest.json          sealed: origin, tokenizer, and tokens and SHA-256 of every shard
    train-00000.bin        little-endian uint16 or uint32, at most 256 MiB each
    held_out-00000.bin
  .writing-*               what a crash left behind; swept by the next maker
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.corpus import Corpus, open_corpus
from lowcomm_node.data.documents import Document, ReadProgress
from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from lowcomm_node.errors import DataError
from lowcomm_node.storage import files

if TYPE_CHECKING:
    from lowcomm_node.data.packed import PackedHeldOut, PackedTraining

FORMAT = 3
SHARD_BYTES = 256 << 20
CHECKED_BYTES = 1 << 30  # more is not hashed at every start, which takes minutes: sizes must do
BATCH_BYTES = (256 << 10) * (os.cpu_count() or 1)  # of text tokenized at once: about a second
_MANIFEST = "manifest.json"
_LINE_END = b"\n"
_SPLITS = ("train", "held_out")


Tell = Callable[[int, int, int], None]
"""Takes bytes done and bytes in all, as the files lie on the disk, and tokens made of them."""


@dataclass(frozen=True)
class Split:
    """Tokens of one split: shards, one after another."""

    shards: tuple[NDArray[Any], ...] = field(repr=False)
    """Memory maps of uint16 or uint32."""
    vocab: int

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(len(shard) for shard in self.shards)

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """``length`` tokens from number ``start`` on, int64. Raises DataError if one is not below
        ``vocab``: a GPU would answer that with the loss of its whole process."""
        parts: list[NDArray[Any]] = []
        for shard in self.shards:
            if len(shard) > start and length > 0:
                parts.append(shard[start : start + length])
                length -= len(parts[-1])
            start = max(0, start - len(shard))
        tokens = np.concatenate(parts).astype(np.int64)
        if int(tokens.max()) >= self.vocab:
            raise DataError(
                f"Token {tokens.max()} is not below {self.vocab}: remove the data cache, it is "
                "damaged."
            )
        return tokens


@dataclass(frozen=True)
class Dataset:
    """Tokens on disk, split into training and held-out text."""

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
    disk_quota: files.DiskQuota | None = None,
    tell: Tell = lambda *_: None,
) -> Dataset:
    """Open a source (``open_corpus``), tokenized once into ``cache_dir`` (``open_tokenizer``).

    ``disk_quota``: of the home; ``tell`` receives the progress after each batch. Raises
    ConfigError, DataError if the text is malformed or too short, DiskFull.
    """
    corpus = open_corpus(source, field)
    encoder = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    cache_dir.mkdir(parents=True, exist_ok=True)
    key = json.dumps([FORMAT, corpus.fingerprint(), encoder.name, encoder.vocab]).encode()
    folder = cache_dir / f"tokens-{hashlib.sha256(key).hexdigest()[:16]}"
    with files.folder_lock(cache_dir):
        manifest = _read_manifest(folder)
        if manifest is None:
            for leftover in (*cache_dir.glob(f"{files.WRITING}*"), folder):
                shutil.rmtree(leftover, ignore_errors=True)
            with files.new_folder(folder) as fresh:
                _tokenize(corpus, encoder, fresh, disk_quota or files.DiskQuota(cache_dir), tell)
            manifest = files.read_sealed_json(folder / _MANIFEST)
            _remove_earlier(manifest, folder)
        # Opened under the lock: a maker of a newer version may remove these files once we have them
        # mapped.
        maps: dict[str, list[NDArray[Any]]] = {split: [] for split in _SPLITS}
        for shard in manifest["shards"]:
            tokens = np.memmap(folder / shard["file"], manifest["dtype"], "r")
            maps[shard["split"]].append(tokens)
    train, held_out = (Split(tuple(shards), encoder.vocab) for shards in maps.values())
    return Dataset(corpus.name, encoder, train, held_out)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if it and the shards are as they were made."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = files.read_sealed_json(folder / _MANIFEST)
        total = sum(shard["size"] for shard in manifest["shards"])
        for shard in manifest["shards"]:
            path = folder / shard["file"]
            if path.stat().st_size != shard["size"]:
                return None
            if total <= CHECKED_BYTES and files.sha256_file(path) != shard["sha256"]:
                return None
        return manifest
    return None


def _remove_earlier(manifest: dict[str, Any], folder: Path) -> None:
    """Remove earlier versions of the same origin, so that edits to a text don't fill the disk."""
    for other in folder.parent.glob(f"tokens-*/{_MANIFEST}"):
        with suppress(OSError, ValueError, KeyError):
            content = files.read_sealed_json(other)
            is_same = all(content[key] == manifest[key] for key in ("origin", "tokenizer"))
            if is_same and other.parent != folder:
                shutil.rmtree(other.parent, ignore_errors=True)


def _tokenize(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, disk_quota: files.DiskQuota, tell: Tell
) -> None:
    room = disk_quota.room()
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    sizes: dict[str, int] = dict.fromkeys(_SPLITS, 0)
    reading, total, is_first = ReadProgress(), corpus.size, True
    for batch in _batches(corpus.documents(reading)):
        tokens: dict[str, list[NDArray[Any]]] = {split: [] for split in _SPLITS}
        for document, encoded in zip(batch, encode(tokenizer, batch, is_first), strict=True):
            tokens["held_out" if document.held_out else "train"].append(encoded.astype(dtype))
            is_first = document.ends
        new = {split: np.concatenate(parts).tobytes() for split, parts in tokens.items() if parts}
        size = sum(sizes.values()) + sum(map(len, new.values()))
        # The number of tokens is known only afterwards.
        disk_quota.require(size, f"The text of {corpus.name}", room)
        for split, data in new.items():
            sizes[split] = _append(folder, split, sizes[split], data)
        tell(min(reading.done, total), total, size // dtype.itemsize)
    if not all(sizes.values()):
        raise DataError(
            f"{corpus.name} has too little text to hold any of it out: give it at least two "
            "documents."
        )
    shards = [
        {
            "split": split,
            "file": path.name,
            "size": path.stat().st_size,
            "sha256": files.sha256_file(path),
        }
        for split in _SPLITS
        for path in sorted(folder.glob(f"{split}-*"))
    ]
    content = {"origin": corpus.origin, "tokenizer": tokenizer.name, "vocab": tokenizer.vocab}
    files.write_sealed_json(folder / _MANIFEST, {**content, "dtype": dtype.str, "shards": shards})


def _append(folder: Path, split: str, size: int, data: bytes) -> int:
    """Append data to the shards of a split, which have ``size`` bytes. Returns their new size."""
    rest = memoryview(data)
    while rest:
        number, used = divmod(size, SHARD_BYTES)
        with (folder / f"{split}-{number:05d}.bin").open("ab") as file:
            written = file.write(rest[: SHARD_BYTES - used])
        size, rest = size + written, rest[written:]
    return size


def encode(tokenizer: Tokenizer, batch: Sequence[Document], begins: bool) -> list[NDArray[Any]]:
    """The tokens of documents, with those around each; ``begins``: whether the first one begins a
    text. A later part is encoded behind a line end, as many tokenizers put a blank before a
    beginning. Raises DataError."""
    for document in batch if isinstance(tokenizer, FileTokenizer) else ():
        try:
            document.text.decode()
        except UnicodeDecodeError as error:
            if document.file is not None:
                raise DataError(
                    f"{document.file} is not UTF-8 (byte 0x{document.text[error.start]:02x}): "
                    "convert it, such as by `iconv -f WINDOWS-1252 -t UTF-8`, or remove it."
                ) from None
    firsts = [begins, *(document.ends for document in batch[:-1])]
    starts = (b"" if first else _LINE_END for first in firsts)
    texts = [start + document.text for start, document in zip(starts, batch, strict=True)]
    encoded = tokenizer.encode_all(texts)
    line_end = [] if all(firsts) else tokenizer.encode(_LINE_END)
    for place, first in enumerate(firsts):
        if not first and np.array_equal(encoded[place][: len(line_end)], line_end):
            encoded[place] = encoded[place][len(line_end) :]
        elif not first:
            encoded[place] = tokenizer.encode(batch[place].text)
    before = np.array(tokenizer.begins, np.uint32)
    after = np.array([] if tokenizer.separator is None else [tokenizer.separator], np.uint32)
    none = before[:0]
    return [
        np.concatenate([before if first else none, tokens, after if document.ends else none])
        for first, tokens, document in zip(firsts, encoded, batch, strict=True)
    ]


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in their order, several at a time."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
