"""What a node tells of itself: what it is at, how far it is, what went wrong, and events to whoever listens."""

import asyncio
from collections.abc import Iterable
from time import monotonic, time
from typing import Any

from lowcomm_node.system.logs import log

MAX_WAITING = 1000
MAX_WARNINGS = 20


class Bulletin:
    """``status`` reads it. Subscribers each get every event; one that does not read loses the oldest, never holds up the node."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.waiting: str | None = None
        """What it waits for; None if for nothing."""
        self.changed = monotonic()
        """When its phase, or what it waits for, changed last (monotonic seconds)."""
        self.progress: dict[str, Any] = {}
        """Of the trainer, by the names that ``status`` has for it."""
        self.checkpoint: dict[str, Any] | None = None
        """The newest: ``step`` and ``path``."""
        self.tokenizing: dict[str, Any] | None = None
        """While text is tokenized: ``done`` and ``total`` bytes, ``tokens``, ``rate`` and seconds that are ``remaining``."""
        self.warnings: list[str] = []
        """The last ones, the newest last."""
        self._queues: dict[asyncio.Queue[dict[str, Any]], bool] = {}

    def subscribe(self, every_step: bool = True) -> asyncio.Queue[dict[str, Any]]:
        """A queue of events from now on; inner steps are left out unless ``every_step``."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_WAITING)
        self._queues[queue] = every_step
        return queue

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        """Tell this queue no more."""
        self._queues.pop(queue, None)

    def enter(self, phase: str, waiting: str | None) -> None:
        """Be in a phase from now on, and perhaps wait for something in it."""
        self.show(waiting)
        if phase != self.phase:
            self.phase, self.changed = phase, monotonic()
            self.tell({"event": "phase", "phase": phase})

    def show(self, waiting: str | None) -> None:
        """Wait for something else than before."""
        if waiting != self.waiting:
            self.waiting, self.changed = waiting, monotonic()

    def warn(self, text: str) -> None:
        """Something that the owner should know."""
        self.warnings = [*self.warnings, text][-MAX_WARNINGS:]
        self.tell({"event": "warning", "text": text})

    def withdraw(self, beginning: str) -> None:
        """Warnings that begin so hold no longer."""
        self.warnings = [warning for warning in self.warnings if not warning.startswith(beginning)]

    def tell(self, event: dict[str, Any]) -> None:
        """An event: to the log, and to all that listen."""
        self._pass_on(event, self._queues)
        log.info(event["event"], **{key: value for key, value in event.items() if key not in ("event", "time")})

    def tell_step(self, event: dict[str, Any]) -> None:
        """An inner step: only to those that asked for every one."""
        self._pass_on(event, [queue for queue, every_step in self._queues.items() if every_step])

    def _pass_on(self, event: dict[str, Any], queues: Iterable[asyncio.Queue[dict[str, Any]]]) -> None:
        stamped = {"time": time(), **event}
        for queue in queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(stamped)

    def position(self) -> tuple[int, int, float]:
        """Swarm step, own steps and tokens a second, as others are told."""
        get = self.progress.get
        return int(get("swarm_step", 0)), int(get("steps", 0)), float(get("tokens_per_second", 0.0))
