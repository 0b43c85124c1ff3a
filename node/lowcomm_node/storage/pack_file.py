"""Pieces of a packed text or of a run's file on this machine, and which of them were verified.

    FOLDER/data   the pieces in their places; holes where one is missing
    FOLDER/list   SHA-256 of each piece
    FOLDER/here   bitmap of the verified pieces, sealed

A pack of the owner stays where it is and is never written: FOLDER then has ``list`` and ``here``
alone. A start hashes nothing again. The seal covers the file's identity, so ``here`` says nothing
of a file that was replaced, nor of an owner's that was written to.
"""

import ctypes
import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from lowcomm_node.storage.files import disk_full_error, read_small, write_atomic
from lowcomm_protocol.spec.sections import DIGEST_BYTES, PackedText

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Flags of fallocate(2), which Python does not offer."""


def has_bit(bitmap: bytes | bytearray, index: int) -> bool:
    """Whether a bitmap, whose first bit is the highest, names a piece."""
    return bool(bitmap[index >> 3] & 0x80 >> (index & 7))


@dataclass(frozen=True)
class FilePieces:
    """The pieces of a file that is no packed text."""

    size: int
    piece_bytes: int
    pieces: str
    """SHA-256 of the list of their digests."""

    @property
    def piece_count(self) -> int:
        """The number of pieces; the last may be smaller."""
        return -(-self.size // self.piece_bytes)


def bitmap_bytes(part: PackedText | FilePieces) -> int:
    """Bytes of a bitmap of all pieces."""
    return -(-part.piece_count // 8)


class PackFile:
    """Pieces of one file. Its methods block; call ``open`` first, and ``close`` last."""

    def __init__(
        self, part: PackedText | FilePieces, folder: Path, own: Path | None = None
    ) -> None:
        """``own``: the pack of the owner, if there is one."""
        self.part = part
        self.folder = folder
        self.is_own = own is not None
        self.path = own or folder / "data"
        self.digests = b""
        """SHA-256 of each piece, one after another; empty while unknown."""
        self.here = bytearray(bitmap_bytes(part))
        """Bitmap of the verified pieces."""
        self.occupied: set[int] = set()
        """Pieces that take space of ours, also where only a part of one has come."""
        self._descriptor = -1
        self._lock = Lock()

    def open(self, digests: bytes = b"") -> None:
        """Open the file, or make one of holes. ``digests``: the list, where it is known. Raises
        OSError, DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.learn(digests or read_small(self.folder / "list", self.part.piece_count * 32))
        flags = os.O_RDONLY if self.is_own else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        if not self.is_own:
            os.ftruncate(self._descriptor, self.part.size)
        sealed = read_small(self.folder / "here", DIGEST_BYTES + len(self.here))
        bitmap = sealed[DIGEST_BYTES:]
        if self.digests and len(bitmap) == len(self.here) and sealed == self._sealed(bitmap):
            self.here[:] = bitmap
        if not self.is_own:
            self._find_holes()

    def learn(self, digests: bytes) -> bool:
        """Keep the list of digests. Returns whether it is the right one. Raises DiskFull."""
        if sha256(digests).hexdigest() != self.part.pieces:
            return False
        if not self.digests:
            if read_small(self.folder / "list", len(digests)) != digests:
                write_atomic(self.folder / "list", digests)
            self.digests = digests
        return True

    def size_of(self, piece: int) -> int:
        """Bytes of a piece: the last one may have fewer."""
        return min(self.part.piece_bytes, self.part.size - piece * self.part.piece_bytes)

    def has(self, piece: int) -> bool:
        """Whether a piece is here and verified."""
        return has_bit(self.here, piece)

    def check(self, pieces: Iterable[int]) -> None:
        """Read pieces that were not verified yet, and keep in mind which are right."""
        for piece in pieces if self.digests else ():
            is_there = self.is_own or piece in self.occupied
            if is_there and self.is_piece(piece, self.read(piece)):
                with self._lock:
                    self._set(piece)

    def is_piece(self, piece: int, data: bytes | bytearray) -> bool:
        """Whether these are the bytes of a piece."""
        place = piece * DIGEST_BYTES
        return sha256(data).digest() == self.digests[place : place + DIGEST_BYTES]

    def take(self, piece: int, data: bytes | bytearray) -> bool:
        """Write a whole piece if it is right. Returns whether it is. Raises DiskFull."""
        if is_right := self.is_piece(piece, data):
            self.write(piece, data)
        return is_right

    def read(self, piece: int, most: int | None = None) -> bytes:
        """Bytes of a piece from its beginning; none once the file is closed."""
        size = self.part.piece_bytes
        if self._descriptor < 0:
            return b""
        return os.pread(self._descriptor, size if most is None else most, piece * size)

    def write(self, piece: int, data: bytes | bytearray, offset: int = 0) -> None:
        """Write bytes of a piece; a whole piece must be right, and counts as verified. Raises
        DiskFull."""
        with self._lock, disk_full_error(self.folder, len(data)):
            view, place = memoryview(data), piece * self.part.piece_bytes + offset
            while view and self._descriptor >= 0:  # closed: its task was cancelled
                place += (count := os.pwrite(self._descriptor, view, place))
                view = view[count:]
            self.occupied.add(piece)
            if len(data) == self.size_of(piece) and not view:
                self._set(piece)

    def begun(self, piece: int) -> int:
        """Bytes of a missing piece that have come before, without a gap."""
        start = piece * self.part.piece_bytes
        if piece not in self.occupied or self._descriptor < 0:
            return 0
        with suppress(OSError):
            if os.lseek(self._descriptor, start, os.SEEK_DATA) == start:
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
                return min(end - start, self.part.piece_bytes)
        return 0

    def drop(self, pieces: Collection[int]) -> None:
        """Count pieces as missing, and give their space back. Raises OSError where the file system
        can't punch holes."""
        with self._lock:
            for piece in pieces:
                self.here[piece >> 3] &= ~(0x80 >> (piece & 7))
        self.flush()  # after a crash none of them counts as verified
        libc, size = ctypes.CDLL(None, use_errno=True), self.part.piece_bytes
        if not hasattr(libc, "fallocate64"):  # only Linux has it
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        for piece in pieces:
            with self._lock:
                if self._descriptor < 0 or self.has(piece):  # it has come again meanwhile
                    continue
                place, flags = ctypes.c_int64(piece * size), KEEP_SIZE | PUNCH_HOLE
                if libc.fallocate64(self._descriptor, flags, place, ctypes.c_int64(size)):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                self.occupied.discard(piece)

    def flush(self) -> None:
        """Force pieces to the disk, then which they are. Raises DiskFull."""
        with self._lock:
            bitmap = bytes(self.here)
        if self._descriptor >= 0:
            with disk_full_error(self.folder):
                if not self.is_own:
                    getattr(os, "fdatasync", os.fsync)(self._descriptor)
                write_atomic(self.folder / "here", self._sealed(bitmap))

    def close(self) -> None:
        """Keep what has come."""
        self.flush()
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _set(self, piece: int) -> None:
        self.here[piece >> 3] |= 0x80 >> (piece & 7)

    def _sealed(self, bitmap: bytes) -> bytes:
        status = os.fstat(self._descriptor)
        identity = [status.st_dev, status.st_ino, self.part.size]
        if self.is_own:
            identity += [status.st_size, status.st_mtime_ns]
        seal = sha256(f"{self.part.pieces} {identity}".encode() + bitmap)
        return seal.digest() + bitmap

    def _find_holes(self) -> None:
        """See which pieces have all their bytes, and forget those that have not."""
        size, whole = self.part.piece_bytes, bytearray(len(self.here))
        for start, end in self._extents():
            self.occupied.update(range(start // size, -(-end // size)))
            last = self.part.piece_count if end == self.part.size else end // size
            for piece in range(-(-start // size), last):
                whole[piece >> 3] |= 0x80 >> (piece & 7)
        for place, bits in enumerate(whole):
            self.here[place] &= bits

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Where bytes were written: from, and to."""
        place = 0
        try:
            while place < self.part.size:
                place = os.lseek(self._descriptor, place, os.SEEK_DATA)
                start, place = place, os.lseek(self._descriptor, place, os.SEEK_HOLE)
                yield start, min(place, self.part.size)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no more bytes up to the end
                raise
