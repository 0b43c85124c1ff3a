"""Events of a node, told to whoever listens."""

import asyncio
from time import time
from typing import Any

MAX_WAITING = 1000


class News:
    """Subscribers each get every event; one that does not read loses the oldest, never holds up the node."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[dict[str, Any]], bool] = {}

    def subscribe(self, every_step: bool = True) -> asyncio.Queue[dict[str, Any]]:
        """A queue of events from now on; inner steps are left out unless ``every_step``."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_WAITING)
        self._queues[queue] = every_step
        return queue

    def unsubscribe(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        """Tell this queue no more."""
        self._queues.pop(queue, None)

    def tell(self, event: dict[str, Any], quiet: bool = False) -> None:
        """Tell all; ``quiet`` events (one an inner step) go only to those who asked for every step."""
        stamped = {"time": time(), **event}
        for queue, every_step in self._queues.items():
            if quiet and not every_step:
                continue
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(stamped)
