"""Means that one liar can't move far, and what a contribution may look like at all.

All vectors are progress as the receiver sees it (contribution minus ``consensus`` times its own slow weights), flat float32.

    mean      weighted; every contribution counts as it is
    clip      norms above `CLIP` times the group's lower median are scaled down to it, and what points against all
              others together is left out; then weighted
    median    of each coordinate; weights don't count
    trimmed   of each coordinate the largest and the smallest are left out; weights don't count

In a group of two there is no majority: all four are the mean there, and only `plausible_norm` protects.
Sources: Sun et al., 1911.07963 (norm bounds); Yin et al., 1803.01498 (median and trimmed mean).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from lowcomm_protocol.choices import MEANS, Mean
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.outer import mean_contribution

CLIP = 1.5
PLAUSIBLE = 3.0
"""A single contribution may have this many times the norm of our own, or of what has been usual."""
LONGER = 2
"""What a peer claims to have trained for counts for at most this many times an interval, or our own steps."""
GROWTH = 0.75
"""Progress grows with this power of the steps: measured between 0.5, that of noise, and 1, that of a clear direction."""
TINY = 2.0**-100
AGAINST = 3.0
"""Noise of honest peers rarely points against the others by more than so many standard deviations."""
RECENT = 16
"""Norms, half of them our own, whose lower median is what was usual of late."""
ALONE = 4.0
"""In a swarm of two, the other's last contribution counts for at most so many times what was applied."""
REMEMBERED = 15
"""Peers whose last contribution tells what is usual."""


def robust_mean(kind: Mean, contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Mean of a group's contributions: a new vector.

    The owner of a shard computes it, and the others take it as the owner has coded it. So these bits may depend on the
    processor, as norms do whose sums torch splits by the width of its registers.

    Raises `SpecError` for an unknown kind, `PlanError` for vectors that are not alike.
    """
    if kind not in MEANS:
        raise SpecError(f"mean = {kind!r} is not known: use one of {', '.join(MEANS)}")
    if kind == "mean" or len(contributions) < 3:
        return mean_contribution(contributions, weights)
    if kind == "clip":
        return _clipped(contributions, weights)
    ordered = torch.stack(list(contributions)).sort(dim=0).values
    cut = (len(contributions) - 1) // 2 if kind == "median" else 1
    return ordered[cut : len(contributions) - cut].mean(dim=0)


def plausible_norm(own: float, usual: float) -> float:
    """The largest norm that a single contribution may have, given our own and what has been usual (0: nothing yet)."""
    return PLAUSIBLE * max(own, usual)


def grown_norm(own: float, steps: int, ahead: int, interval: int) -> float:
    """The norm that our progress would have if we had trained for as long as another peer.

    ``own``: its norm after ``steps`` inner steps; ``ahead``: how many steps more the other claims; ``interval``: steps
    that any peer may have trained for without a claim. Claims can't be checked, so they are bounded by `LONGER`.
    """
    ours = max(1, steps)
    theirs = min(max(ours, interval, ours + ahead), LONGER * max(ours, interval))
    return own * (theirs / ours) ** GROWTH


def comparable_norm(own: float, usual: float, done: int, steps: int, ahead: int, interval: int) -> float:
    """Our norm as another peer's is compared with it: grown (see `grown_norm`), save in the first interval of a replica.

    A replica's first steps are its largest: what they would grow to is far from what is usual soon, and while nothing is
    usual yet (``usual`` is 0) there is nothing else to judge by. ``done``: all inner steps of the replica so far; ``steps``:
    those since it last merged.
    """
    if not usual and done < interval:
        return own
    return grown_norm(own, steps, ahead, interval)


class UsualNorm:
    """What norm contributions usually have: of late, or more if most peers bring more.

    Of late is the lower median of what was applied and of our own at those times. A liar that is applied at a moment when
    ours is large, as in the first steps of a run, so raises the bound for that moment alone; a mean would keep it raised.

    What each peer brought last counts, used or refused, by its lower median: a single liar does not move that. And where
    most are further away than was plausible, it is we who must come closer: otherwise two halves of a swarm that have once
    drifted apart would refuse each other for ever. Of a lone partner, whom nobody can judge, a bounded part counts; and what
    was applied teaches no more than our own norm makes plausible, or a partner that always brings as much as it may would
    raise the bound each time.
    """

    def __init__(self, before: float = 0.0) -> None:
        """``before``: what was usual before a restart; 0 if nothing is known."""
        self._recent = deque([before] if before else [], maxlen=RECENT)
        self._last: dict[str, float] = {}

    @property
    def learned(self) -> float:
        """What was usual of late, whatever peers have brought without being applied; 0 if nothing is known."""
        return _lower_median(self._recent) if self._recent else 0.0

    @property
    def value(self) -> float:
        """As of now; 0 if nothing is known."""
        learned, norms = self.learned, list(self._last.values())  # a copy at once: they are decoded on other threads
        if len(norms) == 1:
            return max(learned, min(norms[0], ALONE * learned))
        return max(learned, _lower_median(norms)) if norms else learned

    def saw(self, peer: str, norm: float) -> None:
        """Remember what a peer has brought; a norm beyond float32 is none."""
        if not math.isfinite(norm):
            return
        self._last.pop(peer, None)
        self._last[peer] = norm
        while len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]

    def applied(self, norm: float, own: float) -> None:
        """Learn from a contribution that was applied, when ours would have had the norm ``own``."""
        self._recent += (own, min(norm, plausible_norm(own, 0.0)))


def _lower_median(norms: Iterable[float]) -> float:
    ordered = sorted(norms)
    return ordered[(len(ordered) - 1) // 2]


def _clipped(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    norms = [float((one @ one).sqrt()) for one in contributions]
    bound = CLIP * _lower_median(norms)
    clipped = [one * (bound / norm) if norm > bound else one for one, norm in zip(contributions, norms, strict=True)]
    # All directions count alike here: of three, one liar of 1.5 times the norm would outweigh what the others share.
    directions = torch.stack([one / max(norm, TINY) for one, norm in zip(contributions, norms, strict=True)])
    total = directions.sum(dim=0)
    kept = [place for place, one in enumerate(directions) if not _points_against(one, total - one)]
    if 2 * len(kept) <= len(clipped):
        kept = list(range(len(clipped)))  # no majority points anywhere: noise, not an attack
    return mean_contribution([clipped[place] for place in kept], [weights[place] for place in kept])


def _points_against(one: torch.Tensor, others: torch.Tensor) -> bool:
    # Not against the mean or median of all, which contain it: where noise is larger than what the peers have in
    # common, a vector points along its own share of them, flipped or not.
    lengths = float(((one @ one) * (others @ others)).sqrt())
    return float(one @ others) < -AGAINST * lengths / one.numel() ** 0.5
