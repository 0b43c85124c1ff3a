"""What a node shows of itself: phase, progress, warnings, and events for its listeners."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from time import monotonic, time
from typing import Any

from lowcomm_node.catalogue.waits import WaitCode, Waiting
from lowcomm_node.catalogue.warnings import WarningCode
from lowcomm_node.node.messages import Stepped, Tokenizing
from lowcomm_node.status.events import Notice, PhaseEntered, Warned, details
from lowcomm_node.status.model import CheckpointStatus, Progress
from lowcomm_node.system.events import Event
from lowcomm_node.system.logs import log

MAX_WAITING = 1000
MAX_WARNINGS = 20
_OF_A_STEP = {one.name for one in fields(Progress)} & {one.name for one in fields(Stepped)}


@dataclass(frozen=True)
class Caution:
    """Something that the owner should know, with its code."""

    code: WarningCode
    text: str


class Board:
    """``status`` reads it, and each subscriber gets every event.

    A subscriber that does not read loses the oldest; it never holds up the node.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.waiting: Waiting | None = None
        """What it waits for; None if for nothing."""
        self.changed = monotonic()
        """When its phase, or what it waits for, changed last (monotonic seconds)."""
        self.progress = Progress()
        self.checkpoint: CheckpointStatus | None = None
        """The newest."""
        self.tokenizing: Tokenizing | None = None
        """While text is tokenized."""
        self.warnings: list[Caution] = []
        """The last ones, the newest last."""
        self._queues: dict[asyncio.Queue[Notice], bool] = {}

    def subscribe(self, every_step: bool = True) -> asyncio.Queue[Notice]:
        """A queue of events from now on; inner steps are left out unless ``every_step``."""
        queue: asyncio.Queue[Notice] = asyncio.Queue(MAX_WAITING)
        self._queues[queue] = every_step
        return queue

    def unsubscribe(self, queue: asyncio.Queue[Notice]) -> None:
        """Tell this queue no more."""
        self._queues.pop(queue, None)

    def enter(self, phase: str, waiting: Waiting | None) -> None:
        """Be in a phase from now on, and perhaps wait for something in it."""
        self.show(waiting)
        if phase != self.phase:
            self.phase = phase
            self.changed = monotonic()
            self.tell(PhaseEntered(phase=phase))

    def show(self, waiting: Waiting | None) -> None:
        """Wait for something else than before."""
        if waiting != self.waiting:
            self.waiting = waiting
            self.changed = monotonic()

    def showing(self, code: WaitCode) -> Callable[[str | None], None]:
        """For a room that waits for one thing only: takes its sentence, or None."""
        return lambda text: self.show(None if text is None else Waiting(code, text))

    def warn(self, code: WarningCode, text: str) -> None:
        """Something that the owner should know."""
        self.warnings = [*self.warnings, Caution(code, text)][-MAX_WARNINGS:]
        self.tell(Warned(text=text, code=code))

    def warning(self, code: WarningCode) -> Callable[[str], None]:
        """For a room that warns of one thing only: takes its sentence."""
        return partial(self.warn, code)

    def withdraw(self, code: WarningCode) -> None:
        """Warnings of this hold no longer."""
        self.warnings = [one for one in self.warnings if one.code is not code]

    def tell(self, event: Event) -> None:
        """An event: to the log, and to all that listen."""
        self._pass_on(event, self._queues)
        log.info(event.name, **details(event))

    def tell_step(self, event: Event) -> None:
        """An inner step: only to those that asked for every one."""
        self._pass_on(event, [queue for queue, every_step in self._queues.items() if every_step])

    def _pass_on(self, event: Event, queues: Iterable[asyncio.Queue[Notice]]) -> None:
        stamped = Notice(time(), event)
        for queue in queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(stamped)

    def advance(self, **figures: Any) -> None:
        """Take in newer figures of ``Progress``."""
        self.progress = replace(self.progress, **figures)

    def stepped(self, news: Stepped) -> None:
        """Take in what the trainer tells of an inner step."""
        self.advance(**{name: getattr(news, name) for name in _OF_A_STEP})

    def evaluated(self, loss: float) -> None:
        """Take in a loss on held-out text."""
        first = self.progress.val_loss_first
        self.advance(val_loss_first=loss if first is None else first, val_loss_last=loss)

    def position(self) -> tuple[int, int, float]:
        """Swarm step, own steps and tokens a second, as others are told."""
        now = self.progress
        return now.swarm_step or 0, now.steps or 0, now.tokens_per_second or 0.0
