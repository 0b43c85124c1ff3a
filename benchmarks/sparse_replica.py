"""Pairs that exchange a part of a fragment's values, as an experiment: ``sparse_pairs.py`` measures
whether it should become a codec.

A peer remembers what it and others agreed on last at each place, and chooses the places where it
has moved furthest from that: what was not sent waits in the weights themselves. A value that does
not travel counts as if the partner had sent ours. The rule of the exchange stays that of pairs,
slow weights are pulled together, and nothing needs to realign.

Source of top-k by chunk: DeMo, arXiv 2411.19870. Choosing one's places for both is ours.
"""

import math
from typing import Any

import torch
from sparse_codec import CHUNK
from torch import Tensor

from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs import BLOCK
from lowcomm_protocol.exchange.judging import Bound

MARGIN = 1.5
"""Of what stands in for modulo codecs, but knows how far both are apart: they have to learn it."""
APART = 2
"""Steps that two captures of one exchange may differ by."""


def largest(vector: Tensor, density: float) -> Tensor:
    """Where the largest values of each chunk are: bool [numel]."""
    places = torch.zeros(vector.numel(), dtype=torch.bool)
    for chunk, chosen in zip(vector.abs().split(CHUNK), places.split(CHUNK), strict=True):
        chosen[chunk.topk(max(1, round(chunk.numel() * density))).indices] = True
    return places


def coded(ours: Tensor, theirs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Both vectors as the other end decodes them: on a lattice whose step follows from the largest
    difference in each block."""
    blocks = zip(ours.split(BLOCK), theirs.split(BLOCK), strict=True)
    apart = torch.stack([(one - other).abs().max() for one, other in blocks])
    step = (2 * MARGIN * apart / 2**bits).clamp_min(1e-9).repeat_interleave(BLOCK)[: ours.numel()]
    return (ours / step).round() * step, (theirs / step).round() * step


def replica(way: str, density: float, bits: int | None, seed: int) -> type[Replica]:
    """A replica whose pairs exchange such a part of the values; ``way``: see sparse_pairs.py;
    ``bits`` of a value; None: fp32."""
    chance = torch.Generator().manual_seed(seed)
    chosen: dict[tuple[str, str, int], tuple[Tensor, int]] = {}
    """What the first of a pair that gets so far has chosen for both: they share this process."""
    part = density / 2 if way == "both" else density

    class SparseReplica(Replica):
        def __init__(self, *rest: Any, **named: Any) -> None:
            super().__init__(*rest, **named)
            self.agreed = [one.clone() for one in self.phi]
            self.moved: dict[int, Tensor] = {}

        def contribute(self, fragment: int) -> None:
            super().contribute(fragment)
            capture = self.captures[fragment]
            # Partners move some values far at once.
            capture.bound = Bound(math.inf, math.inf)
            if not capture.realign:
                # Our places travel in the lowest bit of each value.
                ours = largest(capture.sent - self.agreed[fragment], part)
                capture.sent.view(torch.int32).bitwise_and_(~1).bitwise_or_(ours.int())

        def outer(self, fragment: int) -> None:
            capture = self.captures[fragment]
            if not capture.realign and len(capture.received) == 1:
                ((other, theirs),) = capture.received.items()
                self._mix(fragment, capture, other, theirs)
            super().outer(fragment)

        def outer_step(self, *rest: Any, **named: Any) -> None:
            super().outer_step(*rest, **named)  # ours, so that contributions are whole vectors

        def _mix(self, fragment: int, capture: Any, other: str, theirs: Tensor) -> None:
            ours, its = (
                vector.view(torch.int32).bitwise_and(1).bool() for vector in (capture.sent, theirs)
            )
            taken = moved = its
            if way == "one-way":
                moved = ours | its
            elif way == "both":
                taken = moved = ours | its
            else:
                taken = moved = self._for_both(fragment, capture.steps, other, ours, its)
            if bits is not None:
                capture.sent[taken], theirs[taken] = coded(capture.sent[taken], theirs[taken], bits)
            theirs.copy_(torch.where(taken, theirs, capture.sent))
            self.moved[fragment] = moved

        def _for_both(
            self, fragment: int, steps: int, other: str, ours: Tensor, its: Tensor
        ) -> Tensor:
            pair = min(self.peer_id, other), max(self.peer_id, other), fragment
            places, since = chosen.pop(pair, (ours, -math.inf))
            if steps - since <= APART:
                return places
            if way == "chance":
                places = torch.rand(ours.numel(), generator=chance) < density
            else:
                places = ours if torch.rand(1, generator=chance) < 0.5 else its
            chosen[pair] = places, steps
            return places

        def merge(self, fragment: int, *rest: Any) -> None:
            super().merge(fragment, *rest)
            moved = self.moved.pop(fragment, torch.ones(1, dtype=torch.bool))
            self.agreed[fragment] = torch.where(moved, self.phi[fragment], self.agreed[fragment])

    return SparseReplica
