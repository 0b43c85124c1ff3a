"""Other machines of the owner compute gradients for a trainer: replicas on a local network.

    trainer ──weights, windows──► worker on a lender     every step, to each machine its windows
            ◄──loss, gradients─── (``worker.py``)

A worker has neither text nor optimizer nor slow weights: only the trainer knows peers, and moves
weights. So nothing is lost with a worker. If it is gone or late, its windows are computed here in
the same step, and it takes part again once it is back.

Each machine gets as many windows as let all of them end at the same time, from what its windows and
the line between have taken. Where a line costs more than a machine brings, that is none.
"""

import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, Queue
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.errors import LinkLost
from lowcomm_node.models.base import Model, trained
from lowcomm_node.node.messages import LenderFigures
from lowcomm_node.trainer.wire import PATIENCE, Wire, connect
from lowcomm_protocol.spec.run import RunSpec

RETRY = 10.0
"""Seconds between two tries to reach a lender."""
LATE, LATE_SECONDS = 2.0, 1.0
"""A lender is late once a step takes this many times as long as it should, and we have waited this
many seconds."""
REST = 50
"""A machine that gets no windows is measured again after this many times what one takes there."""
KEPT = 0.8
"""Share of a smoothed time that the next step leaves."""


def untrained(model: Model) -> list[tuple[Tensor, torch.dtype]]:
    """What a worker is sent once, and in which form: frozen weights and factors; nothing where all
    is trained."""
    if all(one.requires_grad for one in model.parameters()):
        return []
    # A processor keeps frozen weights in fp32, a GPU in bf16, of which their values are.
    frozen = [(one, torch.bfloat16) for one in model.parameters() if not one.requires_grad]
    return [*frozen, *((one, one.dtype) for one in model.buffers())]


@dataclass
class Pace:
    """What a machine has taken, in smoothed seconds."""

    window: float = 0.0
    """To compute one window; 0 before the first."""
    line: float = 0.0
    """For weights and gradients on their way."""

    def measured(self, window: float, line: float) -> None:
        """Take in one step."""
        kept = KEPT if self.window else 0.0
        self.window = kept * self.window + (1 - kept) * window
        self.line = kept * self.line + (1 - kept) * line

    def seconds(self, windows: int) -> float:
        """What so much work should take."""
        return self.line + self.window * windows if windows else 0.0


def share_out(count: int, own: Pace, others: Sequence[Pace | None]) -> list[int]:
    """Windows for us and for each of the others, so that the last one ends soonest.

    None is a machine that is away. One that was not measured yet gets a window.
    """
    shares = [0] * (1 + len(others))
    for place, one in enumerate(others, start=1):
        if one is not None and not one.window and sum(shares) < count - 1:
            shares[place] = 1
    paces = [own, *others]
    for _ in range(count - sum(shares)):
        ends = [
            inf if one is None or (not one.window and place) else one.seconds(had + 1)
            for place, (one, had) in enumerate(zip(paces, shares, strict=True))
        ]
        shares[ends.index(min(ends))] += 1
    return shares


@dataclass
class _Task:
    """The part of a step that a worker does."""

    header: dict[str, Any]
    tensors: list[Tensor]
    outcome: "Future[tuple[float, list[Tensor]]]"


class Lent:
    """One lender, as the trainer sees it; it connects by itself, again and again."""

    def __init__(self, name: str, path: str, spec: RunSpec, model: Model) -> None:
        """``path``: socket of the daemon, which opens a connection to the machine's worker."""
        self.name = name
        self.why_away = "it is being connected"
        """Empty while it computes."""
        self.pace = Pace()
        self.windows = 0
        """Windows of the last step."""
        self.bytes = 0
        """Sent and received, in all."""
        self._task: _Task | None = None
        """The last one."""
        self._measured = monotonic()
        self._path = path
        separator = model.separator
        self._built_from = {"spec": spec.canonical().decode(), "separator": separator}
        self._sent_once = [one.detach().to("cpu", form) for one, form in untrained(model)]
        self._shapes = [one.shape for one in trained(model).values()]
        self._gradients = [torch.empty(shape) for shape in self._shapes]
        self._tasks: Queue[_Task | None] = Queue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lent-{name}", daemon=True)
        self._thread.start()

    @property
    def away(self) -> str:
        """Why it gets no windows now; empty if it does."""
        is_late = self._task is not None and not self._task.outcome.done()
        return self.why_away or ("it is late" if is_late else "")

    def begin(self, task: _Task) -> None:
        """Have its worker do a part of a step."""
        self._task = task
        self._tasks.put(task)

    def forget_old_pace(self) -> None:
        """Forget what it took, if that was long ago: its line may be better by now."""
        if monotonic() - self._measured > REST * self.pace.seconds(1):
            self.pace = Pace()

    def stop(self) -> None:
        """End the connection."""
        self._stopped.set()
        self._tasks.put(None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                with connect(self._path) as sock:
                    self._work(sock, Wire(sock))
            except (OSError, ValueError, LinkLost) as error:
                self.why_away = str(error) or type(error).__name__
            self._refuse()
            self._stopped.wait(RETRY)

    def _work(self, sock: socket.socket, wire: Wire) -> None:
        sock.settimeout(PATIENCE)
        wire.send(self._built_from, self._sent_once)
        self._heed(wire.read())
        self.pace, self.why_away = Pace(), ""
        while (task := self._next(sock)) is not None:
            try:
                sock.settimeout(PATIENCE)
                began = monotonic()
                wire.send(task.header, task.tensors)
                answer = self._heed(wire.read())
                wire.read_exactly(self._gradients)
                took, computed = monotonic() - began, float(answer["seconds"])
                self.windows = task.header["windows"][0]
                self.pace.measured(computed / self.windows, max(0.0, took - computed))
                self._measured = monotonic()
                self.bytes += sum(one.nbytes for one in (*task.tensors, *self._gradients))
                task.outcome.set_result((float(answer["loss"]), self._gradients))
            except BaseException as error:
                if not task.outcome.done():
                    task.outcome.set_exception(LinkLost(str(error)))
                raise

    def _next(self, sock: socket.socket) -> _Task | None:
        """The next task; sees meanwhile whether the worker is gone."""
        while not self._stopped.is_set():
            with suppress(Empty):
                return self._tasks.get(timeout=0.5)
            sock.settimeout(0.0)
            with suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    raise LinkLost("the connection ended")
        return None

    def _heed(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise LinkLost("the connection ended")
        if "failed" in answer:
            raise LinkLost(str(answer["failed"])[:500])
        return answer

    def _refuse(self) -> None:
        self.why_away = self.why_away or "the connection ended"
        self.windows = 0
        with suppress(Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task.outcome.set_exception(LinkLost(self.why_away))


class Lenders:
    """All lenders of a trainer."""

    def __init__(self, named: Iterable[tuple[str, str]], spec: RunSpec, model: Model) -> None:
        """``named``: name of each and the path of the daemon's socket for it."""
        self.machines = [Lent(name, path, spec, model) for name, path in named]
        self.own = Pace()
        """Ours, without a line."""
        self._began = self._expected = 0.0
        """When this step began, and the seconds that it should take."""
        self._under_way: list[tuple[slice, Future[tuple[float, list[Tensor]]]]] = []

    def begin(self, weights: Iterable[Tensor], tokens: Tensor, targets: Tensor, step: Any) -> slice:
        """Send weights and windows out; which windows are ours."""
        for one in self.machines:
            one.forget_old_pace()
        paces = [None if one.away else one.pace for one in self.machines]
        shares = share_out(len(tokens), self.own, paces)
        ends = [one.seconds(count) for one, count in zip(paces, shares[1:], strict=True) if one]
        self._began, self._expected = monotonic(), max(ends, default=0.0)
        self._under_way, start = [], shares[0]
        sent = [one.detach().cpu() for one in weights] if start < len(tokens) else []
        for place, (one, count) in enumerate(zip(self.machines, shares[1:], strict=True), start=1):
            one.windows = 0
            if not count:
                continue
            these, outcome = slice(start, start + count), Future[tuple[float, list[Tensor]]]()
            seed = step.seed + place
            header = {"windows": list(tokens[these].shape), "learned": step.learned, "seed": seed}
            batch = [some[these].to(torch.int32) for some in (tokens, targets)]
            one.begin(_Task(header, sent + batch, outcome))
            self._under_way.append((these, outcome))
            start += count
        return slice(0, shares[0])

    def measured(self, windows: int, seconds: float) -> None:
        """Take in what our own windows have taken."""
        if windows:
            self.own.measured(seconds / windows, 0.0)

    @torch.no_grad()
    def finish(self, weights: Sequence[Tensor]) -> tuple[float, list[slice]]:
        """Add the gradients that came; their part of the loss, and windows of machines that are
        gone or late, which are still to be computed."""
        loss, left, now = 0.0, list[slice](), monotonic()
        step = LATE * max(now - self._began, self._expected)
        end = max(now + LATE_SECONDS, self._began + step)
        for these, outcome in self._under_way:
            try:
                part, gradients = outcome.result(max(0.0, end - monotonic()))
            except (LinkLost, TimeoutError):
                left.append(these)
                continue
            loss += part
            for weight, gradient in zip(weights, gradients, strict=True):
                there = gradient.to(weight.device)
                if weight.grad is None:
                    weight.grad = there.clone()
                else:
                    weight.grad += there
        return loss, left

    def figures(self) -> tuple[LenderFigures, ...]:
        """What each does."""
        return tuple(
            LenderFigures(
                name=one.name,
                away=one.away,
                windows=one.windows,
                computing=round(one.pace.window, 4),
                moving=round(one.pace.line, 4),
                moved=one.bytes,
            )
            for one in self.machines
        )

    def stop(self) -> None:
        """End all connections."""
        for one in self.machines:
            one.stop()
