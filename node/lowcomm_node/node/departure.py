"""Whether a node is to leave, how, and by when it must be gone."""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

from lowcomm_node.node.process import REAP_DEADLINE, STOP_DEADLINE

T = TypeVar("T")
GOODBYE_DEADLINE = 5.0
END_DEADLINE = 15.0
"""Seconds to close connections and end p2pd, when all that matters is done."""


class Departure:
    """Asked for by the owner, by a signal, or by the run; carried out by the daemon."""

    def __init__(self, saving: Callable[[], float]) -> None:
        """``saving``: seconds that the node may take to end exchanges, save and evaluate."""
        self.wanted = asyncio.Event()
        """Set once the node shall leave in peace."""
        self.hurry = False
        """Whether it leaves without waiting long for exchanges."""
        self._saving = saving
        self._by: float | None = None
        """When it must be gone, once it has begun to leave (monotonic seconds)."""
        self._main: asyncio.Task[Any] | None = None

    @property
    def left(self) -> float | None:
        """Seconds that it may still take; below 0 where it should be gone. None while it stays."""
        return None if self._by is None else self._by - monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether it ends at once, without saving."""
        return self._main is not None and self._main.cancelling() > 0

    def attend(self) -> None:
        """Take the current task as the one that ends the node when it is cancelled."""
        self._main = asyncio.current_task()

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Wait for ``work``, but no longer than until the node shall leave; None then."""
        task = asyncio.create_task(work)
        wanted = asyncio.create_task(self.wanted.wait())
        try:
            await asyncio.wait({task, wanted}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for waiter in (task, wanted):
                waiter.cancel()
            await asyncio.gather(task, wanted, return_exceptions=True)

    def begin(self) -> None:
        """Count the seconds from now on."""
        rest = GOODBYE_DEADLINE + STOP_DEADLINE + REAP_DEADLINE + END_DEADLINE
        self._by = monotonic() + self._saving() + rest

    def finish(self) -> None:
        """End the running exchanges, save, say goodbye, leave."""
        self.begin()
        self.wanted.set()

    def stop(self, now: bool = True) -> None:
        """Save, end the running exchanges soon, leave; ``now``: leave without saving."""
        self.begin()
        if not now:
            self.hurry = True
            self.wanted.set()
        elif self._main is not None:
            self._main.cancel()
