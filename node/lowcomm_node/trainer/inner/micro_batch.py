"""How many windows of a batch go through the model at once. Pure: what fits is asked for.

The specification's ``batch`` says what a step learns from; how it is cut is every peer's own
affair. Gradients of the parts weigh by their tokens, so their sum is the gradient of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """How a step goes through the model."""

    windows: int
    """Windows at once, the micro-batch."""
    recompute: bool = False
    """Whether the backward pass computes blocks again instead of keeping what they hold."""

    def parts(self, batch: int) -> int:
        """Windows of each part of a batch but the last, so that all are about as large."""
        count = -(-batch // min(batch, self.windows))
        return -(-batch // count)

    def smaller(self, batch: int, may_recompute: bool) -> "Cut | None":
        """What to try when this one does not fit any more; None where nothing smaller is left."""
        if self.windows > 1:
            return Cut(max(1, min(self.windows, batch) // 2), self.recompute)
        return Cut(1, True) if may_recompute and not self.recompute else None


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of windows up to ``most`` that fits; 0 if not even one does.

    ``fits`` is asked for all first, as most machines hold them, then for halves of what is left.
    """
    if fits(most):
        return most
    fitting, too_many = 0, most
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def choose(
    batch: int, wanted: int | None, recompute: bool | None, fits: Callable[[Cut], bool]
) -> Cut | None:
    """The largest micro-batch that fits; blocks are computed again only where none does otherwise.

    ``wanted``: the owner's micro-batch; ``recompute``: what the owner says, None to choose. None if
    nothing fits.
    """
    for again in (False, True) if recompute is None else (recompute,):
        if wanted is not None:
            asked = Cut(min(wanted, batch), again)
            windows = asked.windows if fits(asked) else 0
        else:
            windows = largest(batch, lambda count, again=again: fits(Cut(count, again)))
        if windows:
            return Cut(windows, again)
    return None
