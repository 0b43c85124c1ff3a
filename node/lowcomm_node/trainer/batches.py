"""Batches prepared ahead of the steps, and outcomes of steps read behind them.

A GPU computes behind the program that feeds it. To read a loss is to wait until it has caught up,
and then it has nothing to do. So figures are copied when the step is queued, and read when the next
one is queued, too.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch
from torch import Tensor

from lowcomm_node.data.stream import TrainStream

Batch = tuple[Tensor, Tensor]


class Ahead:
    """Gives the batches of a stream one after the other, and prepares one of them ahead."""

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self._executor = executor
        self._pinned = device.type == "cuda"
        self._prepared: tuple[TrainStream, int, Future[Batch]] | None = None

    def next(self, stream: TrainStream) -> Batch:
        """The next batch: the one prepared, unless the stream has been set back or on meanwhile.

        Raises what the stream raises.
        """
        number, prepared = stream.batches, self._prepared
        if prepared is not None and prepared[:2] == (stream, number):
            batch = prepared[2].result()
        else:
            batch = self._prepare(stream, number)
        stream.batches = number + 1
        work = self._executor.submit(self._prepare, stream, number + 1)
        self._prepared = stream, number + 1, work
        return batch

    def _prepare(self, stream: TrainStream, number: int) -> Batch:
        tokens, targets = stream.batch(number)
        return (tokens.pin_memory(), targets.pin_memory()) if self._pinned else (tokens, targets)


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
