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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.corpus import Corpus
from lowcomm_node.data.documents import Document, ReadProgress
from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer
from lowcomm_node.errors import DataError
from lowcomm_node.storage.files import (
    DiskQuota,
    disk_full_error,
    folder_lock,
    read_sealed_json,
    sha256_file,
    sync_file,
    sync_folder,
    write_sealed_json,
)

FORMAT = 3
SHARD_BYTES = 256 << 20
CHECKED_BYTES = 1 << 30
"""Up to this size data is hashed at every start. Beyond it only the sizes are compared, since
hashing takes minutes."""
BATCH_BYTES = (256 << 10) * (os.cpu_count() or 1)
"""Bytes of text tokenized at once: enough for all cores, little memory, and progress about once a
second."""
_MANIFEST = "manifest.json"
_WRITING = ".writing-"
_LINE_END = b"\n"
_SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Tokenized:
    """How far a text is tokenized."""

    done: int
    """Bytes of the files as they lie on the disk."""
    total: int
    tokens: int


Tell = Callable[[Tokenized], None]


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
        """``length`` tokens from number ``start`` on, int64.

        Raises DataError if one is not below ``vocab``: a GPU would answer that with the loss of its
        whole process.
        """
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


def open_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    disk_quota: DiskQuota | None = None,
    tell: Tell = lambda _: None,
) -> tuple[Split, Split]:
    """The train and held-out splits of a corpus; made if they are not there, or not as they were
    made.

    ``tell`` receives the progress after each batch. Raises DataError if there is too little
    text, DiskFull.
    """
    cache.mkdir(parents=True, exist_ok=True)
    key = json.dumps([FORMAT, corpus.fingerprint(), tokenizer.name, tokenizer.vocab]).encode()
    folder = cache / f"tokens-{hashlib.sha256(key).hexdigest()[:16]}"
    with folder_lock(cache):
        manifest = _read_manifest(folder)
        if manifest is None:
            _make(corpus, tokenizer, cache, folder, disk_quota or DiskQuota(cache), tell)
            manifest = read_sealed_json(folder / _MANIFEST)
        # Opened under the lock: a maker of a newer version may remove these files once we have them
        # mapped.
        train, held_out = (_open_split(folder, manifest, split) for split in _SPLITS)
    return train, held_out


def _open_split(folder: Path, manifest: dict[str, Any], split: str) -> Split:
    files = [folder / shard["file"] for shard in manifest["shards"] if shard["split"] == split]
    return Split(
        tuple(np.memmap(file, manifest["dtype"], "r") for file in files), manifest["vocab"]
    )


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, if it and the shards are as they were made."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = read_sealed_json(folder / _MANIFEST)
        total = sum(shard["size"] for shard in manifest["shards"])
        for shard in manifest["shards"]:
            path = folder / shard["file"]
            if path.stat().st_size != shard["size"]:
                return None
            if total <= CHECKED_BYTES and sha256_file(path) != shard["sha256"]:
                return None
        return manifest
    return None


def _make(
    corpus: Corpus,
    tokenizer: Tokenizer,
    cache: Path,
    folder: Path,
    disk_quota: DiskQuota,
    tell: Tell,
) -> None:
    for leftover in (*cache.glob(f"{_WRITING}*"), folder):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=_WRITING, dir=cache))
    try:
        with disk_full_error(cache):
            _tokenize(corpus, tokenizer, temporary, disk_quota, tell)
            sync_folder(temporary)
            temporary.rename(folder)
            sync_folder(cache)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    # Remove earlier versions of the same origin, so that edits to a text don't fill the disk.
    for manifest in cache.glob(f"tokens-*/{_MANIFEST}"):
        with suppress(OSError, ValueError, KeyError):
            content = read_sealed_json(manifest)
            same = (content["origin"], content["tokenizer"]) == (corpus.origin, tokenizer.name)
            if same and manifest.parent != folder:
                shutil.rmtree(manifest.parent, ignore_errors=True)


def _tokenize(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, disk_quota: DiskQuota, tell: Tell
) -> None:
    room = disk_quota.room()
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    separator = [] if tokenizer.separator is None else [tokenizer.separator]
    train, held_out = (_ShardWriter(folder, split, dtype) for split in _SPLITS)
    reading, total, is_first = ReadProgress(), corpus.size, True
    with closing(train), closing(held_out):
        for batch in _batches(corpus.documents(reading)):
            encoded = _encode(tokenizer, batch, is_first)
            for document, tokens in zip(batch, encoded, strict=True):
                writer = held_out if document.held_out else train
                if is_first:
                    writer.write(np.array(tokenizer.begins, dtype))
                writer.write(tokens)
                if document.ends:
                    writer.write(np.array(separator, dtype))
                is_first = document.ends
                # The number of tokens is known only afterwards.
                if (size := train.size + held_out.size) > room:
                    raise disk_quota.refusal(size, f"The text of {corpus.name}")
            tokens = (train.size + held_out.size) // dtype.itemsize
            tell(Tokenized(min(reading.done, total), total, tokens))
        train.finish_shard()
        held_out.finish_shard()
    if not train.shards or not held_out.shards:
        raise DataError(
            f"{corpus.name} has too little text to hold any of it out: give it at least two "
            "documents."
        )
    content = {
        "origin": corpus.origin,
        "tokenizer": tokenizer.name,
        "vocab": tokenizer.vocab,
        "dtype": dtype.str,
        "shards": train.shards + held_out.shards,
    }
    write_sealed_json(folder / _MANIFEST, content)


def _encode(tokenizer: Tokenizer, batch: Sequence[Document], begins: bool) -> list[NDArray[Any]]:
    """The tokens of documents; ``begins``: whether the first one is the beginning of a text.

    A later part of a text is encoded behind a line end, as many tokenizers put a blank before what
    they take for a beginning. Raises DataError.
    """
    for document in batch if isinstance(tokenizer, FileTokenizer) else ():
        try:
            document.text.decode()
        except UnicodeDecodeError as error:
            if document.file is not None:
                raise DataError(
                    f"{document.file} is not UTF-8 (byte 0x{document.text[error.start]:02x}): "
                    "convert it, such as by `iconv -f WINDOWS-1252 -t UTF-8`, or remove it."
                ) from None
    begin = [begins, *(document.ends for document in batch[:-1])]
    texts = [
        document.text if first else _LINE_END + document.text
        for document, first in zip(batch, begin, strict=True)
    ]
    encoded = tokenizer.encode_all(texts)
    line_end = [] if all(begin) else tokenizer.encode(_LINE_END)
    for place, first in enumerate(begin):
        if not first:
            tokens, skipped = encoded[place], len(line_end)
            encoded[place] = (
                tokens[skipped:]
                if np.array_equal(tokens[:skipped], line_end)
                else tokenizer.encode(batch[place].text)
            )
    return encoded


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


class _ShardWriter:
    """Appends tokens to shards of one split; a full shard is synced and hashed."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]) -> None:
        self.shards: list[dict[str, Any]] = []
        self.size = 0
        """Bytes of all shards."""
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._file: BinaryIO | None = None
        self._room = 0

    def write(self, tokens: NDArray[Any]) -> None:
        self.size += len(tokens) * self._dtype.itemsize
        while len(tokens):
            if self._file is None:
                name = f"{self._split}-{len(self.shards):05d}.bin"
                self._file = (self._folder / name).open("wb")
                self._room = SHARD_BYTES // self._dtype.itemsize
            self._file.write(tokens[: self._room].astype(self._dtype).data)
            written = min(len(tokens), self._room)
            self._room -= written
            tokens = tokens[written:]
            if not self._room:
                self.finish_shard()

    def finish_shard(self) -> None:
        if self._file is None:
            return
        path = Path(self._file.name)
        self._file.close()
        self._file = None
        sync_file(path)
        shard = {"split": self._split, "file": path.name, "size": path.stat().st_size}
        self.shards.append({**shard, "sha256": sha256_file(path)})

    def close(self) -> None:
        """Close the file, finished or not. After a full disk this fails like the write before
        it."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
