"""What must hold for the watches over a node's connections: a defect in one ends neither."""

import asyncio
from time import time
from typing import Any

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.tunnelling import ADA
from helpers.wire import RUN
from lowcomm_node.net import congestion, unauthenticated
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.congestion import BBR, CongestionWatch
from lowcomm_node.net.endpoint import Endpoint
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.net.unauthenticated import Unauthenticated
from lowcomm_node.system import tasks
from lowcomm_protocol.errors import Refusals


async def test_a_defect_in_a_look_at_connections_is_told_and_the_next_look_comes(
    monkeypatch: pytest.MonkeyPatch,
):
    looks: dict[type, int] = {}
    both = asyncio.Event()

    def look(watch: Any, *port: int) -> None:
        looks[type(watch)] = looks.get(type(watch), 0) + 1
        if looks[type(watch)] == 1:
            raise RuntimeError(f"a defect of {type(watch).__name__}")
        if len(looks) == 2 and min(looks.values()) > 2:
            both.set()

    for module in (congestion, unauthenticated):
        monkeypatch.setattr(module, "EVERY", 0.001)
    monkeypatch.setattr(tasks, "DEFECT_PAUSE", 0.001)
    monkeypatch.setattr(congestion, "allowed", lambda: [BBR])
    for watch in (CongestionWatch, Unauthenticated):
        monkeypatch.setattr(watch, "look", look)
    discovery = MemoryDiscovery(ADA.peer_id, MemoryNetwork(time))
    handlers: Any = None
    endpoint = Endpoint(
        Gatekeeper(ADA, RUN, time), handlers, discovery, Bandwidth(), PeerLimit(), Refusals()
    )
    endpoint.port = 1
    warnings: list[str] = []
    watching = asyncio.create_task(endpoint.watch(lambda event: None, warnings.append))
    try:
        async with asyncio.timeout(20):
            await both.wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await endpoint.close()
    assert sorted(text.partition(": ")[2] for text in warnings) == [
        f"RuntimeError('a defect of {name}')" for name in ("CongestionWatch", "Unauthenticated")
    ]
