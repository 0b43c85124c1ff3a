"""Documents of text, JSON lines and Parquet files, one at a time, whatever the size of the file."""

import glob
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from lowcomm_node.errors import ConfigError, DataError

ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"),
    "parquet": (".parquet",),
    "text": ("",),
}
"""File names of each kind in a folder; a folder of text is taken whole."""
LARGEST_PIECE = 64 << 10
"""Bytes of a text that are held out or trained on as one; a longer text is cut at line ends."""
SMALLEST_PIECE = 1 << 10
_PIECES = 256
_LONGEST_LINE = 64 << 20
_LONGEST_CHARACTER = 4
_ROWS = 256


def find_files(path: str, kind: str) -> list[Path]:
    """Files of one kind, sorted: the path itself, those in the folder at any depth (not hidden), or a glob's."""
    root = Path(os.path.expanduser(path))  # noqa: PTH111, Path's own raises RuntimeError on a user it does not know
    if root.is_file():
        return [root]
    if root.is_dir():
        inside = (file for file in root.rglob("*") if not _is_hidden(file.relative_to(root)))
        return sorted(file for file in inside if file.is_file() and file.name.endswith(ENDINGS[kind]))
    return sorted(file for file in map(Path, glob.glob(str(root), recursive=True)) if file.is_file())  # noqa: PTH207


def read_text(files: Sequence[Path]) -> Iterator[tuple[bytes, bool]]:
    """Pieces of text files, and whether each is the last of its file. A file with gzip's ending is unpacked."""
    # Pieces of a small corpus are small, so that it, too, has enough of them to hold one in a hundred out.
    total = sum(path.stat().st_size for path in files)
    size = min(LARGEST_PIECE, max(SMALLEST_PIECE, total // _PIECES))
    for path in files:
        with _open(path) as file:
            piece = file.read(size)
            while piece:
                following = file.read(size)
                cut = (piece.rfind(b"\n") + 1 or _last_character(piece)) if following else 0
                if cut:
                    piece, following = piece[:cut], piece[cut:] + following
                yield piece, not following
                piece = following


def read_jsonl(files: Sequence[Path], field: str) -> Iterator[bytes]:
    """The text in one field of each line. Raises DataError that names the line."""
    for path in files:
        with _open(path) as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if line.strip():
                    yield from _encoded(_field_of(line, field, f"{path}:{number}"))


def read_parquet(files: Sequence[Path], field: str) -> Iterator[bytes]:
    """The text in one column. Raises ConfigError if pyarrow is missing, DataError if the column is."""
    try:
        library: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"{files[0]} needs the library pyarrow: pip install 'lowcomm-node[parquet]'.") from None
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                if field not in file.schema_arrow.names:
                    names = ", ".join(file.schema_arrow.names)
                    raise DataError(f"{path} has no column {field!r}, only {names}: choose one of them.")
                for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                    for value in batch.column(0).to_pylist():
                        yield from _encoded(_checked(value, field, str(path)))
        except (library.ArrowException, OSError, ValueError) as error:  # also bytes that are not UTF-8
            raise DataError(f"{path} can't be read as Parquet ({error}): replace or remove it.") from error


def _last_character(piece: bytes) -> int:
    """Where the last character in UTF-8 begins; 0 if there is none."""
    last = range(max(0, len(piece) - _LONGEST_CHARACTER), len(piece))
    return max((place for place in last if piece[place] & 0xC0 != 0x80), default=0)


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not a JSON object ({error}): correct or remove that line.") from None
    if not isinstance(record, dict) or field not in record:
        raise DataError(f"{where} has no field {field!r}: correct that line, or name another field.")
    return _checked(record[field], field, where)


def _checked(value: object, field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} is a {type(value).__name__}, not text: name another field.")
    return value


def _encoded(text: str) -> Iterator[bytes]:
    # JSON can hold half of a surrogate pair, which UTF-8 can't.
    if text:
        yield text.encode(errors="replace")


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with cast("BinaryIO", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read ({error}): replace or remove it.") from error


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
