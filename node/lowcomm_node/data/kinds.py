"""The kind of text in a file, by its contents; its name decides only where they can't."""

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from lowcomm_node.errors import ConfigError

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
KINDS = (TEXT, JSONL, PARQUET)
ARRAY = "a JSON array: write one object a line"
OTHER_JSON = "JSON, but not one object a line"
TABLE = "a table: write it as JSON lines or Parquet"
_ENDINGS = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".parquet": PARQUET,
    ".csv": TABLE,
    ".tsv": TABLE,
}
_READABLE = (TEXT, JSONL, ARRAY, OTHER_JSON, TABLE)
"""What ``text:`` before a file or a glob takes at its owner's word."""
_LOOK = 4096
"""Bytes that are read of each file."""
_NAMED = 3
"""File names in a message."""
_GZIP, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
_MAGIC = {
    b"PAR1": PARQUET,
    b"PARE": "encrypted Parquet",
    b"%PDF": "PDF",
    b"PK\x03\x04": "a zip archive or an office document",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ": "packed with xz",
    b"BZh": "packed with bzip2",
    b"ARROW1": "Arrow: write it as Parquet",
    b"\xff\xff\xff\xff": "Arrow: write it as Parquet",
    b"\xff\xfe": "UTF-16 rather than UTF-8",
    b"\xfe\xff": "UTF-16 rather than UTF-8",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_OBJECT = re.compile(rb'(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


def is_packed(path: Path, head: bytes) -> bool:
    """Whether a file is to be unpacked with gzip, by its ending or its first bytes."""
    return path.suffix.lower() in (".gz", ".gzip") or head.startswith(_GZIP)


def kind_of(path: Path) -> str:
    """``text``, ``jsonl``, ``parquet``, or in other words what else a file holds.

    Raises ConfigError.
    """
    head = _head(path)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    name = path.name.lower().removesuffix(".gz").removesuffix(".gzip")
    ending = Path(name).suffix
    if ending == ".parquet":  # its reader says better what is wrong with it
        return PARQUET
    if head.translate(None, _CONTROL) != head:
        return "not text"
    return _ENDINGS.get(ending) or _kind_of_text(head, ending == ".json")


def _kind_of_text(head: bytes, is_json: bool) -> str:
    start = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    found = _OBJECT.match(start)
    if found and found[1]:
        return ARRAY
    if found:
        first, is_whole, _ = start.partition(b"\n")
        return JSONL if not is_whole or _is_object(first) else OTHER_JSON
    if is_json and start:
        return ARRAY if start.startswith(b"[") else OTHER_JSON
    return TEXT


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def choose(
    source: str, files: Sequence[Path], wanted: str | None, is_folder: bool
) -> tuple[str, Sequence[Path]]:
    """The kind of the files of a source, and those that are of it.

    Of a folder ``wanted`` selects the files of that kind; a file or a glob is taken at the owner's
    word. Raises ConfigError, which names some files, if they are mixed or can't be read.
    """
    if not files or (wanted not in (None, TEXT) and not is_folder):
        return wanted or TEXT, files
    found: dict[str, list[Path]] = {}
    for path in files:
        found.setdefault(kind_of(path), []).append(path)
    if wanted and is_folder:
        return wanted, found.get(wanted, [])
    allowed = _READABLE if wanted else KINDS
    if found.keys() <= set(allowed) and (wanted or len(found) == 1):
        return wanted or next(iter(found)), files
    held = "; ".join(f"{_some(those)} ({kind})" for kind, those in sorted(found.items()))
    kinds = sorted(found.keys() & KINDS, key=lambda kind: (-len(found[kind]), kind))
    remedy = f"read one kind of it, such as by --data {kinds[0]}:{source}, or " if kinds else ""
    raise ConfigError(
        f"{source} can't be read as one text, as it holds {held}: {remedy}convert, unpack or "
        "remove files until all are text, JSON lines or Parquet."
    )


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
