"""Clients of a bootstrap server: DHT peers that live as nodes do, without training, many in one
process.

Each has an identity, a p2pd and a place in the DHT of its own, publishes its record as a node does,
looks the peers of the run up again and again, and comes back in the same way: nobody
tells it to reconnect."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic, time

from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.swarm import rejoin
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record

AT_ONCE = 4
"""Clients that start together."""


class Client(Discovery):
    """One of them."""

    def __init__(self, home: Path, doors: Sequence[str], run_id: str, seconds: float) -> None:
        """``doors``: addresses of bootstrap servers; ``seconds``: between two looks."""
        self.identity = load_or_create_identity(home / "identity.key")
        super().__init__(
            self.identity,
            home / "identity.key",
            DhtSettings(
                listen=["/ip4/127.0.0.1/tcp/0"],
                initial_peers=doors,
                require_peers=False,  # who gets no answer on a busy machine goes on knocking
            ),
        )
        self.run_id, self.seconds = run_id, seconds
        self.rejoin = Rejoin(self, doors, lambda event: None)
        self.rejoin.publish = self.tell
        self.rejoin.record = peers_key(run_id), self.peer_id
        self._tasks: list[asyncio.Task[None]] = []
        self.seen: frozenset[str] = frozenset()
        """Peers of the run, as of the last look."""

    async def begin(self) -> None:
        """Enter, and live."""
        await self.start()
        await self.rejoin.enter(10.0)
        self._tasks = [
            asyncio.create_task(self.rejoin.run()),
            asyncio.create_task(_every(lambda: rejoin.HEARTBEAT, self.tell)),
            asyncio.create_task(_every(lambda: self.seconds, self.look)),
        ]

    async def tell(self) -> None:
        """Publish our record."""
        now, life = time(), 3 * rejoin.HEARTBEAT
        info = PeerInfo(
            peer_id=self.peer_id,
            run_id=self.run_id,
            phase=Phase.TRAINING,
            issued=now,
            expires=now + life,
            addresses=("127.0.0.1:1",),
            certificate=bytes(32),
            entry_points=self.addresses()[:4],
        )
        await self.publish(
            peers_key(self.run_id), self.peer_id, write_record(info, self.identity), life
        )

    async def look(self) -> None:
        """Look the peers of the run up."""
        records = await self.lookup(peers_key(self.run_id))
        self.seen = frozenset(records)
        self.rejoin.listed(set(records) - {self.peer_id})

    def doors(self) -> dict[str, bool]:
        """Which of the named doors answer."""
        return {door.peer_id: door.answers for door in self.rejoin.describe().doors if door.named}

    async def close(self) -> None:
        """End all that it does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()


class Crowd:
    """Many clients in one process; ``close`` ends them."""

    def __init__(self, folder: Path, doors: Sequence[str], run_id: str, seconds: float) -> None:
        self._folder, self._doors, self._run_id, self._seconds = folder, doors, run_id, seconds
        self.clients: list[Client] = []

    async def grow(self, count: int) -> None:
        """Start more of them, AT_ONCE together."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def begin(client: Client) -> None:
            async with slots:
                await client.begin()

        first = len(self.clients)
        homes = (self._folder / f"client-{number}" for number in range(first, first + count))
        self.clients += [Client(home, self._doors, self._run_id, self._seconds) for home in homes]
        await asyncio.gather(*(begin(client) for client in self.clients[first:]))

    async def close(self) -> None:
        """End them all."""
        await asyncio.gather(*(client.close() for client in self.clients))


async def _every(seconds: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
    while True:
        began = monotonic()
        await work()
        await asyncio.sleep(max(0.0, seconds() - (monotonic() - began)))
