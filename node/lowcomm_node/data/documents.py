"""Documents of text, JSON lines and Parquet files, one at a time, for files of any size."""

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import load_optional

PART_BYTES = 1 << 20  # of a text that are tokenized at once: a longer text is cut after lines
LONG_BYTES = 256 << 10  # of a text file whose end is held out, instead of all of it or nothing
SHORTEST_TAIL = 4 << 10  # bytes of such an end
TAIL_SHARE = 100
TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
KINDS = (TEXT, JSONL, PARQUET)
OTHER_JSON = "JSON, but not one object a line"
TABLE = "a table: write it as JSON lines or Parquet"
_ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": TABLE, ".tsv": TABLE, ".parquet": PARQUET}
_GZIP, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
_MAGIC = {
    b"PAR1": PARQUET,
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xff\xfe": "UTF-16 rather than UTF-8",
    b"\xfe\xff": "UTF-16 rather than UTF-8",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_OBJECT = re.compile(rb'(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')  # a JSON object, or a list of them
_HEAD_BYTES = 4096  # bytes of each file that are read to find its kind
_LONGEST_LINE = 64 << 20
_LONGEST_CHARACTER = 4
_ROWS = 256
_NAMED_FILES, _NAMED_FIELDS = 3, 8  # in a message
_VALUES = {bool: "true or false", list: "a list", dict: "an object"}


@dataclass
class ReadProgress:
    """Bytes on disk that were read; packed files count packed."""

    done: int = 0
    _before: int = 0  # in the files before the current one

    def at(self, place: int, is_end: bool = False) -> None:
        """``place`` bytes of the current file are read; ``is_end``: all of it."""
        self.done = self._before + place
        self._before = self.done if is_end else self._before


@dataclass(frozen=True)
class Document:
    """A text, or a part of a long text."""

    text: bytes
    held_out: bool | None = None
    """None: the content is still to decide."""
    ends: bool = True
    """Whether the text ends here, rather than in the next part."""
    file: Path | None = None
    """The owner's file that it comes from."""


# Files


def kind_and_path(source: str) -> tuple[str | None, str]:
    """The kind that a source names before its path, if it does, and the path."""
    kind, colon, path = source.partition(":")
    return (kind, path) if colon and kind in KINDS else (None, source)


def is_there(source: str) -> bool:
    """Whether the path, or glob, of a source names anything."""
    root = expanded(kind_and_path(source)[1])
    found = glob.iglob(str(root), recursive=True)  # noqa: PTH207
    return root.exists() or next(found, None) is not None


def find_files(path: str) -> list[Path]:
    """Sorted files: the path itself, those in the folder at any depth (not hidden), or a glob's.
    Links are followed; what several lead to is read once. Raises ConfigError."""
    root, once = expanded(path), dict[tuple[int, int], Path]()

    def is_first(found: Path) -> bool:
        status = found.stat()
        return once.setdefault((status.st_dev, status.st_ino), found) is found

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename} can't be read ({error.strerror}): correct its permissions, or name "
            "a folder without it."
        )

    found = [root] if root.is_file() else map(Path, glob.glob(str(root), recursive=True))  # noqa: PTH207
    if root.is_dir():
        found = list[Path]()
        for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
            if is_first(Path(folder)):
                found += [Path(folder, name) for name in files if not name.startswith(".")]
                folders[:] = sorted(name for name in folders if not name.startswith("."))
            else:
                folders.clear()
    return [file for file in sorted(found) if file.is_file() and is_first(file)]


def expanded(path: str) -> Path:
    """A path with ``~`` replaced by the home of its user, where there is such a user."""
    # Path.expanduser raises RuntimeError on an unknown user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


# Kinds


def choose(path: str, wanted: str | None) -> tuple[str, Sequence[Path]]:
    """The kind of the files at a path, and those that are of it. Of a folder ``wanted`` selects the
    files of that kind; a file or a glob is taken at the owner's word. Raises ConfigError."""
    files, is_folder = find_files(path), expanded(path).is_dir()
    if not files or (wanted not in (None, TEXT) and not is_folder):
        return wanted or TEXT, files
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(kind_of(file), []).append(file)
    if wanted and is_folder:
        return wanted, by_kind.get(wanted, [])
    if wanted and by_kind.keys() <= {TEXT, JSONL, OTHER_JSON, TABLE}:  # by the owner's word
        return wanted, files
    if not wanted and len(by_kind) == 1 and (kind := next(iter(by_kind))) in KINDS:
        return kind, files
    held: list[str] = []
    for kind, those in sorted(by_kind.items()):
        names = ", ".join(file.name for file in those[:_NAMED_FILES])
        more = f" and {len(those) - _NAMED_FILES} more" if len(those) > _NAMED_FILES else ""
        held.append(f"{names}{more} ({kind})")
    kinds = sorted(by_kind.keys() & KINDS, key=lambda kind: (-len(by_kind[kind]), kind))
    remedy = f"read one kind of it, such as by --data {kinds[0]}:{path}, or " if kinds else ""
    raise ConfigError(
        f"{path} can't be read as one text, as it holds {'; '.join(held)}: {remedy}convert, "
        "unpack or remove files until all are text, JSON lines or Parquet."
    )


def kind_of(path: Path) -> str:
    """``text``, ``jsonl``, ``parquet``, or in other words what else a file holds. The contents
    decide, and the name where they can't. Errors are left to its reader."""
    head = b""
    with suppress(DataError), open_unpacked(path) as (file, _):
        head = file.read(_HEAD_BYTES)
    ending = Path(path.name.lower().removesuffix(".gz").removesuffix(".gzip")).suffix
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    # The reader of Parquet says better what is wrong with it.
    if head.translate(None, _CONTROL) != head and ending != ".parquet":
        return "not text"
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    start = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if match := _OBJECT.match(start):
        first, is_whole, _ = start.partition(b"\n")
        return OTHER_JSON if match[1] or (is_whole and not _is_object(first)) else JSONL
    return OTHER_JSON if ending == ".json" and start else TEXT


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file: its contents, decompressed, and the raw file. Raises DataError."""
    try:
        with path.open("rb") as raw:
            if path.suffix.lower() in (".gz", ".gzip") or raw.peek(2).startswith(_GZIP):
                with gzip.open(raw) as file:
                    yield cast("BinaryIO", file), raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} can't be read ({error}): replace or remove it, or correct its permissions."
        ) from error


# Readers


def read_text(files: Sequence[Path], reading: ReadProgress) -> Iterator[Document]:
    """The texts of files, long ones in parts, of which the last hundredth is held out."""
    for path in files:
        with open_unpacked(path) as (file, raw):
            size = path.stat().st_size
            if file is not raw:  # the size that it has unpacked is known only at its end
                size = sum(map(len, iter(lambda: file.read(PART_BYTES), b"")))
                file.seek(0)
            left = size - max(SHORTEST_TAIL, size // TAIL_SHARE)
            for part, is_last in in_parts(file):
                reading.at(raw.tell())
                if size < LONG_BYTES:
                    yield Document(part, None, is_last, path)
                elif 0 < left <= len(part):
                    end = cut_before(part, left)
                    yield Document(part[:end], False, True, path)
                    yield Document(part[end:], True, is_last, path)
                else:
                    yield Document(part, left <= 0, is_last, path)
                left -= len(part)
            reading.at(raw.tell(), is_end=True)


def in_parts(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """A text in parts, and whether each is the last."""
    part = file.read(PART_BYTES)
    while part:
        following = file.read(PART_BYTES)
        end = cut_before(part, len(part)) if following else len(part)
        yield part[:end], not following
        part = part[end:] + following


def cut_before(text: bytes, end: int) -> int:
    """Position to cut a text, at ``end`` or before it: after a line, or else between characters."""
    if line := text.rfind(b"\n", 0, end) + 1:
        return line
    last = range(max(1, end - _LONGEST_CHARACTER), min(end, len(text) - 1) + 1)
    return max((place for place in last if text[place] & 0xC0 != 0x80), default=end)


def read_jsonl(files: Sequence[Path], field: str, reading: ReadProgress) -> Iterator[Document]:
    """The text in one field of each line. Raises DataError that names the line."""
    for path in files:
        with open_unpacked(path) as (file, raw):
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                reading.at(raw.tell())
                if line.strip():
                    yield from _field_of(line, field, f"{path}:{number}")
            reading.at(raw.tell(), is_end=True)


def _field_of(line: bytes, field: str, where: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not a JSON object ({error}): correct or remove that line, or read the "
            "file as text with --data text:PATH."
        ) from None
    if not isinstance(record, dict) or field not in record:
        content = cast("dict[str, Any]", record) if isinstance(record, dict) else {}
        names = [f"{name:.40}" for name, value in content.items() if isinstance(value, str)]
        others = f", but {', '.join(names[:_NAMED_FIELDS])}" if names else ""
        raise DataError(
            f"{where} has no field {field!r}{others}: name the field with --field, or correct that "
            "line."
        )
    return _checked(cast("Any", record)[field], field, where)


def read_parquet(files: Sequence[Path], field: str, reading: ReadProgress) -> Iterator[Document]:
    """The text in one column. Raises ConfigError if pyarrow is missing, DataError."""
    modules = ("pyarrow", "pyarrow.parquet")
    library, parquet = (load_optional(one, str(files[0]), "parquet") for one in modules)
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                if field not in file.schema_arrow.names:
                    names = ", ".join(file.schema_arrow.names)
                    raise DataError(
                        f"{path} has no column {field!r}, only {names}: name one of them with "
                        "--field."
                    )
                size, rows, seen = path.stat().st_size, max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(
                    batch_size=_ROWS, columns=[field], use_threads=False
                ):
                    seen += batch.num_rows
                    reading.at(size * seen // rows)
                    for value in batch.column(0).to_pylist():
                        yield from _checked(value, field, str(path))
                reading.at(size, is_end=True)
        # ValueError includes bytes that are not UTF-8.
        except (library.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path} can't be read as Parquet ({error}): replace or remove it."
            ) from error


def _checked(value: object, field: str, where: str) -> Iterator[Document]:
    if isinstance(value, bytes):  # Parquet of Impala and ClickHouse does not mark text as such
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{where}: {field!r} holds bytes that are not text in UTF-8: write the column as "
                "strings, or name another one with --field."
            ) from None
    if not isinstance(value, str | None):
        raise DataError(
            f"{where}: {field!r} holds {_VALUES.get(type(value), 'a number')}, not text: name "
            "another field with --field."
        )
    # JSON can hold half of a surrogate pair, which UTF-8 can't.
    return iter([Document(value.encode(errors="replace"))] if value else [])
