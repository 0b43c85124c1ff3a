"""The current DHT caller and its network. hivemind tells its storage neither."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic

from lowcomm_node.dht.eviction import Bringer
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import place_in
from lowcomm_node.net.control import Connection
from lowcomm_node.system.quota import prefixes_of

LOOK_EVERY, LASTS = 0.1, 30.0
"""Least seconds between two reads of p2pd's connections, and how long a result holds."""
_UNKNOWN = ("unknown",)
_BRINGER: ContextVar[Bringer | None] = ContextVar("bringer", default=None)

Connections = Callable[[], Awaitable[Sequence[Connection]]]


def bringer() -> Bringer | None:
    """The peer whose call is being handled; None if we store something ourselves."""
    return _BRINGER.get()


class Callers:
    """Finds the networks of our callers."""

    def __init__(self, connections: Connections, clock: Callable[[], float] = monotonic) -> None:
        self._connections = connections
        self._clock = clock
        self._places: dict[str, str] = {}
        self._looked = float("-inf")
        self._looking = asyncio.Lock()

    async def enter(self, peer_id: str) -> None:
        """A peer's call begins in this task."""
        _BRINGER.set(Bringer(peer_id, await self.networks_of(peer_id)))

    async def networks_of(self, peer_id: str) -> tuple[str, ...]:
        """The networks of a peer's connection, narrowest first. Unknown ones count as one
        network."""
        if not self._knows(peer_id):
            async with self._looking:
                if not self._knows(peer_id):
                    await self._look()
        place = self._places.get(peer_id)
        return prefixes_of(place) if place is not None else _UNKNOWN

    def _knows(self, peer_id: str) -> bool:
        return peer_id in self._places and self._clock() < self._looked + LASTS

    async def _look(self) -> None:
        # Each look lists all connections. The pause bounds its cost in a flood of callers.
        await asyncio.sleep(max(0.0, self._looked + LOOK_EVERY - self._clock()))
        with suppress(LinkLost):
            found = [
                (connection.peer_id, place_in(connection.address))
                for connection in await self._connections()
            ]
            # A direct connection sorts last, and so replaces a relayed one of the same peer.
            found.sort(key=lambda one: not one[1].startswith("relay"))
            self._places = dict(found)
        self._looked = self._clock()
