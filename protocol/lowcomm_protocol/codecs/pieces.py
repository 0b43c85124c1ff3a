"""Vectors in pieces: whole blocks of 256 values, and the buffers that callers hand in."""

from collections.abc import Iterator

import numpy as np

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK


def pieces_of(numel: int, piece: int | None) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` of pieces of ``piece`` values, rounded up to whole blocks; the last may be
    shorter. None makes one piece; so does an empty vector."""
    length = max(1, numel) if piece is None else -(-max(1, piece) // BLOCK) * BLOCK
    for start in range(0, max(1, numel), length):
        yield start, min(numel, start + length)


def scratch_for(name: str, numel: int, scratch: Vector | None) -> Vector:
    """``scratch``, or a new vector if there is none. Raises `CodecError` if it does not fit."""
    if scratch is None:
        return np.empty(numel, dtype=np.float32)
    fits = scratch.shape == (numel,) and scratch.dtype == np.float32
    if not (fits and scratch.flags.c_contiguous and scratch.flags.writeable):
        raise CodecError(
            f"{name}: a scratch of {scratch.dtype} and shape {scratch.shape}: pass {numel} "
            "values, float32, contiguous and writable"
        )
    return scratch
