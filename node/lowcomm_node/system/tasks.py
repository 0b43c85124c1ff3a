"""Work beside other work: tasks whose defects are logged and never lost, stages that are timed, and
memory that one thread reads while another may not change it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from types import TracebackType
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.system.logs import log

DEFECT_PAUSE = 10.0
"""Seconds after which work that met a defect is begun again."""
MAX_WARNING = 300

Warn = Callable[[str], object]


class Enduring:
    """Context in which a defect is logged and warned of, and ends nothing. Enter it repeatedly."""

    def __init__(self, trouble: str, warn: Warn = lambda text: None) -> None:
        """``trouble``: the consequence of a defect, for the owner."""
        self._trouble = trouble
        self._warn = warn
        self._last = ""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if repr(error) != self._last:  # else a loop would fill log and board
            self._last = repr(error)
            log.error("task.defect", trouble=self._trouble, error=repr(error), exc_info=error)
            self._warn(f"{self._trouble}, because of a defect: {error!r}"[:MAX_WARNING])
        return True


async def endure(
    trouble: str, work: Callable[[], Awaitable[Any]], warn: Warn = lambda text: None
) -> None:
    """Run ``work`` to its end; after a defect begin it again."""
    enduring = Enduring(trouble, warn)
    while True:
        with enduring:
            await work()
            return
        await asyncio.sleep(DEFECT_PAUSE)


async def repeat(work: Callable[[], Awaitable[Any]], pause: Callable[[], float]) -> None:
    """Repeat ``work`` until cancelled; ``pause``: seconds in between."""
    while True:
        await work()
        await asyncio.sleep(pause())


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task whose result nobody awaits."""
    task = asyncio.create_task(work)
    task.add_done_callback(log_defect)
    return task


@asynccontextmanager
async def in_time(
    seconds: float, reason: str = "did not answer in time", error: type[LinkLost] = LinkLost
) -> AsyncIterator[None]:
    """Context that lasts at most ``seconds``. Raises ``error`` with the reason after that."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise error(reason) from None


class Tasks(set[asyncio.Task[Any]]):
    """Tasks that are held until they end."""

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task whose result nobody awaits."""
        task = start(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all of them, and wait for their end."""
        for task in (tasks := list(self)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def log_defect(task: asyncio.Task[Any]) -> None:
    """Log a task that ended with an exception."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task.defect", error=repr(error), exc_info=error)


async def first_of(*works: Coroutine[Any, Any, Any]) -> int:
    """Run several works until one of them ends, and cancel the others; its index.

    The first in order counts where several have ended. Raises what any of these has raised.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        return next(index for index, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Stages:
    """Seconds by stage. Stages may run at the same time, and one may come in several parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        """When the last part of each stage ended (monotonic seconds)."""

    def add(self, stage: str, seconds: float) -> None:
        """Count a part of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.ended[stage] = monotonic()

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Context in which a part of a stage is carried out."""
        began = monotonic()
        try:
            yield
        finally:
            self.add(stage, monotonic() - began)


class Reading:
    """Use of memory by one thread, which writes a large state from where it is, uncopied."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._ended = threading.Event()
        self.end = self._ended.set  # once all is read
        self.is_void = False
        """Whether the memory was changed before it was read: its reader took too long."""

    def wait(self) -> None:
        """Wait until it has ended, or void it once its time is up."""
        if not self._ended.wait(max(0.0, self._deadline - monotonic())):
            self.is_void = True


class Readings:
    """Readings of the memory of one thread. Only this thread begins them, and waits for them."""

    def __init__(self) -> None:
        self._under_way: list[Reading] = []

    def begin(self, seconds: float) -> Reading:
        """Start a read that may delay writers for at most ``seconds``."""
        self._under_way.append(Reading(monotonic() + seconds))
        return self._under_way[-1]

    def wait(self) -> None:
        """Wait for all readers, before the memory is changed."""
        while self._under_way:
            self._under_way.pop().wait()
