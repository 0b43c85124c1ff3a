"""Digests of a file, read once from its beginning to its end, a block at a time."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.sections import PIECE_BYTES, StartFile, digest_of_pieces

BLOCK = 1024 * 1024


@dataclass(frozen=True)
class FileDigests:
    """SHA-256 of a file, and of its pieces of `PIECE_BYTES`."""

    size: int  # bytes
    sha256: bytes
    pieces: tuple[bytes, ...]


def read_digests(path: Path, stop: Event | None = None) -> FileDigests:
    """Read a file, unless ``stop`` is set before its end. Raises OSError."""
    whole, pieces, size = sha256(), [sha256()], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if size and size % PIECE_BYTES == 0:
                pieces.append(sha256())
            whole.update(block)
            pieces[-1].update(block)
            size += len(block)
            if stop is not None and stop.is_set():
                break
    return FileDigests(size, whole.digest(), tuple(piece.digest() for piece in pieces))


def pin(path: Path) -> StartFile:
    """Entry of a file for a specification. Raises ConfigError if it can't be read, ValueError if
    its name or size can't be pinned."""
    try:
        read = read_digests(path)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): see its rights and its disk."
        ) from None
    pieces = digest_of_pieces(read.pieces)
    return StartFile(name=path.name, size=read.size, sha256=read.sha256.hex(), pieces=pieces)
