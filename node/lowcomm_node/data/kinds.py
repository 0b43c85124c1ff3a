"""The kind of text in a file, from its ending and its first bytes together."""

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lowcomm_node.errors import ConfigError

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
KINDS = (TEXT, JSONL, PARQUET)
_ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_LOOK = 4096
"""Bytes that are read of each file."""
_NAMED = 3
"""File names in a message."""
_GZIP = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_BINARY_MAGIC = {
    b"PARE": "encrypted Parquet",
    b"%PDF": "PDF",
    b"PK\x03\x04": "a zip archive or an office document",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ": "packed with xz",
    b"BZh": "packed with bzip2",
    b"ARROW1": "Arrow",
    b"\xff\xfe": "UTF-16 rather than UTF-8",
    b"\xfe\xff": "UTF-16 rather than UTF-8",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))


def is_packed(path: Path, head: bytes) -> bool:
    """Whether a file is to be unpacked with gzip, by its ending or its first bytes."""
    return path.suffix == ".gz" or head.startswith(_GZIP)


def kind_of(path: Path) -> str:
    """``text``, ``jsonl``, ``parquet``, or in other words a file's binary contents.

    Raises ConfigError.
    """
    head = _head(path)
    name = path.with_suffix("").name if path.suffix == ".gz" else path.name
    named = next((kind for ending, kind in _ENDINGS.items() if name.lower().endswith(ending)), None)
    if head.startswith(_PARQUET_MAGIC):
        return PARQUET
    binary = next((told for magic, told in _BINARY_MAGIC.items() if head.startswith(magic)), None)
    if binary is None and head.translate(None, _CONTROL) != head:
        binary = "not text"
    # A reader of Parquet says better what is wrong with it
    if binary is not None and named != PARQUET:
        return binary
    return named or TEXT


def one_kind(source: str, files: Sequence[Path]) -> str:
    """The kind of all files of a folder or glob.

    Raises ConfigError, which names some of them, if they are binary or mixed.
    """
    found = sort_by_kind(files)
    refuse_binary(source, found)
    if len(found) > 1:
        told = "; ".join(
            f"{len(those)} {kind} ({_some(those)})" for kind, those in sorted(found.items())
        )
        first = min(found)
        raise ConfigError(
            f"{source} holds files of several kinds: {told}. Say which to read, such as --data "
            f"{first}:{source}, or name a folder that holds one kind."
        )
    return next(iter(found))


def sort_by_kind(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files of each kind, where kinds include words for binary contents.

    Raises ConfigError if one can't be read.
    """
    found: dict[str, list[Path]] = {}
    for path in files:
        found.setdefault(kind_of(path), []).append(path)
    return found


def refuse_binary(
    source: str, found: dict[str, list[Path]], allowed: Sequence[str] = KINDS
) -> None:
    """Raise ConfigError if any file is of another kind than those that can be read."""
    binary = {kind: those for kind, those in found.items() if kind not in allowed}
    if not binary:
        return
    told = "; ".join(f"{_some(those)} ({kind})" for kind, those in binary.items())
    others = sum(len(those) for kind, those in found.items() if kind in allowed)
    remedy = (
        f"leave them out with --data {TEXT}:FOLDER"
        if others
        else "name files of text, JSON lines or Parquet"
    )
    raise ConfigError(f"{source} holds binary files: {told}. Unpack or remove them, or {remedy}.")


def _some(files: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in files[:_NAMED])
    return names if len(files) <= _NAMED else f"{names} and {len(files) - _NAMED} more"


def _head(path: Path) -> bytes:
    """The first bytes of a file, unpacked if needed. Errors of unpacking are left to its reader."""
    try:
        with path.open("rb") as file:
            head = file.read(_LOOK)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): correct its permissions, or remove it."
        ) from None
    if not is_packed(path, head):
        return head
    try:
        with gzip.open(path) as file:
            return file.read(_LOOK)
    except (OSError, EOFError, zlib.error):
        return b""
