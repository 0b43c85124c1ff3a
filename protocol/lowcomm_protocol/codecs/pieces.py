"""Vectors in pieces: whole blocks of 256 values, what they follow from, and buffers that callers
hand in."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.codecs.kernels import kernel, source_block
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

NOTHING = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Source:
    """What our values follow from before they are coded: ``gain * (theta - phi) + pull * phi``, or
    ``theta`` itself without a ``phi``. Neither may change while they are asked for."""

    theta: Vector
    phi: Vector = field(default_factory=lambda: NOTHING)
    gain: float = 1.0
    pull: float = 0.0

    @property
    def arguments(self) -> tuple[Vector, Vector, np.float32, np.float32]:
        """What kernels get of it."""
        return self.theta, self.phi, np.float32(self.gain), np.float32(self.pull)

    def part(self, here: slice) -> "Source":
        """What some of the values follow from."""
        return replace(self, theta=self.theta[here], phi=self.phi[here])

    def fill(self, start: int, out: Vector) -> None:
        """Write the values from ``start`` on."""
        _fill(*self.part(slice(start, start + out.size)).arguments, out)


@kernel
def _fill(theta: Vector, phi: Vector, gain: Any, pull: Any, out: Vector) -> None:
    source_block(theta, phi, gain, pull, np.uint64(0), np.uint64(out.size), out)


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
