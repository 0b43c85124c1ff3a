"""Documents of files of any size, one at a time: text, JSON lines, Parquet, Arrow, tokens."""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import load_optional

PART_BYTES = 1 << 20  # of a text that are tokenized at once: a longer text is cut after lines
LONG_BYTES = 256 << 10  # of a text file whose end is held out, instead of all of it or nothing
SHORTEST_TAIL = 4 << 10  # bytes of such an end
TAIL_SHARE = 100
TEXT, JSONL, PARQUET, ARROW, TOKENS = "text", "jsonl", "parquet", "arrow", "tokens"
KINDS = (TEXT, JSONL, PARQUET, ARROW)
OTHER_JSON = "JSON, but not one object a line"
TABLE = "a table: write it as JSON lines or Parquet"
_ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".csv": TABLE, ".tsv": TABLE, ".parquet": PARQUET}
_ENDINGS[".arrow"] = ARROW
_PACKED = (".gz", ".gzip", ".zst", ".zstd")
_GZIP, _ZSTD, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
_BESIDE = ("readme.md", "license", "state.json", "dataset_info", "dataset_dict", "cache-")
"""Beginnings of the names of files beside the text of a dataset of Hugging Face."""
_MAGIC = {
    b"PAR1": PARQUET,
    b"ARROW1": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    b"\xff\xfe": "UTF-16 rather than UTF-8",
    b"\xfe\xff": "UTF-16 rather than UTF-8",
}
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_OBJECT = re.compile(rb'(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')  # a JSON object, or a list of them
_HEAD_BYTES = 4096  # bytes of each file that are read to find its kind
_LONGEST_LINE = 64 << 20
_LONGEST_CHARACTER = 4
_LARGEST_WINDOW = 128 << 20  # of zstd, as its own program accepts with --long
_MAGIC_OF_TOKENS = {20240520: "<u2", 20240801: "<u4"}
"""First number of files of llm.c."""
_HEADER_BYTES = 1024
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
    place: int = 0
    """Offset behind it in its file: a byte, unpacked, or a row."""
    key: bytes = b""
    """Digest of the whole text, of which this is a part; empty: this is the whole."""


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
    tables = [kind for kind in (JSONL, PARQUET, ARROW) if kind in by_kind]
    others = chain.from_iterable(those for kind, those in by_kind.items() if kind not in tables)
    if is_folder and len(tables) == 1 and all(f.name.lower().startswith(_BESIDE) for f in others):
        those = by_kind[tables[0]]
        return tables[0], [file for file in those if not file.name.startswith(_BESIDE)] or those
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
    name = Path(path.name.lower())
    ending = Path(name.stem).suffix if name.suffix in _PACKED else name.suffix
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    # The reader of Parquet says better what is wrong with it.
    if head.translate(None, _CONTROL) != head and ending not in (".parquet", ".arrow"):
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
            elif raw.peek(4).startswith(_ZSTD):
                library = load_optional("zstandard", str(path), "zstd")
                unpacker = library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
                with unpacker.stream_reader(raw, read_across_frames=True) as reader:
                    yield cast("BinaryIO", io.BufferedReader(reader, PART_BYTES)), raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} can't be read ({error}): replace or remove it, or correct its permissions."
    )


def _skip(file: BinaryIO, count: int) -> int:
    """Pass over ``count`` bytes; returns their lines. Packed files can't jump."""
    lines = 0
    while count > 0 and (part := file.read(min(count, PART_BYTES))):
        lines, count = lines + part.count(b"\n"), count - len(part)
    return lines


# Readers


def read_text(
    files: Sequence[Path], reading: ReadProgress, start: int = 0, has_tails: bool = True
) -> Iterator[Document]:
    """The texts of files, long ones in parts, of which the last hundredth is held out unless
    ``has_tails`` is false; ``start``: a place in the first file."""
    for path in files:
        size, digest = 0, sha256()
        # Unpacked, its size is known only at its end; only all of it shows whether it is a copy.
        with open_unpacked(path) as (file, _):
            for part in iter(lambda: file.read(PART_BYTES), b""):
                size += len(part)
                digest.update(part)
        with open_unpacked(path) as (file, raw):
            _skip(file, start)
            place, start = start, 0
            left = size - place - max(SHORTEST_TAIL, size // TAIL_SHARE)
            for part, is_last in in_parts(file):
                reading.at(raw.tell())
                place += len(part)
                key = b"" if is_last and place == len(part) else digest.digest()
                document = Document(part, None, is_last, path, place, key)
                if size < LONG_BYTES or not has_tails:
                    yield document
                elif 0 < left <= len(part):
                    end = cut_before(part, left)
                    rest = place - len(part) + end
                    yield Document(part[:end], False, True, path, rest, digest.digest())
                    yield replace(document, text=part[end:], held_out=True)
                else:
                    yield replace(document, held_out=left <= 0)
                left -= len(part)
            reading.at(raw.tell(), is_end=True)


def read_separated(
    files: Sequence[Path], separator: bytes, reading: ReadProgress, start: int = 0
) -> Iterator[Document]:
    """The texts between separators in text files. Raises DataError."""
    for path in files:
        with open_unpacked(path) as (file, raw):
            _skip(file, start)
            place, rest, start = start, b"", 0
            while part := file.read(PART_BYTES):
                reading.at(raw.tell())
                *texts, rest = (rest + part).split(separator)
                for text in texts:
                    place += len(text) + len(separator)
                    if text.strip():
                        yield Document(text.strip(b"\r\n"), None, True, path, place)
                if len(rest) > _LONGEST_LINE:
                    raise DataError(
                        f"{path} has {len(rest):,} bytes without {separator.decode()!r}: name the "
                        "text between its documents with --separator, or leave that away."
                    )
            if rest.strip():
                yield Document(rest.strip(b"\r\n"), None, True, path, place + len(rest))
            reading.at(raw.tell(), is_end=True)


def read_tokens(
    files: Sequence[Path], end: int | None, reading: ReadProgress, start: int = 0
) -> Iterator[Document]:
    """Documents of llm.c's files, or of nanoGPT's, which have no header, as integers of 4 bytes
    without the token ``end`` between them; some are empty. One of more than a million tokens comes
    in parts and passes for no copy of another. Raises DataError."""
    for path in files:
        with open_unpacked(path) as (file, raw):
            header = np.frombuffer(file.read(_HEADER_BYTES)[: _HEADER_BYTES // 4 * 4], "<i4")
            kind = _MAGIC_OF_TOKENS.get(int(header[0]) if header.size else 0)
            place, kind, start = start or (_HEADER_BYTES if kind else 0), kind or "<u2", 0
            width, key, rest = int(kind[-1]), b"", np.empty(0, "<u4")
            raw.seek(place)
            while data := raw.read(PART_BYTES * width):
                reading.at(raw.tell())
                rest = np.concatenate([rest, np.frombuffer(data, kind).astype("<u4")])
                ends = np.flatnonzero(rest == end) if end is not None else []
                for text in np.split(rest, ends)[:-1] if len(ends) else []:
                    place += len(text) * width
                    text = text[1:] if len(text) and text[0] == end else text
                    yield Document(text.tobytes(), None, True, path, place, key)
                    key = b""
                rest = rest[ends[-1] :] if len(ends) else rest
                if len(rest) >= PART_BYTES:
                    key = key or sha256(f"{path.name}:{place}".encode()).digest()
                    place += len(rest) * width
                    text, rest = rest[1:] if rest[0] == end else rest, rest[:0]
                    yield Document(text.tobytes(), None, False, path, place, key)
            text = rest[1:] if len(rest) and rest[0] == end else rest
            place += len(rest) * width
            yield Document(text.tobytes(), None, True, path, place, key)
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


Take = Callable[[object, str, str], Iterator[Document]]
"""Makes documents of a value, which a field holds at a place of the owner's."""


def read_jsonl(
    files: Sequence[Path],
    field: str,
    reading: ReadProgress,
    start: int = 0,
    take: Take | None = None,
) -> Iterator[Document]:
    """The text in one field of each line. Raises DataError that names the line."""
    take = take or _checked
    for path in files:
        with open_unpacked(path) as (file, raw):
            number = _skip(file, start)
            place, start = start, 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                reading.at(raw.tell())
                place += len(line)
                if line.strip():
                    where = f"{path}:{number}"
                    for document in take(_field_of(line, field, where), field, where):
                        yield replace(document, place=place)
            reading.at(raw.tell(), is_end=True)


def _field_of(line: bytes, field: str, where: str) -> object:
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
    return cast("Any", record)[field]


def read_columns(
    files: Sequence[Path],
    field: str,
    reading: ReadProgress,
    start: int = 0,
    take: Take | None = None,
) -> Iterator[Document]:
    """The text in one column of Parquet or Arrow files. Raises ConfigError if pyarrow is missing,
    DataError."""
    take = take or _checked
    library = load_optional("pyarrow", str(files[0]), "parquet")
    for path in files:
        kind = "Parquet" if kind_of(path) == PARQUET else "Arrow"
        open_batches = _parquet_batches if kind == "Parquet" else _arrow_batches
        try:
            with open_batches(path, field, start) as (names, batches):
                if field not in names:
                    raise DataError(
                        f"{path} has no column {field!r}, only {', '.join(names)}: name one of "
                        "them with --field."
                    )
                for row, done, batch in batches:
                    reading.at(done)
                    first = max(row, start)
                    column = batch.column(batch.schema.get_field_index(field))
                    values = column.slice(first - row).to_pylist()
                    for place, value in enumerate(values, first + 1):
                        for document in take(value, field, str(path)):
                            yield replace(document, place=place)
                start = 0
                reading.at(path.stat().st_size, is_end=True)
        # ValueError includes bytes that are not UTF-8.
        except (library.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path} can't be read as {kind} ({error}): replace or remove it."
            ) from error


Batches = tuple[Sequence[str], Iterator[tuple[int, int, Any]]]
"""Names of columns; then first row, bytes of the file read and rows of each batch."""


@contextmanager
def _parquet_batches(path: Path, field: str, start: int) -> Iterator[Batches]:
    parquet = load_optional("pyarrow.parquet", str(path), "parquet")
    with parquet.ParquetFile(path) as file:
        size, rows = path.stat().st_size, max(1, file.metadata.num_rows)
        counts = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        row = group = 0
        while group < len(counts) and row + counts[group] <= start:
            row, group = row + counts[group], group + 1

        def batches() -> Iterator[tuple[int, int, Any]]:
            first, groups = row, list(range(group, len(counts)))
            for batch in file.iter_batches(_ROWS, groups, [field], use_threads=False):
                yield first, size * (first + batch.num_rows) // rows, batch
                first += batch.num_rows

        yield file.schema_arrow.names, batches()


@contextmanager
def _arrow_batches(path: Path, field: str, start: int) -> Iterator[Batches]:
    library, ipc = (load_optional(one, str(path), "parquet") for one in ("pyarrow", "pyarrow.ipc"))
    with library.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        whole = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader

        def batches() -> Iterator[tuple[int, int, Any]]:
            first = 0
            for batch in whole:
                if first + batch.num_rows > start:
                    for at in range(0, batch.num_rows, _ROWS):
                        yield first + at, source.tell(), batch.slice(at, _ROWS)
                first += batch.num_rows

        yield reader.schema.names, batches()


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
