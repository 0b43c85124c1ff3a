"""A replica's state as pieces, which a joiner may take from several peers at once.

Replicas are close to each other, not equal, so what one value of the model needs to go on must come
from one peer: fast weight, slow weight, outer momentum and moments. What other values need may come
from others. So a piece is a range of values of one fragment, in the order of the plan, with all
their vectors. It has these, one after the other, as little-endian float32:

    theta       fast weights
    phi         slow weights
    delta       outer momentum
    first       AdamW's exp_avg, Muon's momentum
    second      AdamW's exp_avg_sq; left out for values that Muon moves
    ranges      of modulo codecs: one for each block of 256 values, what they have learned; else none
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowcomm_protocol.codecs import BLOCK
from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.errors import ProtocolViolation

PIECES = 256
"""A state is cut into about so many pieces, within these bounds:"""
LEAST_VALUES, MOST_VALUES = 3 * 1024, 192 * 1024
"""values: 60 KiB and 4 MiB with AdamW."""
FLOAT = np.dtype("<f4")
Runs = Sequence[tuple[int, bool]]
"""The slices of a fragment: the number of values, and whether the inner optimizer keeps a second
moment of them."""


@dataclass(frozen=True)
class Piece:
    """Values ``[start, stop)`` of a fragment; ``seconds``: the range of their second moments."""

    index: int
    fragment: int
    start: int
    stop: int
    seconds: tuple[int, int]
    blocks: tuple[int, int]
    """Blocks of 256 that have a range; empty unless the codec learns ranges."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Values of each vector."""
        numel = self.stop - self.start
        return (
            numel,
            numel,
            numel,
            numel,
            self.seconds[1] - self.seconds[0],
            self.blocks[1] - self.blocks[0],
        )

    @property
    def size(self) -> int:
        """Bytes."""
        return FLOAT.itemsize * sum(self.counts)


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
            self.theta[these], self.phi[these], self.delta[these], self.first[these], self.second[seconds],
            self.ranges[blocks],
        )  # fmt: skip

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """In the order of a piece."""
        return (self.theta, self.phi, self.delta, self.first, self.second, self.ranges)

    def to_bytes(self) -> bytes:
        """Encode a piece."""
        return np.concatenate(self.vectors).astype(FLOAT, copy=False).tobytes()


def plan_pieces(fragments: Sequence[Runs], ranges: bool) -> tuple[Piece, ...]:
    """Cut a state: each fragment from its start on, in equal pieces. All peers of a run cut alike.

    ``ranges``: whether the codec is a modulo codec.
    """
    total = sum(numel for runs in fragments for numel, _ in runs)
    wanted = -(-total // PIECES // BLOCK) * BLOCK
    step = min(MOST_VALUES, max(LEAST_VALUES, wanted))
    pieces: list[Piece] = []
    for fragment, runs in enumerate(fragments):
        numel = sum(count for count, _ in runs)
        for start in range(0, numel, step):
            stop = min(numel, start + step)
            seconds = (_seconds_before(runs, start), _seconds_before(runs, stop))
            blocks = (start // BLOCK, -(-stop // BLOCK)) if ranges else (0, 0)
            pieces.append(Piece(len(pieces), fragment, start, stop, seconds, blocks))
    return tuple(pieces)


def empty_fragment(runs: Runs, ranges: bool) -> Values:
    """Zeros for all vectors of a fragment."""
    numel = sum(count for count, _ in runs)
    seconds = sum(count for count, second in runs if second)
    counts = (numel, numel, numel, numel, seconds, -(-numel // BLOCK) if ranges else 0)
    return Values(*(np.zeros(count, dtype=np.float32) for count in counts))


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


def _seconds_before(runs: Runs, stop: int) -> int:
    """How many of a fragment's first ``stop`` values have a second moment."""
    found = start = 0
    for count, second in runs:
        found += max(0, min(stop - start, count)) if second else 0
        start += count
    return found
