"""The files of a run that are on this machine, each read once to see that it is the right one.

HOME/runs/FINGERPRINT/tokenizer.json
HOME/runs/FINGERPRINT/start/NAME          came from peers, or a link into the owner's folder
"""

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event

from lowcomm_node.run_files.wanted import RunFile

BLOCK = 1024 * 1024


class Shelf:
    """Where verified files are, by their SHA-256."""

    def __init__(self) -> None:
        self._paths: dict[bytes, tuple[Path, tuple[int, ...]]] = {}

    def path_of(self, sha256: bytes) -> Path | None:
        """A file that has been verified, and that nobody has touched since."""
        path, then = self._paths.get(sha256, (None, ()))
        return path if path is not None and _identity(path) == then else None

    def put(self, file: RunFile, path: Path) -> None:
        """A file that is the right one."""
        self._paths[file.sha256] = (path, _identity(path))

    async def try_(
        self, file: RunFile, path: Path, tell: Callable[[int], None] = lambda count: None
    ) -> bool:
        """Whether a file is the wanted one: then it is on the shelf.

        ``tell`` hears, on another thread, of bytes that were read.
        """
        if self.path_of(file.sha256) == path:
            return True
        stop = Event()
        try:
            fits = await asyncio.to_thread(_fits, file, path, tell, stop)
        finally:
            stop.set()  # a thread can't be cancelled
        if fits:
            self.put(file, path)
        return fits


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


def _fits(file: RunFile, path: Path, tell: Callable[[int], None], stop: Event) -> bool:
    try:
        with path.open("rb") as opened:
            if not file.takes(os.fstat(opened.fileno()).st_size):
                return False
            whole = hashlib.sha256()
            while not stop.is_set() and (block := opened.read(BLOCK)):
                whole.update(block)
                tell(len(block))
    except OSError:
        return False
    return whole.digest() == file.sha256
