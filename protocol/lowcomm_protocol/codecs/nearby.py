"""Slow weights of another cell: lattice points modulo 2**4, read one way.

    reader ── step code of each block ──► giver
    reader ◄── remainders (modulo.py) ─── giver

The reader chooses the steps, from how far the two were apart in each block. So the giver keeps
nothing, and serves all cells alike. A block that lies beyond its steps counts as equal, and comes
as bf16 the next time.
"""

import numpy as np

from lowcomm_protocol.codecs import modulo_kernels as kernels
from lowcomm_protocol.codecs.base import Bytes, Vector, read_only
from lowcomm_protocol.codecs.modulo import DECAY, MARGIN
from lowcomm_protocol.codecs.modulo_kernels import HEADER, MODULO_STEPS
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

BITS = 4


def blocks_of(numel: int) -> int:
    """Step codes of a vector: one a block, one byte each."""
    return -(-numel // BLOCK)


def largest(numel: int) -> int:
    """The most bytes that ``numel`` values take: all blocks as bf16."""
    return HEADER * blocks_of(numel) + 2 * numel


def give(vector: Vector, codes: bytes, out: memoryview) -> int:
    """Code float32 ``vector`` with the steps that a reader asked for; bytes.

    Raises `CodecError` for another number of codes, or values that are not finite.
    """
    asked = np.frombuffer(codes, dtype=np.uint8)
    if asked.size != blocks_of(vector.size):
        raise CodecError(f"{asked.size} step codes for {vector.size} values: one a block is asked")
    wanted = np.where(asked, MODULO_STEPS[asked], np.float32(-1.0)).astype(np.float32)
    target = np.frombuffer(out, dtype=np.uint8)
    hashes, used = np.zeros(asked.size, dtype=np.uint64), np.zeros(asked.size, dtype=np.uint8)
    points = vector.copy()
    size = kernels.modulo_encode(points, wanted, BITS, np.empty_like(points), target, hashes, used)
    if size < 0:
        raise CodecError(f"block {-1 - size} of our slow weights is not finite: nothing is given")
    return int(size)


class NearbyReader:
    """Remembers how far the cells were apart in each block of a fragment of ``numel`` values."""

    def __init__(self, numel: int) -> None:
        self._ranges = np.full(blocks_of(numel), -1.0, dtype=np.float32)

    def codes(self, start: int, stop: int) -> bytes:
        """Step codes to ask for; ``start`` is a multiple of the block."""
        wanted = self._here(start, stop) * np.float32(2.0 * MARGIN / (1 << BITS))
        codes = np.searchsorted(MODULO_STEPS, wanted).clip(1, 255)
        return np.where(wanted < 0, 0, codes).astype(np.uint8).tobytes()

    def read(self, start: int, own: Vector, data: memoryview) -> Vector:
        """What the other cell has beyond ``own``, which begins at ``start``: float32, 0 where it
        can't be known. Raises `CodecError` for what is no coded vector of this length."""
        ranges = self._here(start, start + own.size)
        coded = read_only(np.frombuffer(data, dtype=np.uint8))
        codes: Bytes = np.zeros(ranges.size, dtype=np.uint8)
        blocks, end = kernels.modulo_check(coded, own.size, BITS, codes)
        if blocks != ranges.size or end != coded.size:
            raise CodecError(f"{coded.size} bytes are no {own.size} values of another cell")
        theirs, hashes = np.empty_like(own), np.zeros(blocks, dtype=np.uint64)
        bad: Bytes = np.zeros(blocks, dtype=np.uint8)
        kernels.modulo_decode(coded, own, BITS, theirs, hashes, bad)
        unknown = bad.astype(bool)
        beyond = np.repeat(unknown, BLOCK)[: own.size]
        theirs[beyond] = own[beyond]
        kernels.modulo_ranges(own, theirs, DECAY, ranges)
        ranges[unknown] = -1.0
        return theirs - own

    def _here(self, start: int, stop: int) -> Vector:
        return self._ranges[start // BLOCK : -(-stop // BLOCK)]
