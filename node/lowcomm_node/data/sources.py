"""Files that an owner's source names, and the kind of text in each."""

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import load_optional

TEXT, JSONL, PARQUET, ARROW, TOKENS = "text", "jsonl", "parquet", "arrow", "tokens"
KINDS = {TEXT, JSONL, PARQUET, ARROW, TOKENS}
TABLES = {JSONL, PARQUET, ARROW}
OTHER_JSON = "JSON, but not one object a line"
CSV = "a table: write it as JSON lines or Parquet"
_ENDINGS = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
}
_MAGIC = {
    b"PAR1": PARQUET,
    b"ARROW1": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    b"\xff\xfe": "UTF-16 rather than UTF-8",
    b"\xfe\xff": "UTF-16 rather than UTF-8",
}
_PACKED = (".gz", ".gzip", ".zst", ".zstd")
_GZIP, _ZSTD, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
_BESIDE = ("readme.md", "license", "state.json", "dataset_info", "dataset_dict", "cache-")
"""Beginnings of the names of files beside the text of a dataset of Hugging Face."""
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_OBJECT = re.compile(rb'(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')  # a JSON object, or a list of them
_HEAD_BYTES = 4096  # bytes of each file that are read to find its kind
_BUFFER_BYTES = 1 << 20
_LARGEST_WINDOW = 128 << 20  # of zstd, as its own program accepts with --long
_NAMED_FILES = 3  # of each kind in a message


def expanded(path: str) -> Path:
    """A path with ``~`` replaced by the home of its user, where there is such a user."""
    # Path.expanduser raises RuntimeError on an unknown user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def is_there(source: str) -> bool:
    """Whether the path, or glob, of a source names anything."""
    root = expanded(_kind_and_path(source)[1])
    return root.exists() or next(glob.iglob(str(root), recursive=True), None) is not None  # noqa: PTH207


def find_files(source: str) -> tuple[str, list[Path]]:
    """The kind of the files that a source names, and these, sorted.

    ``KIND:`` before a folder chooses its files of that kind; a file or a glob is taken at the
    owner's word. Raises ConfigError if there is no file, or files of several kinds.
    """
    named, path = _kind_and_path(source)
    is_folder = expanded(path).is_dir()
    kinds = {file: named if named and not is_folder else kind_of(file) for file in _files_at(path)}
    text = {f: kind for f, kind in kinds.items() if not f.name.lower().startswith(_BESIDE)}
    if is_folder and len(set(text.values())) == 1 and TABLES.issuperset(text.values()):
        kinds = text
    if named:
        kinds = {file: kind for file, kind in kinds.items() if kind == named}
    if not kinds:
        raise ConfigError(f"{source} names no {named or TEXT} file: check the path.")
    by_kind: dict[str, list[Path]] = {}
    for file, kind in kinds.items():
        by_kind.setdefault(kind, []).append(file)
    readable = sorted(by_kind.keys() & KINDS, key=lambda kind: (-len(by_kind[kind]), kind))
    if len(by_kind) == 1 and readable:
        return readable[0], list(kinds)
    held: list[str] = []
    for kind, files in sorted(by_kind.items()):
        names = ", ".join(file.name for file in files[:_NAMED_FILES])
        more = f" and {len(files) - _NAMED_FILES} more" if len(files) > _NAMED_FILES else ""
        held.append(f"{names}{more} ({kind})")
    remedy = f"read one kind of it, such as by {readable[0]}:{path}, or " if readable else ""
    raise ConfigError(
        f"{path} can't be read as one text, as it holds {'; '.join(held)}: {remedy}convert, "
        "unpack or remove files until all are text, JSON lines or Parquet."
    )


def _kind_and_path(source: str) -> tuple[str | None, str]:
    kind, colon, path = source.partition(":")
    return (kind, path) if colon and kind in KINDS else (None, source)


def _files_at(path: str) -> list[Path]:
    """Sorted files: the path itself, those in the folder at any depth (not hidden), or a glob's.
    Links are followed; what several lead to is read once. Raises ConfigError."""
    root, seen = expanded(path), dict[tuple[int, int], Path]()

    def is_new(path: Path) -> bool:
        status = path.stat()
        return seen.setdefault((status.st_dev, status.st_ino), path) is path

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename} can't be read ({error.strerror}): correct its permissions, or name "
            "a folder without it."
        )

    files = [root] if root.is_file() else [*map(Path, glob.glob(str(root), recursive=True))]  # noqa: PTH207
    if root.is_dir():
        files.clear()
        for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
            if is_new(Path(folder)):
                files += [Path(folder, name) for name in names if not name.startswith(".")]
                folders[:] = sorted(name for name in folders if not name.startswith("."))
            else:
                folders.clear()
    return [file for file in sorted(files) if file.is_file() and is_new(file)]


def kind_of(path: Path) -> str:
    """A kind, or in other words what else a file holds. The contents decide, and the name where
    they can't. Errors are left to its reader."""
    head = b""
    with suppress(DataError), open_unpacked(path) as (file, _):
        head = file.read(_HEAD_BYTES)
    name = Path(path.name.lower())
    ending = Path(name.stem).suffix if name.suffix in _PACKED else name.suffix
    if ending == ".bin":
        return TOKENS
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
        line, is_whole, _ = start.partition(b"\n")
        is_line = not is_whole or line.rstrip().endswith(b"}")
        return JSONL if is_line and not match[1] else OTHER_JSON
    return OTHER_JSON if ending == ".json" and start else TEXT


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
                    yield cast("BinaryIO", io.BufferedReader(reader, _BUFFER_BYTES)), raw
            else:
                yield raw, raw
    except Exception as error:
        is_ours = isinstance(error, OSError | EOFError | zlib.error)
        if not is_ours and type(error).__name__ != "ZstdError":
            raise
        raise DataError(
            f"{path} can't be read ({error}): replace or remove it, or correct its permissions."
        ) from error
