"""Means that one liar can't move far, and what a contribution may look like at all.

All vectors are progress as the receiver sees it (contribution minus ``consensus`` times its own slow weights), flat float32.

    mean      weighted; every contribution counts as it is
    clip      norms above `CLIP` times the group's lower median are scaled down to it, and what points against the
              coordinate median is left out; then weighted
    median    of each coordinate; weights don't count
    trimmed   of each coordinate the largest and the smallest are left out; weights don't count

In a group of two there is no majority: all four are the mean there, and only `plausible_norm` protects.
Sources: Sun et al., 1911.07963 (norm bounds); Yin et al., 1803.01498 (median and trimmed mean).
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.outer import mean_contribution

Mean = Literal["mean", "clip", "median", "trimmed"]
MEANS: tuple[Mean, ...] = get_args(Mean)
CLIP = 1.5
PLAUSIBLE = 3.0
"""A single contribution may have this many times the norm of our own, or of what has been usual."""
FORGETTING = 0.1
"""How fast what is usual follows what was applied."""


def robust_mean(kind: Mean, contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Mean of a group's contributions: a new vector, the same bits at whoever computes it from the same.

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


def usual_norm(usual: float, seen: float) -> float:
    """What is usual after one more contribution was applied."""
    return seen if not usual else usual + FORGETTING * (seen - usual)


def _clipped(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    norms = [float((one @ one).sqrt()) for one in contributions]
    bound = CLIP * sorted(norms)[(len(norms) - 1) // 2]
    clipped = [one * (bound / norm) if norm > bound else one for one, norm in zip(contributions, norms, strict=True)]
    ordered = torch.stack(clipped).sort(dim=0).values
    cut = (len(clipped) - 1) // 2
    direction = ordered[cut : len(clipped) - cut].mean(dim=0)
    kept = [place for place, one in enumerate(clipped) if float(one @ direction) >= 0.0]
    if 2 * len(kept) <= len(clipped):
        kept = list(range(len(clipped)))  # no majority points anywhere: noise, not an attack
    return mean_contribution([clipped[place] for place in kept], [weights[place] for place in kept])
