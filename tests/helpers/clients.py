"""Clients of a bootstrap server: DHT peers that live as nodes do, without training, many in one
process.

Each has an identity, a p2pd and a place in the DHT of its own, publishes its record as a node does,
looks the peers of the run up again and again, and keeps its connection by the same watchdog: nobody
tells it to reconnect.

    python clients.py FOLDER COUNT RUN_ID SECONDS BEAT ADDRESS...

Commands on stdin, an answer in JSON to each (class Worker).

SECONDS lie between two looks of a client (a node's --poll, 2), BEAT seconds between two times that
it publishes, and that it knocks at a door (a node's 10).
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any

from lowcomm_node.dht.hivemind import DhtSettings, HivemindDiscovery
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.swarm import watchdog
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record

AT_ONCE = 4
"""Clients that start together."""
BEATS = {
    name: getattr(watchdog, name)
    for name in ("HEARTBEAT", "LOST_AFTER", "MISSING_AFTER", "READ_BACK")
}
"""What a node's signs of life are timed by, in seconds."""


class Client(HivemindDiscovery):
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
        self.rejoin = Rejoin(self, doors, None, lambda event: None)
        self.rejoin.publish_with(self.tell, (peers_key(run_id), self.peer_id))
        self._tasks: list[asyncio.Task[None]] = []
        self.looks: list[float] = []
        """Seconds that each look took."""
        self.seen: frozenset[str] = frozenset()
        """Peers of the run, as of the last look."""

    async def begin(self) -> None:
        """Enter, and live."""
        await self.start()
        await self.rejoin.enter(10.0)
        self._tasks = [
            asyncio.create_task(self.rejoin.run()),
            asyncio.create_task(_every(lambda: watchdog.HEARTBEAT, self.tell)),
            asyncio.create_task(_every(lambda: self.seconds, self.look)),
        ]

    async def tell(self) -> None:
        """Publish our record."""
        now, life = time(), 3 * watchdog.HEARTBEAT
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
        began = monotonic()
        records = await self.lookup(peers_key(self.run_id))
        self.looks.append(monotonic() - began)
        self.seen = frozenset(records)
        self.rejoin.listed(set(records) - {self.peer_id})

    def doors(self) -> dict[str, bool]:
        """Which of the named doors answer."""
        return {door.peer_id: door.answers for door in self.rejoin.describe().doors if door.named}

    async def ask_door(self, peer_id: str, seconds: float) -> list[float]:
        """Ask one peer for the run's records, as fast as it answers; seconds that each answer
        took."""
        from lowcomm_node.net.hivemind_parts import DHTID, PeerID

        key, peer = DHTID.generate(source=peers_key(self.run_id)), PeerID.from_base58(peer_id)
        took, end = list[float](), monotonic() + seconds
        while (began := monotonic()) < end:
            if await self._node.protocol.call_find(peer, [key]) is not None:
                took.append(monotonic() - began)
        return took

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


class Worker:
    """What a benchmark may ask of a crowd in another process."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    async def told(self) -> dict[str, Any]:
        """``told``: how many clients each door answers, the seconds of looks since the last
        question, how few peers one sees."""
        clients = self._crowd.clients
        doors: dict[str, int] = {}
        for client in clients:
            for peer_id, answers in client.doors().items():
                doors[peer_id] = doors.get(peer_id, 0) + answers
        looks = [took for client in clients for took in client.looks]
        for client in clients:
            client.looks.clear()
        return {
            "doors": doors,
            "looks": looks,
            "fewest": min(len(client.seen) for client in clients),
        }

    async def move(self, run_id: str, seconds: str) -> dict[str, Any]:
        """``move RUN_ID SECONDS``: all go to another run, and look every so many seconds."""
        for client in self._crowd.clients:
            client.run_id, client.seconds = run_id, float(seconds)
            client.rejoin.publish_with(client.tell, (peers_key(run_id), client.peer_id))
        await asyncio.gather(*(client.tell() for client in self._crowd.clients))
        return {}

    async def beat(self, seconds: str) -> dict[str, Any]:
        """``beat SECONDS``: another BEAT."""
        live_by(float(seconds))
        return {}

    async def ask(self, peer_id: str, clients: str, seconds: str) -> dict[str, Any]:
        """``ask PEER_ID CLIENTS SECONDS``: so many clients ask that peer as fast as it answers."""
        asking = self._crowd.clients[: int(clients)]
        took = await asyncio.gather(
            *(client.ask_door(peer_id, float(seconds)) for client in asking)
        )
        return {"took": [one for each in took for one in each]}


def live_by(beat: float) -> None:
    """Let the clients of this process do every ``beat`` seconds what nodes do every HEARTBEAT, and
    know that of each other."""
    for name, own in BEATS.items():
        setattr(watchdog, name, own * beat / BEATS["HEARTBEAT"])


async def _every(seconds: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
    while True:
        began = monotonic()
        await work()
        await asyncio.sleep(max(0.0, seconds() - (monotonic() - began)))


async def _work(
    folder: Path, count: int, run_id: str, seconds: float, doors: Sequence[str]
) -> None:
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    crowd = Crowd(folder, doors, run_id, seconds)
    try:
        await crowd.grow(count)
        worker = Worker(crowd)
        print(json.dumps({"ready": count}), flush=True)
        while line := (await commands.readline()).decode().split():
            print(json.dumps(await getattr(worker, line[0])(*line[1:])), flush=True)
    finally:
        await crowd.close()


if __name__ == "__main__":
    import uvloop

    from lowcomm_node.system.logs import configure_logs

    configure_logs(-1)
    live_by(float(sys.argv[5]))
    with suppress(KeyboardInterrupt, BrokenPipeError):
        uvloop.run(
            _work(
                Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[6:]
            )
        )
