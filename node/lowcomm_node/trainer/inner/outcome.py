"""What came of an inner step, known at once on a processor, later on a GPU.

A GPU computes behind the program that feeds it. To read a loss is to wait until it has caught up,
and then it has nothing to do. So figures are copied when the step is queued, and read when the next
one is queued, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one inner step."""

    loss: float
    """Nats a token."""
    steps: int
    """Own steps with it."""
    swarm_step: int
    """The clock after it."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step whose outcome may not be known yet."""

    steps: int
    swarm_step: int
    figures: Callable[[], list[float]]
    """Loss and norm of the gradient; waits until they are there."""


def read_later(figures: Tensor) -> Callable[[], list[float]]:
    """What reads values of a GPU without waiting for anything that is queued after this call."""
    copied = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    copied.copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return read
