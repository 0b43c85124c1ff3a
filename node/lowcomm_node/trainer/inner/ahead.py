"""The next batch, prepared while a step computes: drawn, read from the disk, put where a GPU copies
from without waiting."""

from concurrent.futures import Executor, Future

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
