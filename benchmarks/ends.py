"""The ends of a measurement: processes that answer requests."""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Any

import kit
import psutil
import uvloop

from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.machine import keep_freed_memory

DEADLINE = 600.0
"""Seconds for one request."""
Answer = Callable[[Any], Awaitable[Any]]
"""Carries out one request of the measuring process."""
Role = Callable[..., AbstractAsyncContextManager[tuple[Any, Answer]]]
"""Opens one end: its introduction, and the function that answers requests."""


class EndProcess:
    """One end in a process of its own, until ``close``."""

    def __init__(self, role: Role, *settings: Any) -> None:
        """Start ``role(*settings)``; ``introduction`` is its first answer."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_play, args=(theirs, role, settings))
        self.process.start()
        theirs.close()
        self.introduction = self.answer()

    def ask(self, request: Any) -> Any:
        """Have it do something."""
        self.send(request)
        return self.answer()

    def send(self, request: Any) -> None:
        """Begin a request, whose answer is read later."""
        self._pipe.send(request)

    def answer(self) -> Any:
        """The next answer. Raises TimeoutError, and EOFError if the process has ended."""
        if not self._pipe.poll(DEADLINE):
            raise TimeoutError("an end of the measurement does not answer")
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.join(30)
        self.process.kill()


def _play(pipe: Connection, role: Role, settings: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes can't be spawned
    configure_logs(-1)
    keep_freed_memory()

    async def play() -> None:
        async with role(*settings) as (introduction, answer):
            pipe.send(introduction)
            while (request := await asyncio.to_thread(_next, pipe)) is not None:
                async with asyncio.timeout(DEADLINE):
                    pipe.send(await answer(request))

    uvloop.run(play())


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def family(ends: list[EndProcess]) -> list[psutil.Process]:
    """Processes of the ends and all that they have started."""
    roots = [psutil.Process(end.process.pid) for end in ends]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def cpu_seconds(ends: list[EndProcess]) -> float:
    """Seconds of CPU of all processes of the ends."""
    return sum(kit.cpu_of(end.process.pid) for end in ends)
