"""A file that comes in pieces, in any order: what has come is kept over a crash.

Pieces are written where they belong, with holes where one is missing. After a crash each is hashed
again, and the file gets its name only when all of them are right.
"""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock

from lowcomm_node.storage.files import disk_full_error, require_space, sync_folder


class PartialFile:
    """A file ``path`` of ``size`` bytes, whose pieces of ``step`` bytes have ``digests``."""

    def __init__(self, path: Path, size: int, step: int, digests: Sequence[bytes]) -> None:
        """Hash what is there of it. Raises DiskFull."""
        self.path = path
        self.size = size
        self._step = step
        self.digests = tuple(digests)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._place = path.with_name(f".{path.name}.part")
        is_new = not self._place.exists()
        if is_new:
            require_space(path.parent, size)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(self._place, flags, 0o600)
        os.ftruncate(self._descriptor, size)
        self._writing = Lock()
        self._open = True
        self.missing = {
            index for index in range(len(digests)) if is_new or not self._is_here(index)
        }

    def bounds(self, index: int) -> tuple[int, int]:
        """Where a piece begins and ends."""
        return index * self._step, min(self.size, (index + 1) * self._step)

    def fits(self, index: int, data: bytes | bytearray) -> bool:
        """Whether these are the bytes of a piece."""
        start, stop = self.bounds(index)
        return len(data) == stop - start and sha256(data).digest() == self.digests[index]

    def put(self, index: int, data: bytes | bytearray) -> None:
        """Write a piece that fits. Raises DiskFull."""
        start, _ = self.bounds(index)
        with self._writing, disk_full_error(self.path.parent, len(data)):
            if not self._open:  # its task was cancelled, this thread was not
                return
            view = memoryview(data)
            while view:
                start += (count := os.pwrite(self._descriptor, view, start))
                view = view[count:]
        self.missing.discard(index)

    def conclude(self) -> None:
        """Give the whole file its name. Raises DiskFull."""
        with disk_full_error(self.path.parent, self.size):
            os.fsync(self._descriptor)
            self._place.replace(self.path)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Keep what has come."""
        with self._writing:
            self._open = False
            os.close(self._descriptor)

    def _is_here(self, index: int) -> bool:
        start, stop = self.bounds(index)
        return self.fits(index, os.pread(self._descriptor, stop - start, start))
