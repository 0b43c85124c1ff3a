"""Finds a partner that resends its previous contribution: it has not trained since, whatever it
claims.

An honest contribution moves. In pairs it carries weights, which training and merges change, or
progress, which is new each time. A contribution is stale if every value agrees with the one that
the same peer sent last. A lattice codec tells only where a value lies within a step: two codes can
stand for one value if they are less than half of both steps apart. Other codecs decode equal values
to equal values. In simulated swarms, with steps of up to 160 times what a value moves in an
interval, at least 1.6 % of the values of an honest peer had moved further, and none of a stale one.

A fragment may stand still for an honest reason: without weight decay, a row of an embedding rests
until its token comes. So a peer is judged only on values where our own contribution has moved
since, and only if these are most of what is compared.

This finds stuck weights, a checkpoint that is served for ever, and peers that save themselves the
work. It does not find a stale contribution with added noise: that is a plausible lie.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowcomm_protocol.codecs import BLOCK

SAMPLE = 64
"""Blocks of 256 values that are compared, spread over the fragment."""
FEWEST = 8
"""Of those that are compared so many, or all that there are, must have been coded alike both
times."""
REMEMBERED = 32
"""Peers whose last contribution is kept: 2 MiB of each fragment at most."""
ROUNDING = 1e-3
"""Part of a step that values may be off."""


@dataclass(frozen=True)
class Brought:
    """The sample of one contribution."""

    values: Tensor
    """Float32 [blocks, 256]."""
    steps: Tensor
    """Of the lattice: float32 [blocks, 1]; 0 where equal values are decoded to equal values."""
    ours: Tensor
    """Of our own contribution then, as others decoded it: float32 [blocks, 256]."""


class Repeats:
    """The last contribution of each peer to one fragment of ``numel`` values that was applied."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        count = -(-numel // BLOCK)
        looked_at = min(SAMPLE, count)
        numbers = [place * count // looked_at for place in range(looked_at)]
        self._blocks = torch.tensor(numbers, dtype=torch.long)
        self._places = (self._blocks[:, None] * BLOCK + torch.arange(BLOCK)).clamp(max=numel - 1)
        self._last: dict[str, Brought] = {}

    def sample(self, contribution: Tensor, steps: Tensor, ours: Tensor) -> Brought:
        """What is kept of a contribution, float32 [numel].

        ``steps``: of the lattice of each of its blocks, float32. ``ours``: our own, float32
        [numel].
        """
        sampled = contribution[self._places], steps[self._blocks, None], ours[self._places]
        return Brought(*sampled)

    def repeats(self, peer: str, brought: Brought) -> bool:
        """Whether a peer brings what it brought when it was applied last."""
        last = self._last.get(peer)
        if last is None:
            return False
        alike = ((brought.steps > 0) == (last.steps > 0)).flatten()
        cells = (brought.steps + last.steps) / 2
        ours = _moved(last.ours, brought.ours, cells) & alike
        if int(ours.sum()) < max(min(FEWEST, len(alike)), int(alike.sum()) / 2):
            return False
        return not bool((_moved(last.values, brought.values, cells) & alike).any())

    def applied(self, peer: str, brought: Brought) -> None:
        """Remember what was applied.

        Of the peer that was applied longest ago nothing is known any more.
        """
        self._last.pop(peer, None)
        self._last[peer] = brought
        while len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]


def _moved(before: Tensor, now: Tensor, cells: Tensor) -> Tensor:
    """Which blocks hold a value that has moved by more than coding explains: bool [blocks]."""
    apart = (now - before).abs()
    return torch.where(cells > 0, apart >= cells * (1 - ROUNDING), apart > 0).any(dim=1)
