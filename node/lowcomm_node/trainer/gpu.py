"""Work of the trainer on a GPU: compiled blocks, copies beside training, merges.

    capture      a copy on the device between two steps, which takes microseconds
                 └─ to host memory on a stream of its own, while training goes on
    outer step   in host memory, where slow weights are
    merge        └─ the new slow weights, and the weights as captured, to the device likewise
                 then a few operations between two steps

Host memory that is pinned copies about three times as fast and beside other work, but a machine
can't swap it: two pieces are pinned, and vectors pass through them piece by piece. Where the
device's memory does not hold a vector more, the caller copies as training waits.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowcomm_node.models.base import Model
from lowcomm_node.models.devices import copies_beside, module_of
from lowcomm_protocol.exchange import outer
from lowcomm_protocol.plan import Fragment
from lowcomm_protocol.rows import gather
from lowcomm_protocol.spec.outer import OuterSettings

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables by which torch and Triton find what they compiled, and their folders in a home."""
CHUNK = 1 << 22
"""Values of a piece: 16 MiB, in which a copy reaches its rate."""


def use(device: torch.device) -> None:
    """Let this thread work on a device from now on."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def prepare(device: torch.device, folder: Path) -> None:
    """Set this process up for a device, before the first tensor is there. Compiled code is kept in
    ``folder`` of the home, unless the owner names another."""
    if device.type == "cpu":
        return
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / name))
    # Products of fp32 matrices outside of autocast: TF32, with bf16's exponents and 10 bits.
    torch.set_float32_matmul_precision("high")


def loss_of(model: Model, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model for training."""
    if not compiled:
        return model.loss
    blocks = model.compiled_parts()
    if not blocks:
        return partial(_compiled_loss(type(model)), model)
    for block in blocks:
        block.compile()
    model.compiled = True
    return model.loss


@cache
def _compiled_loss(kind: type[Model]) -> Callable[..., Any]:
    """Replicas of one process share what was compiled."""
    return torch.compile(kind.loss)


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class Landing:
    """Vectors on the device, there after an event (None on a CPU)."""

    vectors: tuple[Tensor, ...]
    ready: Any

    def wait(self) -> tuple[Tensor, ...]:
        """The vectors, for work that is asked for from now on by this thread."""
        if self.ready is not None:
            stream = module_of(self.vectors[0].device).current_stream(self.vectors[0].device)
            stream.wait_event(self.ready)
            for vector in self.vectors:
                vector.record_stream(stream)
        return self.vectors


class Copies:
    """Copies of one replica. ``snapshot`` is for the thread that trains, the rest for the one that
    codes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside, self._module = copies_beside(device), module_of(device)
        self._stream = self._module.Stream(device) if self._beside else None
        self._rooms = [torch.empty(CHUNK, pin_memory=self._beside) for _ in range(2)]
        self._used: list[Any] = [None, None]
        """After which event each room is free."""

    def snapshot(self, fragment: Fragment, weights: Mapping[str, Tensor]) -> Landing | None:
        """A copy of a fragment on the device; None without memory for it."""
        flat = self.room(fragment.numel)
        if flat is None:
            return None
        gather(fragment, weights, flat)
        return Landing((flat,), self._event())

    def to_host(self, landing: Landing, out: Tensor) -> None:
        """Copy a snapshot into ``out``, in host memory; returns when it is there."""
        with self._module.stream(self._stream):
            (source,) = landing.wait()
            chunks = [*_chunks(out.numel()), None]
            for number, here in enumerate(chunks):
                room, other = number % 2, (number + 1) % 2
                if here is not None:
                    filled = self._rooms[room][: here.stop - here.start]
                    filled.copy_(source[here], non_blocking=True)
                    self._used[room] = self._event()
                if number and (before := chunks[number - 1]) is not None:
                    self._wait(other)
                    out[before].copy_(self._rooms[other][: before.stop - before.start])

    def to_device(self, *sources: Tensor) -> Landing | None:
        """Copy vectors of host memory to the device; None without memory for them."""
        with self._module.stream(self._stream):
            vectors: list[Tensor] = []
            for source in sources:
                target = self.room(source.numel())
                if target is None:
                    return None
                vectors.append(target)
            for source, target in zip(sources, vectors, strict=True):
                for number, here in enumerate(_chunks(source.numel())):
                    room = number % 2
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

    def _event(self) -> Any:
        """An event after the work so far on the stream of this thread."""
        if not self._beside:
            return None
        return self._module.current_stream(self._device).record_event()

    def _wait(self, room: int) -> None:
        """Until a room may be read or written here."""
        if self._used[room] is not None:
            self._used[room].synchronize()
            self._used[room] = None


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, CHUNK):
        yield slice(start, min(numel, start + CHUNK))


def merge(settings: OuterSettings, theta: Tensor, phi_new: Tensor, theta_captured: Tensor) -> bool:
    """`merge` of ``exchange/outer.py`` in place on ``theta``, to the same bits; whether all is
    finite. Waits for the device.

    Every operation rounds to float32 once: none multiplies and adds at once.
    """
    share = np.float32(1.0 - settings.mix)
    rest = np.float32(1.0) - share
    finite = torch.ones((), dtype=torch.bool, device=theta.device)
    for here in _chunks(theta.numel()):  # their temporary vectors are small
        fast, slow, before = theta[here], phi_new[here], theta_captured[here]
        if settings.merge == "shift":
            merged = torch.where(fast == before, slow, fast + (slow - before))
        elif share < np.float32(0.5):
            merged = fast + (slow - fast) * float(share)
        else:
            merged = slow - (slow - fast) * float(rest)
        fast.copy_(merged)
        finite &= merged.isfinite().all()
    return bool(finite)


def merges_alike(device: torch.device, settings: OuterSettings) -> bool:
    """Whether merges on a device give the same bits as in host memory.

    A difference of one bit on one card, with one release of torch or of a driver, would go unseen
    and spoil an average of the swarm. So a few thousand values are tried first.
    """
    theta, phi, captured = (torch.sin(torch.arange(5000.0) * step) for step in (1.1, 2.3, 3.7))
    captured[::3] = theta[::3]
    there = [one.to(device, copy=True) for one in (theta, phi, captured)]
    outer.merge(settings, theta, phi, captured)
    merge(settings, *there)
    return torch.equal(there[0].cpu().view(torch.int32), theta.view(torch.int32))
