"""Documents of text, JSON lines and Parquet files, one at a time, for files of any size."""

import glob
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lowcomm_node.data.kinds import is_packed
from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import install

PART_BYTES = 1 << 20
"""Bytes of a text that are tokenized at once. A longer one is cut after lines, where the next part
follows as if it had not been cut."""
LONG_BYTES = 256 << 10
"""Bytes of a text file from which on its end is held out, instead of all of it or nothing."""
SHORTEST_TAIL = 4 << 10
"""Bytes of such an end."""
_TAIL_SHARE = 100
_LONGEST_LINE = 64 << 20
_LONGEST_CHARACTER = 4
_ROWS = 256
_NAMED_FIELDS = 8


@dataclass
class Reading:
    """The progress of reading, in bytes on disk; packed files count packed."""

    done: int = 0
    """Of all finished files and of the current one."""
    finished: int = 0
    """Of all finished files."""

    def at(self, place: int) -> None:
        """``place`` bytes of the current file are read."""
        self.done = self.finished + place

    def end(self, size: int) -> None:
        """The current file, of ``size`` bytes, is finished."""
        self.finished += size
        self.done = self.finished


@dataclass(frozen=True)
class Text:
    """A text of a file, or a part of a long one."""

    text: bytes
    held_out: bool | None = None
    """Of a long file; None: to be decided by the content."""
    ends: bool = True
    """Whether the text ends here, rather than in the next part."""
    file: Path | None = None


def find_files(path: str) -> list[Path]:
    """Sorted files: the path itself, those in the folder at any depth (not hidden), or a glob's.

    Links are followed; a folder or file that several of them lead to is read once. Raises
    ConfigError if a folder can't be read.
    """
    root = _expanded(path)
    if root.is_file():
        return [root]
    before, deep, after = f"/{root}/".partition("/**/")
    if root.is_dir():
        found = _walk(root)
    elif deep:
        folders = sorted(map(Path, glob.glob(f"{before[1:]}/" if before else "./")))  # noqa: PTH207
        last = after.rstrip("/") or "*"
        found = (file for folder in folders for file in _walk(folder) if file.match(last))
    else:
        found = map(Path, glob.glob(str(root)))  # noqa: PTH207
    once: dict[tuple[int, int], Path] = {}
    for file in sorted(found):
        if file.is_file():
            status = file.stat()
            once.setdefault((status.st_dev, status.st_ino), file)
    return list(once.values())


def _walk(root: Path) -> Iterator[Path]:
    """The files in a folder at any depth, also behind links, each folder once."""

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename} can't be read ({error.strerror}): correct its permissions, or name "
            "a folder without it."
        )

    seen = set[tuple[int, int]]()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = Path(folder).stat()
        if (place := (status.st_dev, status.st_ino)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def is_there(path: str) -> bool:
    """Whether a path, or a glob, names anything."""
    root = _expanded(path)
    return root.exists() or next(glob.iglob(str(root), recursive=True), None) is not None  # noqa: PTH207


def is_folder(path: str) -> bool:
    """Whether a path names a folder."""
    return _expanded(path).is_dir()


def read_text(files: Sequence[Path], reading: Reading | None = None) -> Iterator[Text]:
    """The texts of files, long ones in parts, of which the last hundredth is held out.

    A file packed with gzip is unpacked.
    """
    reading = reading or Reading()
    for path in files:
        with _open(path) as (file, raw):
            size = path.stat().st_size
            if file is not raw:  # the size that it has unpacked is known only at its end
                size = sum(map(len, iter(lambda: file.read(PART_BYTES), b"")))
                file.seek(0)
            left = size - max(SHORTEST_TAIL, size // _TAIL_SHARE)
            for part, is_last in in_parts(file):
                reading.at(raw.tell())
                if size < LONG_BYTES:
                    yield Text(part, None, is_last, path)
                elif 0 < left <= len(part):
                    end = cut_before(part, left)
                    yield Text(part[:end], False, True, path)
                    yield Text(part[end:], True, is_last, path)
                else:
                    yield Text(part, left <= 0, is_last, path)
                left -= len(part)
            reading.end(raw.tell())


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


def read_jsonl(
    files: Sequence[Path], field: str, reading: Reading | None = None
) -> Iterator[bytes]:
    """The text in one field of each line. Raises DataError that names the line."""
    reading = reading or Reading()
    for path in files:
        with _open(path) as (file, raw):
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                reading.at(raw.tell())
                if line.strip():
                    yield from _encoded(_field_of(line, field, f"{path}:{number}"))
            reading.end(raw.tell())


def read_parquet(
    files: Sequence[Path], field: str, reading: Reading | None = None
) -> Iterator[bytes]:
    """The text in one column.

    Raises ConfigError if pyarrow is missing, DataError if the column is.
    """
    try:
        library: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{files[0]} needs the library pyarrow: {install('[parquet]')}."
        ) from None
    reading = reading or Reading()
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
                        yield from _encoded(_checked(value, field, str(path)))
                reading.end(size)
        # ValueError includes bytes that are not UTF-8.
        except (library.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{path} can't be read as Parquet ({error}): replace or remove it."
            ) from error


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not a JSON object ({error}): correct or remove that line, or read the "
            "file as text with --data text:PATH."
        ) from None
    if not isinstance(record, dict) or field not in record:
        raise DataError(
            f"{where} has no field {field!r}{_fields_of(record)}: name the field with --field, or "
            "correct that line."
        )
    return _checked(record[field], field, where)


_KINDS = {bool: "true or false", list: "a list", dict: "an object"}


def _checked(value: object, field: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):  # Parquet of Impala and ClickHouse does not mark text as such
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{where}: {field!r} holds bytes that are not text in UTF-8: write the column as "
                "strings, or name another one with --field."
            ) from None
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} holds {_KINDS.get(type(value), 'a number')}, not text: name "
            "another field with --field."
        )
    return value


def _fields_of(record: object) -> str:
    """The first fields of a line that hold text, to choose from."""
    content = cast("dict[str, Any]", record) if isinstance(record, dict) else {}
    names = [f"{name:.40}" for name, value in content.items() if isinstance(value, str)]
    return f", but {', '.join(names[:_NAMED_FIELDS])}" if names else ""


def _encoded(text: str) -> Iterator[bytes]:
    # JSON can hold half of a surrogate pair, which UTF-8 can't.
    if text:
        yield text.encode(errors="replace")


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The contents of a file, and the file as it lies on the disk, which tells how far it is
    read."""
    try:
        with path.open("rb") as raw:
            if is_packed(path, raw.peek(2)[:2]):
                with gzip.open(raw) as file:
                    yield cast("BinaryIO", file), raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read ({error}): replace or remove it.") from error


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111, Path's own raises RuntimeError on a user it does not know
