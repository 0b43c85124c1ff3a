"""The files of a run that are on this machine, each read once to see that it is the right one.

HOME/runs/FINGERPRINT/tokenizer.json
HOME/runs/FINGERPRINT/start/NAME          came from peers, or a link into the owner's folder
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from lowcomm_node.fetch.wanted import RunFile
from lowcomm_protocol.spec.sections import PIECE_BYTES

BLOCK = 1024 * 1024


@dataclass(frozen=True)
class Held:
    """A file that is here."""

    path: Path
    size: int
    digests: tuple[bytes, ...]
    """Of its pieces."""
    then: tuple[int, ...]
    """What would differ if somebody had written to it since."""


class Shelf:
    """Where verified files are, by their SHA-256."""

    def __init__(self) -> None:
        self._held: dict[bytes, Held] = {}

    def find(self, digest: bytes) -> Held | None:
        """A file that has been verified, and that nobody has touched since."""
        held = self._held.get(digest)
        return held if held is not None and _identity(held.path) == held.then else None

    def put(self, file: RunFile, path: Path, digests: Sequence[bytes]) -> None:
        """A file that is the right one, and the digests of its pieces."""
        size = path.stat().st_size
        self._held[file.sha256] = Held(path, size, tuple(digests), _identity(path))

    async def try_(self, file: RunFile, path: Path) -> bool:
        """Whether a file is the wanted one: then it is on the shelf."""
        held = self.find(file.sha256)
        if held is not None and held.path == path:
            return True
        stop = Event()
        try:
            digests = await asyncio.to_thread(_digests_of, file, path, stop)
        finally:
            stop.set()  # a thread can't be cancelled
        if digests is None:
            return False
        self.put(file, path, digests)
        return True


def link(path: Path, target: Path) -> None:
    """Have ``path`` lead to a file of the owner's, so that a later start finds it again."""
    if path.exists() and path.samefile(target):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.absolute())
    fresh.replace(path)


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when somebody writes to a file; empty if there is none."""
    with suppress(OSError):
        found = path.stat()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return ()


def _digests_of(file: RunFile, path: Path, stop: Event) -> list[bytes] | None:
    """The digests of the pieces of a file; None if it is another, or can't be read."""
    whole, digests = sha256(), list[bytes]()
    try:
        with path.open("rb") as opened:
            if not file.takes(os.fstat(opened.fileno()).st_size):
                return None
            piece, size = sha256(), 0
            while not stop.is_set() and (block := opened.read(BLOCK)):
                whole.update(block)
                piece.update(block)
                size += len(block)
                if size % PIECE_BYTES == 0:
                    digests.append(piece.digest())
                    piece = sha256()
            if size % PIECE_BYTES:
                digests.append(piece.digest())
    except OSError:
        return None
    return digests if whole.digest() == file.sha256 else None
