"""The vectors of a piece of a replica's state (pieces.py), read from bytes and written to them."""

from dataclasses import dataclass

import numpy as np

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.state.pieces import Piece

FLOAT = np.dtype("<f4")


@dataclass(frozen=True)
class Values:
    """The vectors of one piece, or of a whole fragment."""

    theta: Vector
    phi: Vector
    delta: Vector
    first: Vector
    second: Vector
    ranges: Vector

    def cut(self, piece: Piece) -> "Values":
        """The values of a piece, as views of a fragment's."""
        these, seconds, blocks = (
            slice(piece.start, piece.stop),
            slice(*piece.seconds),
            slice(*piece.blocks),
        )
        return Values(
            self.theta[these],
            self.phi[these],
            self.delta[these],
            self.first[these],
            self.second[seconds],
            self.ranges[blocks],
        )

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """In the order of a piece."""
        return (self.theta, self.phi, self.delta, self.first, self.second, self.ranges)

    def to_bytes(self) -> bytes:
        """Encode a piece."""
        return np.concatenate(self.vectors).astype(FLOAT, copy=False).tobytes()


def read_piece(piece: Piece, data: bytes | bytearray | memoryview) -> Values:
    """The vectors of an untrusted piece; views.

    Raises `ProtocolViolation` for values that no training reaches.
    """
    if len(data) != piece.size:
        raise ProtocolViolation(
            f"piece {piece.index} has {len(data)} bytes instead of {piece.size}"
        )
    flat: Vector = np.frombuffer(data, dtype=FLOAT)
    vectors: list[Vector] = []
    start = 0
    for count in piece.counts:
        vectors.append(flat[start : start + count])
        start += count
    # The extremes suffice, and need no mask in memory: NaN spreads to both.
    if not (np.isfinite(flat.min()) and np.isfinite(flat.max())):
        raise ProtocolViolation(f"piece {piece.index} holds NaN or infinity")
    values = Values(*vectors)
    if values.second.size and values.second.min() < 0:
        raise ProtocolViolation(f"piece {piece.index} holds impossible moments")
    return values


def apart(one: Values, other: Values) -> float:
    """The distance of two peers' weights of one piece: 0 if equal, about 1.4 if unrelated."""
    mine, theirs = (
        np.concatenate([values.theta, values.phi]).astype(np.float64) for values in (one, other)
    )
    largest = max(float(np.linalg.norm(mine)), float(np.linalg.norm(theirs)))
    return float(np.linalg.norm(mine - theirs)) / largest if largest else 0.0
