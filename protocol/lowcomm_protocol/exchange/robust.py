"""Means of a group's contributions in which one liar counts for little.

Contributions are progress as the receiver sees it: flat float32 vectors, less ``consensus`` times
its own slow weights. The specification names one of four means:

    mean      weighted; every contribution counts as it is
    clip      weighted; norms above `CLIP` times the lower median norm are scaled down to it, and
              contributions that point against all others are left out
    median    of each coordinate, unweighted
    trimmed   of each coordinate without the largest and the smallest value, unweighted

Two contributions have no majority, so of two all four are the weighted mean. Each contribution is
judged before it enters a mean (``trainer/judging.py`` of the node).

Sources: Sun et al., 1911.07963 (norm bounds); Yin et al., 1803.01498 (median and trimmed mean).
"""

from collections.abc import Sequence
from statistics import median_low

import torch

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.exchange.outer import mean_contribution
from lowcomm_protocol.spec.names import MEANS, Mean

CLIP = 1.5
MAX_DEVIATIONS = 3.0
"""A contribution may point against the sum of the others by as many standard deviations as random
vectors do. Honest noise rarely exceeds it."""
MIN_NORM = 2.0**-100
"""Keeps a zero vector from being divided by zero."""


def robust_mean(
    kind: Mean, contributions: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Average contributions to a new vector.

    Raises `SpecError` for an unknown kind and `PlanError` for vectors of different sizes.
    """
    # Norms may differ in their last bits between processors. That harms nobody: only the owner of a
    # shard averages it, and all members apply its coded mean.
    if kind not in MEANS:
        raise SpecError(f"mean = {kind!r} is not known: use one of {', '.join(MEANS)}")
    if kind == "mean" or len(contributions) < 3:
        return mean_contribution(contributions, weights)
    if kind == "clip":
        return _clipped_mean(contributions, weights)
    ordered = torch.stack(list(contributions)).sort(dim=0).values
    cut = (len(contributions) - 1) // 2 if kind == "median" else 1
    return ordered[cut : len(contributions) - cut].mean(dim=0)


def _clipped_mean(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    norms = [float((one @ one).sqrt()) for one in contributions]
    limit = CLIP * median_low(norms)
    clipped = [
        one * (limit / norm) if norm > limit else one
        for one, norm in zip(contributions, norms, strict=True)
    ]
    # Unit vectors: of three contributions, a liar of 1.5 times the norm would outweigh the
    # direction that the other two share.
    directions = [one / max(norm, MIN_NORM) for one, norm in zip(contributions, norms, strict=True)]
    kept = _agreeing(directions)
    return mean_contribution([clipped[place] for place in kept], [weights[place] for place in kept])


def _agreeing(directions: Sequence[torch.Tensor]) -> list[int]:
    """The places of the unit vectors that do not point against the sum of the others."""
    least = -MAX_DEVIATIONS / directions[0].numel() ** 0.5
    kept = list(range(len(directions)))
    while 2 * len(kept) > len(directions):
        total = torch.stack([directions[place] for place in kept]).sum(dim=0)
        # The sum without the vector itself: where noise exceeds what peers have in common, a vector
        # points along its own share of a mean of all, flipped or not.
        cosines = [_cosine(directions[place], total - directions[place]) for place in kept]
        worst = min(cosines)
        if worst >= least:
            return kept
        # One at a time: of three, a flipped vector cancels the second for the third, so that an
        # honest one may seem to point against the sum as well.
        del kept[cosines.index(worst)]
    # Fewer than half agree: that is noise, as an attacker has no majority.
    return list(range(len(directions)))


def _cosine(one: torch.Tensor, others: torch.Tensor) -> float:
    lengths = float(((one @ one) * (others @ others)).sqrt())
    return float(one @ others) / lengths if lengths > 0.0 else 0.0
