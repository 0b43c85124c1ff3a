"""Being known and knowing others: our record goes out, theirs come in, through the DHT and from peer to peer."""

import asyncio
import ipaddress
from collections.abc import Callable
from time import time

import grpc
import psutil

from lowcomm_node.discovery.interface import Discovery
from lowcomm_node.discovery.keys import RUNS_KEY, peers_key
from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.channels import Channels
from lowcomm_node.settings import NodeSettings
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import PeerInfo, Phase, write_record
from lowcomm_protocol.roster import Roster
from lowcomm_protocol.run import SignedRun

MEET_DEADLINE = 3.0
MAX_MET = 64
"""Peers that are told directly when we come, change phase or go; the DHT tells the others."""
RUN_LIFE = 1800.0
CHECK_EVERY = 10.0


def listening(settings: NodeSettings) -> tuple[str, tuple[str, ...]]:
    """The host to listen on, and the hosts to tell others: loopback only, if all known peers are on loopback."""
    if settings.host is not None:
        return settings.host, (settings.host,) if settings.host not in ("0.0.0.0", "[::]") else _own_hosts()
    if settings.peers and all("/ip4/127." in peer or "/ip6/::1/" in peer for peer in settings.peers):
        return "127.0.0.1", ("127.0.0.1",)
    return "0.0.0.0", _own_hosts()


def _own_hosts() -> tuple[str, ...]:
    found = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    numbers: list[str] = []
    for text in found:
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            continue
        if not address.is_loopback:
            numbers.append(text)
    # Public addresses first: most peers are not in our home network.
    return tuple(sorted(numbers, key=lambda text: ipaddress.IPv4Address(text).is_private)[:8]) or ("127.0.0.1",)


class Membership:
    """Keeps the roster fresh and our own record published."""

    def __init__(
        self,
        *,
        identity: Identity,
        run: SignedRun,
        roster: Roster,
        discovery: Discovery,
        channels: Channels,
        settings: NodeSettings,
        certificate: bytes,
        addresses: tuple[str, ...],
        progress: Callable[[], tuple[int, int, float]],
        warn: Callable[[str], None],
    ) -> None:
        self.roster, self.addresses = roster, addresses
        self.dht_peers = 0
        self._identity, self._run, self._discovery, self._channels = identity, run, discovery, channels
        self._settings, self._certificate = settings, certificate
        self._progress, self._warn = progress, warn
        self._phase = Phase.JOINING
        self._changed = asyncio.Event()
        self._last_issued = 0.0
        self._greetings: set[asyncio.Task[None]] = set()

    # what the daemon asks

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        return self._discovery.addresses()

    def count(self) -> int:
        """Peers that are alive."""
        return len(self.roster.alive(time()))

    def count_ready(self) -> int:
        """Peers that have loaded their model."""
        return sum(info.phase is not Phase.JOINING for info in self.roster.alive(time()))

    def anybody_training(self) -> bool:
        """Whether the run has begun elsewhere."""
        return bool(self.roster.in_phase(Phase.TRAINING, time()))

    def donors(self) -> list[PeerInfo]:
        """Peers that can hand over their state, the most advanced first."""
        return sorted(self.roster.in_phase(Phase.TRAINING, time()), key=lambda info: -info.swarm_step)

    async def wait_changed(self, seconds: float) -> None:
        """Until the roster changes, or for so many seconds."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def announce(self, phase: Phase) -> None:
        """Tell everybody our new phase: the DHT, and directly the peers that we know."""
        self._phase = phase
        await asyncio.gather(self._publish(), self._greet_all())

    async def say_goodbye(self) -> None:
        """Be gone from the others' lists at once."""
        await self.announce(Phase.LEFT)

    def meet(self, introduction: pb.Introduction) -> pb.Introduction:
        """Answer a peer that introduces itself."""
        self._hear(introduction.record.SerializeToString())
        return self._introduction()

    # the loop

    async def run(self) -> None:
        """Publish, look around, and watch the connection, until cancelled."""
        await asyncio.gather(self._publishing(), self._looking(), self._watching())

    async def _publishing(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(self._settings.record_life / 3)

    async def _looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._settings.poll)

    async def _watching(self) -> None:
        published = 0.0
        while True:
            self.dht_peers = await self._discovery.check_connection()
            if self.dht_peers and time() - published > RUN_LIFE / 3:
                # Every peer keeps the run published, so that it outlives its bootstrap server.
                published = time()
                await self._discovery.publish(RUNS_KEY, self._run.run_id, self._run.to_bytes(), RUN_LIFE)
            await asyncio.sleep(CHECK_EVERY if self.dht_peers else 2.0)

    async def look(self) -> None:
        """Read the records in the DHT, and greet the peers that are new."""
        for data in (await self._discovery.lookup(peers_key(self._run.run_id))).values():
            info = self._hear(data, greet=True)
            if info is not None:
                self._discovery.add_entry_points(info.entry_points)

    def _hear(self, data: bytes, greet: bool = False) -> PeerInfo | None:
        now = time()
        before = {info.peer_id for info in self.roster.alive(now)}
        info = self.roster.hear(data, now)
        if info is None:
            return None
        self._changed.set()
        if greet and info.peer_id not in before and self.roster.get(info.peer_id, now) and len(before) < MAX_MET:
            task = asyncio.create_task(self._greet(info))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)
        return info

    async def _publish(self) -> None:
        record = self._record()
        try:
            await self._discovery.publish(
                peers_key(self._run.run_id), self._identity.peer_id, record, self._settings.record_life
            )
        except LowcommError as error:
            self._warn(f"our record could not be published: {error}")

    async def _greet_all(self) -> None:
        known = self.roster.alive(time())[:MAX_MET]
        await asyncio.gather(*(self._greet(info) for info in known))

    async def _greet(self, info: PeerInfo) -> None:
        """Hand over our newest record, and take in theirs. A peer that does not answer is no error."""
        try:
            async with asyncio.timeout(MEET_DEADLINE):
                stub = await self._channels.stub(info)
                answer = await stub.Describe(
                    self._introduction(), metadata=self._channels.metadata(info.peer_id), timeout=MEET_DEADLINE
                )
            self._hear(answer.record.SerializeToString())
        except (grpc.RpcError, LinkLost, LowcommError, TimeoutError):
            return

    def _introduction(self) -> pb.Introduction:
        signed = pb.SignedRecord()
        signed.ParseFromString(self._record())
        return pb.Introduction(record=signed)

    def _record(self) -> bytes:
        swarm_step, steps, speed = self._progress()
        # Of two records the later one holds: never issue two in the same millisecond, nor one before the last.
        self._last_issued = max(time(), self._last_issued + 0.001)
        info = PeerInfo(
            peer_id=self._identity.peer_id,
            run_id=self._run.run_id,
            phase=self._phase,
            issued=self._last_issued,
            expires=self._last_issued + self._settings.record_life,
            addresses=self.addresses,
            certificate=self._certificate,
            swarm_step=swarm_step,
            steps=steps,
            tokens_per_second=speed,
            entry_points=self.entry_points[:4],
        )
        return write_record(info, self._identity)
