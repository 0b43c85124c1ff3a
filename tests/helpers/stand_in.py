"""A node of which only the control API is real, in a thread: for pages that no swarm would show."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowcomm_node.catalogue import CATALOGUE, Explanation
from lowcomm_node.status.events import Board
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.model import Limits, PeerStatus, Status
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.web.client import ControlClient
from lowcomm_node.web.server import ControlServer

WRITTEN = "a cup of tea"
BEFORE = "as it was"
FAREWELL = "The run is over.\ncontributed: 5 steps"


class StandIn:
    """Tells what it was given."""

    def __init__(self, status: Status) -> None:
        self.now = status
        self.known: list[PeerStatus] = []
        self.past: list[ExchangeEnded] = []
        self.drawn: list[Sample] = []
        self.calls: list[Any] = []
        self.board = Board()

    def status(self) -> Status:
        return self.now

    def peers(self) -> list[PeerStatus]:
        return self.known

    async def samples(self, since: int, most: int) -> list[Sample]:
        return [one for one in self.drawn if one.time >= since][-most:]

    async def exchanges(self, limit: int, since: int) -> list[ExchangeEnded]:
        return self.past[-limit:]

    def messages(self) -> Mapping[str, Mapping[str, Explanation]]:
        return CATALOGUE

    def limits(self) -> Limits:
        return self.now.limits

    async def generate(self, prompt: str, chat: Sequence[str], before: bool, **draw: object) -> str:
        self.calls.append(("generate", prompt, list(chat)))
        return BEFORE if before else WRITTEN

    def pause(self, seconds: float | None) -> None:
        self.calls.append(("pause", seconds))


@contextmanager
def serving(node: StandIn, home: Path, port: int = 0) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve it; the loop that it runs in. Closed and joined afterwards."""
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = ControlServer(node, node.board, Paths(home))
        loops.append(asyncio.get_running_loop())
        await server.start(port, "me")
        ready.set()
        await stop.wait()
        await server.close(FAREWELL)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield loops[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)
    assert not thread.is_alive()


def link(home: Path) -> str:
    """Lets one browser in."""
    with ControlClient(home) as client:
        return client.link()


def port_of(home: Path) -> int:
    """Where it listens."""
    return int(json.loads(Paths(home).control.read_text())["port"])
