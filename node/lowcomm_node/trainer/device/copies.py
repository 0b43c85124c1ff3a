"""Copies between a GPU and host memory that no inner step waits for.

    capture      a copy on the device between two steps, which takes microseconds
                 └─ to host memory on a stream of its own, while training goes on
    outer step   in host memory, where slow weights are
    merge        └─ the new slow weights, and the weights as captured, to the device likewise
                 then one kernel between two steps

Host memory that is pinned copies about three times as fast and beside other work, but a machine
can't swap it: two pieces are pinned, and vectors pass through them piece by piece. Where the
device's memory does not hold a vector more, the caller copies as training waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowcomm_protocol.plan import Fragment
from lowcomm_protocol.rows import gather

CHUNK = 1 << 22
"""Values of a piece: 16 MiB, in which a copy reaches its rate."""


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class Landing:
    """Vectors on the device, and the event (None on a CPU) after which they are there."""

    vectors: tuple[Tensor, ...]
    ready: Any

    def wait(self) -> tuple[Tensor, ...]:
        """The vectors, for work that is asked for from now on by this thread."""
        if self.ready is not None:
            here = torch.cuda.current_stream(self.vectors[0].device)
            here.wait_event(self.ready)
            for one in self.vectors:
                one.record_stream(here)
        return self.vectors


class Copies:
    """Copies of one replica. ``snapshot`` is for the thread that trains, the rest for the one that
    codes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._rooms = [torch.empty(CHUNK, pin_memory=self._on_gpu) for _ in range(2)]
        self._used: list[Any] = [None, None]
        """After which event each room is free."""

    def snapshot(self, fragment: Fragment, weights: Mapping[str, Tensor]) -> Landing | None:
        """A copy of a fragment on the device, as of the work asked for so far; None without
        memory for it."""
        flat = self.room(fragment.numel)
        if flat is None:
            return None
        gather(fragment, weights, flat)
        return Landing((flat,), self._event())

    def to_host(self, landing: Landing, out: Tensor) -> None:
        """Copy a snapshot into ``out``, in host memory; returns when it is there."""
        with self._beside():
            (source,) = landing.wait()
            before: tuple[slice, int] | None = None
            for number, here in enumerate(_chunks(out.numel())):
                room = number % 2
                self._rooms[room][: here.stop - here.start].copy_(source[here], non_blocking=True)
                self._used[room] = self._event()
                if before is not None:
                    self._take(*before, out)
                before = (here, room)
            if before is not None:
                self._take(*before, out)

    def to_device(self, *sources: Tensor) -> Landing | None:
        """Copy vectors of host memory to the device; None without memory for them."""
        with self._beside():
            vectors: list[Tensor] = []
            for source in sources:
                target = self.room(source.numel())
                if target is None:
                    return None
                vectors.append(target)
            number = 0
            for source, target in zip(sources, vectors, strict=True):
                for here in _chunks(source.numel()):
                    room, number = number % 2, number + 1
                    self._wait(room)
                    filled = self._rooms[room][: here.stop - here.start].copy_(source[here])
                    target[here].copy_(filled, non_blocking=True)
                    self._used[room] = self._event()
            return Landing(tuple(vectors), self._event())

    def room(self, numel: int) -> Tensor | None:
        """A vector on the device, which may hold anything; None without memory for it."""
        try:
            return torch.empty(numel, dtype=torch.float32, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def _take(self, here: slice, room: int, out: Tensor) -> None:
        self._wait(room)
        out[here].copy_(self._rooms[room][: here.stop - here.start])

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> Any:
        """What is asked for so far on the stream of this thread."""
        if not self._on_gpu:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _wait(self, room: int) -> None:
        """Until a room may be read or written here."""
        if self._used[room] is not None:
            self._used[room].synchronize()
            self._used[room] = None


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, CHUNK):
        yield slice(start, min(numel, start + CHUNK))
