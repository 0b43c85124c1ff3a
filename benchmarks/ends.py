"""The ends of a measurement: processes that answer requests, and nodes that carry contents."""

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from helpers.tunnelling import End
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.net.p2pd import RelayLimits
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.system.logs import configure_logs
from lowcomm_node.system.machine import keep_freed_memory

TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
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


def cpu_seconds(ends: list[EndProcess], name: str = "") -> float:
    """Seconds of CPU of all processes of the ends, or of those with this name."""
    times = [one.cpu_times() for one in family(ends) if not name or one.name() == name]
    return sum(one.user + one.system for one in times)


@contextmanager
def scratch() -> Any:
    """A folder for the ends' keys and control sockets, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield Path(folder)


@asynccontextmanager
async def transport(
    folder: Path, name: str, listen: tuple[str, ...] = (TCP,), **discovery: Any
) -> AsyncIterator[End]:
    """The transport of a node: server and channels, p2pd and pipes where it listens."""
    key = folder / f"{name}.key"
    identity = load_or_create_identity(key)
    settings = DhtSettings(listen=listen, punching=False, **discovery)
    streams = Discovery(identity, key, settings)
    end = End(identity, streams, make_certificate())
    try:
        if listen:
            await streams.start()
            await streams.revive()
        await end.start()
        yield end
    finally:
        await end.close()
        await streams.close()


@asynccontextmanager
async def relay(folder: Path) -> AsyncIterator[tuple[list[str], Answer]]:
    """A relay; introduces itself by its addresses."""
    limits = RelayLimits(bytes=64 * 2**30)
    async with transport(folder, "relay", relay=limits) as end:
        yield list(end.streams.addresses()), unasked


async def unasked(request: Any) -> None:
    """Answer of an end that only others call."""
