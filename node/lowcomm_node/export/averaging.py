"""The mean of slow weights: ours, from a checkpoint, and those of peers, from files.

Peers are strangers. Those of honest ones are a few hundredths apart, so weights that are further
away are left out: one liar among four moves the mean by a sixteenth of its norm at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_protocol.plan import FragmentPlan

FAR_APART = 0.25
"""Distance of a peer's weights from ours, in norms of the larger, from which on they are left
out."""
_PIECE = 1 << 22
"""Values that are compared at once."""


@dataclass(frozen=True)
class Averaged:
    """Slow weights by the names of a checkpoint, and whose they are beside ours."""

    outer: Mapping[str, Tensor]
    peers: tuple[str, ...]


def average(
    outer: Mapping[str, Tensor], plan: FragmentPlan, gathered: Mapping[str, Path]
) -> Averaged:
    """The mean over ourselves and all peers whose weights are near ours.

    ``gathered``: by peer, a file with the slow weights of all fragments in order, float32.
    """
    names = [f"phi.{fragment.index}" for fragment in plan.fragments]
    if not all(
        name in outer and outer[name].numel() == plan.fragments[p].numel
        for p, name in enumerate(names)
    ):
        return Averaged(outer, ())  # whoever reads it tells what is missing
    size = plan.numel * 4
    theirs = {
        peer: np.memmap(file, dtype="<f4", mode="r")
        for peer, file in gathered.items()
        if file.stat().st_size == size
    }
    ours = [outer[name].flatten().numpy() for name in names]
    kept = {peer: vector for peer, vector in theirs.items() if _is_near(ours, vector)}
    mean = dict(outer)
    start = 0
    for name, mine in zip(names, ours, strict=True):
        total = mine.astype(np.float32)
        for vector in kept.values():
            total += vector[start : start + len(mine)]
        mean[name] = torch.from_numpy(total / np.float32(1 + len(kept)))
        start += len(mine)
    return Averaged(mean, tuple(kept))


def _is_near(ours: list[NDArray[np.float32]], vector: NDArray[np.float32]) -> bool:
    """Whether all values are finite, and near ours together."""
    apart = mine = theirs = 0.0
    start = 0
    for fragment in ours:
        for begin in range(0, len(fragment), _PIECE):
            one = fragment[begin : begin + _PIECE].astype(np.float64)
            other = vector[start + begin : start + begin + len(one)].astype(np.float64)
            apart += float(np.square(one - other).sum())
            mine += float(np.square(one).sum())
            theirs += float(np.square(other).sum())
        start += len(fragment)
    # NaN and infinity fail the comparison.
    return apart <= FAR_APART**2 * max(mine, theirs) < np.inf
