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

LARGEST_PIECE = 64 << 10
"""Bytes of a text that are held out or trained on as one. A longer text is cut at line ends."""
SMALLEST_PIECE = 1 << 10
_PIECES = 256
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


def find_files(path: str) -> list[Path]:
    """Sorted files: the path itself, those in the folder at any depth (not hidden), or a glob's."""
    root = _expanded(path)
    if root.is_file():
        return [root]
    if root.is_dir():
        return sorted(
            file
            for file in root.rglob("*")
            if file.is_file() and not _is_hidden(file.relative_to(root))
        )
    return sorted(
        file
        for file in map(Path, glob.glob(str(root), recursive=True))  # noqa: PTH207
        if file.is_file()
    )


def is_there(path: str) -> bool:
    """Whether a path, or a glob, names anything."""
    root = _expanded(path)
    return root.exists() or next(glob.iglob(str(root), recursive=True), None) is not None  # noqa: PTH207


def is_folder(path: str) -> bool:
    """Whether a path names a folder."""
    return _expanded(path).is_dir()


def read_text(
    files: Sequence[Path], reading: Reading | None = None
) -> Iterator[tuple[bytes, bool]]:
    """Pieces of text files, and whether each is the last of its file.

    A file packed with gzip is unpacked.
    """
    # A small corpus gets small pieces, so that one in a hundred can be held out.
    total = sum(path.stat().st_size for path in files)
    size = min(LARGEST_PIECE, max(SMALLEST_PIECE, total // _PIECES))
    reading = reading or Reading()
    for path in files:
        with _open(path) as (file, raw):
            piece = file.read(size)
            while piece:
                following = file.read(size)
                cut = (piece.rfind(b"\n") + 1 or _last_character(piece)) if following else 0
                if cut:
                    piece, following = piece[:cut], piece[cut:] + following
                reading.at(raw.tell())
                yield piece, not following
                piece = following
            reading.end(raw.tell())


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
            f"{files[0]} needs the library pyarrow: pip install 'lowcomm-node[parquet]'."
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


def _last_character(piece: bytes) -> int:
    """Where the last character in UTF-8 begins; 0 if there is none."""
    last = range(max(0, len(piece) - _LONGEST_CHARACTER), len(piece))
    return max((place for place in last if piece[place] & 0xC0 != 0x80), default=0)


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not a JSON object ({error}): correct or remove that line."
        ) from None
    if not isinstance(record, dict) or field not in record:
        raise DataError(
            f"{where} has no field {field!r}{_fields_of(record)}: name the field with --field, or "
            "correct that line."
        )
    return _checked(record[field], field, where)


def _checked(value: object, field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} is a {type(value).__name__}, not text: name another field with "
            "--field."
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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
