"""Documents of files of any size, one at a time: text, JSON lines, Parquet, Arrow, tokens.

A reader begins at any place that it has given before, and goes on with the very next document. A
long text comes in parts, so that memory stays flat.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import file_digest, sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from lowcomm_node.data.chat import ChatTemplate
from lowcomm_node.data.sources import JSONL, PARQUET, TABLES, TOKENS, kind_of, open_unpacked
from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import load_optional

PART_BYTES = 1 << 20  # of a text that are tokenized at once: a longer text is cut after lines
_LONGEST_LINE = 64 << 20
_LONGEST_CHARACTER = 4
_TOKENS_OF_MAGIC = {20240520: "<u2", 20240801: "<u4"}
"""Type of the tokens, by the first number of files of llm.c."""
_HEADER_BYTES = 1024
_ROWS = 256
_NAMED_FIELDS = 8  # in a message
_VALUES = {bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Document:
    """A text, or a part of a long text."""

    text: bytes
    """UTF-8 as a rule; tokens of 4 bytes if ``is_tokens``; JSON for `encode_chat`."""
    key: bytes
    """Digest of the whole text."""
    size: int
    """Bytes of the whole text."""
    place: int | None
    """Offset behind it in its file: a byte, unpacked, a row, or a token. None: no reader can begin
    there."""
    read: int = 0
    """Bytes that were read of its file, or of all files, on the disk; packed files count packed."""
    begins: bool = True
    ends: bool = True
    """Whether the text begins, or ends, with this part."""
    file: Path | None = None
    """The owner's file that it comes from."""
    is_tokens: bool = False
    held_out: bool = False


@dataclass(frozen=True)
class ReadOptions:
    """What a file's documents are."""

    column: str = "text"
    separator: str = ""
    """Text between the documents of a text file; empty: a file is a document."""
    end_token: int | None = None
    """Token between the documents of a file of tokens; None: a file is a document."""
    chat: ChatTemplate | None = None
    """Reads the column as conversations."""


@dataclass(frozen=True)
class SourceFile:
    """A file of an owner's source."""

    kind: str
    path: Path
    is_split: bool = False
    """Whether its name, or its folder's in a dataset, says that it is a split for evaluation."""


@dataclass(frozen=True)
class TextFiles:
    """The documents of several files."""

    files: tuple[SourceFile, ...]
    options: ReadOptions

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each file on disk."""
        return [file.path.stat().st_size for file in self.files]

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        return sum(self.sizes)

    def fingerprint(self) -> list[Any]:
        """Changes when the text does."""
        # Size and modification time stand for the content: reading terabytes at each start would
        # take too long.
        stats = [
            (file.kind, str(file.path), file.is_split, size, file.path.stat().st_mtime_ns)
            for file, size in zip(self.files, self.sizes, strict=True)
        ]
        chat = self.options.chat.source if self.options.chat else ""
        return [stats, self.options.column, self.options.separator, chat]

    def documents(
        self, file: int = 0, place: int = 0, is_within: bool = False
    ) -> Iterator[tuple[int, Document]]:
        """Documents from a place of a file on, with the numbers of their files; ``is_within``:
        whether the place is within a document. Raises ConfigError, DataError."""
        before = sum(self.sizes[:file])
        for number, source in enumerate(self.files[file:], file):
            for document in read_documents(source, self.options, place, is_within):
                if document.text or not document.begins:
                    yield number, replace(document, read=before + document.read, file=source.path)
            before, place, is_within = before + self.sizes[number], 0, False


def read_documents(
    source: SourceFile, options: ReadOptions, start: int = 0, is_within: bool = False
) -> Iterator[Document]:
    """The documents of a file from the place ``start`` on. Raises ConfigError, DataError."""
    path = source.path
    if source.kind == TOKENS:
        return _read_tokens(path, options.end_token, start, is_within)
    if source.kind in TABLES:
        return _read_table(source, options, start)
    if options.chat:
        raise ConfigError(f"{path} is text, not conversations: leave --chat away, or that file.")
    if options.separator:
        return _read_separated(path, options.separator.encode(), start)
    return _read_text(path, start, is_within)


# Text


def _read_text(path: Path, start: int, is_within: bool) -> Iterator[Document]:
    """The text of a file, in parts."""
    # Unpacked, its size is known only at its end; only all of it shows whether it is a copy.
    with open_unpacked(path) as (file, _):
        key, size = file_digest(cast("Any", file), "sha256").digest(), file.tell()
    with open_unpacked(path) as (file, raw):
        _skip(file, start)
        for part, is_last in _in_parts(file):
            start += len(part)
            yield Document(part, key, size, start, raw.tell(), not is_within, is_last)
            is_within = not is_last


def _read_separated(path: Path, separator: bytes, start: int) -> Iterator[Document]:
    """The texts between separators in a text file. Raises DataError."""
    with open_unpacked(path) as (file, raw):
        _skip(file, start)
        rest, is_last = b"", False
        while not is_last:
            part = file.read(PART_BYTES)
            is_last = not part
            *texts, rest = (rest + part + separator * is_last).split(separator)
            for text in texts:
                start += len(text) + len(separator)
                if text.strip():
                    yield from _cut(text.strip(b"\r\n"), start, raw.tell())
            if len(rest) > _LONGEST_LINE:
                raise DataError(
                    f"{path} has {len(rest):,} bytes without {separator.decode()!r}: name the "
                    "text between its documents with --separator, or leave that away."
                )


def _cut(text: bytes, place: int | None, read: int) -> Iterator[Document]:
    """A text in memory as a document, in parts."""
    key, begins = sha256(text).digest(), True
    for part, is_last in _in_parts(BytesIO(text)):
        after = place if is_last else None
        yield Document(part, key, len(text), after, read, begins, is_last)
        begins = False


def _in_parts(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
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


def _skip(file: BinaryIO, count: int) -> int:
    """Pass over ``count`` bytes; returns their lines. Packed files can't jump."""
    lines = 0
    while count > 0 and (part := file.read(min(count, PART_BYTES))):
        lines, count = lines + part.count(b"\n"), count - len(part)
    return lines


# Tables


Row = tuple[object, str, int, int]
"""Value of the column, where it stands, the place behind it, and bytes of the file read."""


def _read_table(source: SourceFile, options: ReadOptions, start: int) -> Iterator[Document]:
    """The texts, or conversations, in one column."""
    read_rows = _lines if source.kind == JSONL else _rows
    for value, where, place, read in read_rows(source.path, options.column, start):
        if options.chat is None:
            if text := _text_of(value, options.column, where):
                yield from _cut(text, place, read)
            continue
        texts = options.chat.read(value, options.column, where)
        for left, text in zip(reversed(range(len(texts))), texts, strict=True):
            after = None if left else place
            yield Document(text, sha256(text).digest(), len(text), after, read)


def _lines(path: Path, field: str, start: int) -> Iterator[Row]:
    """The field of each line of JSON. Raises DataError that names the line."""
    with open_unpacked(path) as (file, raw):
        number = _skip(file, start)
        while line := file.readline(_LONGEST_LINE):
            number, start = number + 1, start + len(line)
            where = f"{path}:{number}"
            if line.strip():
                yield _field_of(line, field, where), where, start, raw.tell()


def _field_of(line: bytes, field: str, where: str) -> object:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not a JSON object ({error}): correct or remove that line, or read the "
            "file as text with --data text:PATH."
        ) from None
    content = cast("dict[str, Any]", record) if isinstance(record, dict) else {}
    if field not in content:
        names = [f"{name:.40}" for name, value in content.items() if isinstance(value, str)]
        others = f", but {', '.join(names[:_NAMED_FIELDS])}" if names else ""
        raise DataError(
            f"{where} has no field {field!r}{others}: name the field with --field, or correct that "
            "line."
        )
    return content[field]


def _rows(path: Path, column: str, start: int) -> Iterator[Row]:
    """The column of each row of Parquet or Arrow. Raises ConfigError if pyarrow is missing,
    DataError."""
    library = load_optional("pyarrow", str(path), "parquet")
    kind = kind_of(path)
    read_batches = _parquet_batches if kind == PARQUET else _arrow_batches
    try:
        for first, read, batch in read_batches(path, column, start):
            for row, value in enumerate(batch.column(column).to_pylist(), first + 1):
                if row > start:
                    yield value, str(path), row, read
    # ValueError includes bytes that are not UTF-8.
    except (library.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be read as {kind.title()} ({error}): replace or remove it."
        ) from error


Batches = Iterator[tuple[int, int, Any]]
"""Number of the first row, bytes of the file read, and rows of batches, without batches far before
the row to start at."""


def _parquet_batches(path: Path, column: str, start: int) -> Batches:
    file = load_optional("pyarrow.parquet", str(path), "parquet").ParquetFile(path)
    _require(column, file.schema_arrow.names, path)
    size, rows, first = path.stat().st_size, file.metadata.num_rows, 0
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if first + count <= start:
            first += count
            continue
        for batch in file.iter_batches(_ROWS, [group], [column], use_threads=False):
            yield first, size * first // rows, batch
            first += batch.num_rows


def _arrow_batches(path: Path, column: str, start: int) -> Batches:
    library, ipc = (
        load_optional(name, str(path), "parquet") for name in ("pyarrow", "pyarrow.ipc")
    )
    with library.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        _require(column, reader.schema.names, path)
        first = 0
        whole = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in whole:
            for row in range(0, batch.num_rows, _ROWS) if first + batch.num_rows > start else ():
                yield first + row, source.tell(), batch.slice(row, _ROWS)
            first += batch.num_rows


def _require(column: str, names: Sequence[str], path: Path) -> None:
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}, only {', '.join(names)}: name one of them with "
            "--field."
        )


def _text_of(value: object, field: str, where: str) -> bytes:
    """UTF-8 of a value; empty where there is none. Raises DataError if it is no text."""
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
    return (value or "").encode(errors="replace")


# Tokens


def _read_tokens(path: Path, end: int | None, start: int, is_within: bool) -> Iterator[Document]:
    """Documents of llm.c's files, or of nanoGPT's, which have no header, without the token ``end``
    between them; some are empty. One of more than a million tokens comes in parts and passes for no
    copy of another."""
    first = np.fromfile(path, "<i4", 1)
    kind = _TOKENS_OF_MAGIC.get(int(first[0]) if first.size else 0)
    header, kind = (_HEADER_BYTES, kind) if kind else (0, "<u2")
    count = (path.stat().st_size - header) // int(kind[-1])
    while start < count:
        offset = header + start * int(kind[-1])
        block = np.fromfile(path, kind, PART_BYTES, offset=offset)
        ends = np.flatnonzero(block == end) if end is not None else block[:0]
        if not is_within and len(ends) and not ends[0]:
            ends = ends[1:]  # it stands before this document
        is_last = start + len(block) >= count
        texts = np.split(block, ends)
        if len(ends) and not is_last:
            texts.pop()  # the next block begins with it
        for text in texts:
            begins, is_whole = not is_within, is_last or len(ends) > 0
            key = b"" if begins and is_whole else f"{path.name}:{start}".encode()
            start += len(text)
            text = text[1:] if begins and len(text) and text[0] == end else text
            data = text.astype("<u4").tobytes()
            yield Document(
                *(data, sha256(key or data).digest(), len(data), start),
                *(offset, begins, is_whole),
                is_tokens=True,
            )
            is_within = not is_whole
