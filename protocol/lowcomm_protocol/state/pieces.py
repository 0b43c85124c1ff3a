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
    ranges      of modulo codecs: for each block of 256 values what they have learned; else none
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowcomm_protocol.spec.names import BLOCK

PIECES = 256
"""A state is cut into about so many pieces, within these bounds:"""
LEAST_VALUES, MOST_VALUES = 3 * 1024, 192 * 1024
"""values: 60 KiB and 4 MiB with AdamW."""
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
        return 4 * sum(self.counts)


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


def _seconds_before(runs: Runs, stop: int) -> int:
    """How many of a fragment's first ``stop`` values have a second moment."""
    found = start = 0
    for count, second in runs:
        found += max(0, min(stop - start, count)) if second else 0
        start += count
    return found
