"""The DHT of hivemind, in our own event loop.

Only its Kademlia (``DHTNode``) and its client of p2pd (``P2P``) are used, never its processes, averaging or optimizers.

    start              p2pd -> client -> DHTNode, guarded -> dial and ping the entry points -> look for neighbours
    check_connection   p2pd died: all of the above again; else ping the entry points, and peers' if those are dead;
                       keep places at relays, so that others reach us behind a NAT
    connect            to a peer, at its addresses and through our entry points as relays, whichever works first; if that
                       is a relay, a hole is tried to be punched
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from lowcomm_node.discovery.client import (
    CALL_DEADLINE,
    CLOSE_DEADLINE,
    attach,
    detach,
    dial,
    load_hivemind,
    ping,
    wait_routing,
)
from lowcomm_node.discovery.control import Control
from lowcomm_node.discovery.interface import OpenStream, TakeStream, check_size
from lowcomm_node.discovery.keys import MAX_LIFE, Provenances, pack, unpack
from lowcomm_node.discovery.multiaddress import (
    EntryPoint,
    circuit,
    parse_announced,
    parse_entry_point,
    reach,
)
from lowcomm_node.discovery.p2pd import START_DEADLINE, P2pDaemon
from lowcomm_node.discovery.punching import PROTOCOL as PUNCH
from lowcomm_node.discovery.punching import Puncher, observed
from lowcomm_node.discovery.relay import Places, RelayLimits
from lowcomm_node.discovery.relaying import start_as_relay
from lowcomm_node.discovery.streams import StreamListener
from lowcomm_node.discovery.twin import refuse_twin
from lowcomm_node.errors import ConfigError, LinkLost, NodeError, NoPeers, Unhealthy
from lowcomm_node.logs import log
from lowcomm_protocol.identity import Identity

MAX_ENTRY_POINTS = 32
MAX_RECORDS = 4096
MAX_DIALED = 8
"""Addresses of one peer that are dialed for a stream; a record has no more."""
MAX_DETOURS = 4
"""Entry points of ours that are tried as relays for a peer whose own addresses name none."""
MAX_OBSERVERS = 2
"""Peers that are asked where they see us."""
MAX_CLOCK_OFFSET = 3.0
"""Seconds; records live for seconds to minutes, and would seem dead or not yet issued."""
_BAN = 10.0
"""Seconds that hivemind keeps away from a silent peer; they do not grow, or one that returns is ignored for hours."""


class HivemindDiscovery:
    """A peer of the DHT."""

    def __init__(
        self,
        *,
        identity: Identity,
        key_file: Path,
        listen: Sequence[str],
        initial_peers: Sequence[str] = (),
        announce: Sequence[str] = (),
        require_peers: bool = True,
        start_deadline: float = START_DEADLINE,
        relay: RelayLimits | None = None,
        wants_places: bool = False,
        punching: bool = True,
    ) -> None:
        """``relay``: what we give as a relay. ``wants_places``: whether we may not be dialable, and need relays.

        Raises ConfigError that names a malformed address.
        """
        self.peer_id = identity.peer_id
        self._entry_points = [parse_entry_point(text) for text in initial_peers]
        self._given = len(self._entry_points)
        self._announce = tuple(parse_announced(text, self.peer_id) for text in announce)
        self._key_file, self._listen = key_file, tuple(listen)
        self._require_peers, self._start_deadline = require_peers, start_deadline
        self._provenances = Provenances()
        self._daemon: P2pDaemon | None = None
        self._node: Any = None
        self._p2p: Any = None
        self._visible: tuple[str, ...] = ()
        self._observed: tuple[str, ...] = ()
        """Where others see us, if that is none of our own addresses: behind a NAT."""
        self._relay, self._wants_places, self._punching = relay, wants_places, punching
        self._places = Places()
        self.max_clock_offset = MAX_CLOCK_OFFSET
        """Seconds that our clock may differ from everybody's."""
        self._listener: StreamListener | None = None
        self._puncher = Puncher(self.peer_id, self._seen_at)
        self._served: dict[str, TakeStream] = {}
        if punching:
            self._served[PUNCH] = lambda stream: self._puncher.take(self._control(), stream)

    async def start(self) -> None:
        """See Discovery. Also raises RetryLater if our identity is in use, Unhealthy if our clock is off."""
        try:
            others = [entry for entry in self._entry_points if entry.peer_id != self.peer_id]
            if others:
                await refuse_twin(self.peer_id, others)
            await self._open()
            offsets = await self._enter(self._entry_points)
            if self._entry_points and not offsets and self._require_peers:
                tried = ", ".join(str(entry) for entry in self._entry_points)
                raise NoPeers(f"No peer answers at {tried}: check the address, and that the bootstrap server runs.")
            _check_clock(offsets, self.max_clock_offset)
            await self._look_from_outside()
            await self._keep_places()
        except BaseException:
            await self.close()
            raise

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        return bool(await self._call("store", key, pack(key, value), expiration_time=expires, subkey=subkey))

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        found = await self._call("get", key, latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now, records = time(), dict[str, bytes]()
        for subkey, entry in list(entries.items())[:MAX_RECORDS]:
            value = entry.value
            if not isinstance(subkey, str) or not isinstance(value, bytes):
                continue
            belongs = self._provenances.check(value, subkey, now)
            if belongs is not None and belongs.key == key:
                records[subkey] = unpack(value)
        return records

    def addresses(self) -> tuple[str, ...]:
        """See Discovery."""
        first, *others = [*sorted(self._announce or (*self._visible, *self._observed), key=_preference), ""]
        # A record has room for a few: a place at a relay must not be crowded out by the addresses of many interfaces.
        dials = filter(None, [first, *self._places.dials, *others])
        return tuple(f"{dial}/p2p/{self.peer_id}" for dial in sorted(dials, key=lambda dial: -reach(dial)))

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """See Discovery."""
        for text in addresses:
            with suppress(ConfigError):
                entry = parse_entry_point(text)
                if entry.peer_id != self.peer_id and entry not in self._entry_points:
                    self._entry_points.append(entry)
        # The owner's addresses are always kept, of the others the newest.
        surplus = len(self._entry_points) - MAX_ENTRY_POINTS
        if surplus > 0:
            del self._entry_points[self._given : max(self._given, self._given + surplus)]

    async def check_connection(self) -> int:
        """See Discovery. Never raises: whatever is wrong is tried again at the next call."""
        try:
            if self._daemon is None or not self._daemon.running:
                log.warning("dht.lost", reason="p2pd ended; it is started again")
                await self._shut()
                await self._open()
            offsets = await self._enter(self._entry_points[: self._given])
            if not offsets and not self._known_peers():
                offsets = await self._enter(self._entry_points[self._given :])
            _check_clock(offsets, self.max_clock_offset)
            await self._look_at_ourselves()
            await self._look_from_outside()
            await self._keep_places()
        except (NodeError, OSError) as error:
            log.warning("dht.trouble", reason=str(error))
        return self._known_peers()

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """See Streams."""
        control, ways = self._control(), self._ways_to(peer_id, entry_points)
        await control.connect(peer_id, ways, seconds)
        if self._punching:
            await self._puncher.improve(control, peer_id, ways)

    async def disconnect(self, peer_id: str) -> None:
        """See Streams."""
        with suppress(LinkLost):
            await self._control().disconnect(peer_id)

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """See Streams."""
        return await self._control().open_stream(peer_id, protocol, seconds)

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """See Streams."""
        if protocol in self._served:
            raise LinkLost(f"streams of {protocol} are served already")
        self._served[protocol] = take
        if self._daemon is not None and self._daemon.running:  # else when it is started again
            await self._hand_over_streams(self._daemon, protocol)

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """See Streams."""
        try:
            found = await self._control().connections()
        except LinkLost:
            return ()
        return tuple(connection.address for connection in found if connection.peer_id == peer_id)

    async def close(self) -> None:
        """See Discovery."""
        listener, self._listener = self._listener, None
        self._served.clear()
        if listener is not None:
            await listener.close()
        await self._puncher.close()
        await self._shut()

    async def _shut(self) -> None:
        """End p2pd and what talks to it."""
        node, p2p, daemon = self._node, self._p2p, self._daemon
        self._node = self._p2p = self._daemon = None
        if node is not None:
            with suppress(Exception):  # it waits for p2pd, which may be dead
                async with asyncio.timeout(CLOSE_DEADLINE):
                    await node.shutdown()
        if p2p is not None:
            await detach(p2p)
        if daemon is not None:
            await daemon.stop()

    async def _open(self) -> None:
        try:
            self._daemon = await self._start_daemon()
            self._p2p = await attach(self._daemon)
            self._node = await self._make_node()
            await self._look_at_ourselves()
            await self._hand_over_streams(self._daemon, *self._served)
        except BaseException:
            await self._shut()
            raise

    async def _start_daemon(self) -> P2pDaemon:
        def make() -> P2pDaemon:
            options = {"relay": self._relay, "punching": self._punching}
            return P2pDaemon(self._key_file, self._listen, self._announce, self._start_deadline, **options)

        if self._relay is not None and self._relay.peers > 0:
            await load_hivemind()
            return await start_as_relay(make, self._relay)
        daemon = make()
        starting = asyncio.gather(daemon.start(), load_hivemind())
        try:
            await starting
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _hand_over_streams(self, daemon: P2pDaemon, *protocols: str) -> None:
        if self._listener is None:
            self._listener = StreamListener(self._take_stream)
            self._listener.start()
        self._listener.dialer = daemon.pid
        for protocol in protocols:
            await Control(daemon.control).handle_streams(protocol, self._listener.address)

    def _take_stream(self, stream: OpenStream) -> None:
        # p2pd hands over nothing else than what it was told to.
        self._served[stream.protocol](stream)

    async def _keep_places(self) -> None:
        if self._wants_places:
            await self._places.keep(self._control(), self._entry_points)

    def _control(self) -> Control:
        if self._daemon is None or not self._daemon.running:
            raise LinkLost("p2pd is not running: it is started again")
        return Control(self._daemon.control)

    def _ways_to(self, peer_id: str, entry_points: Sequence[str]) -> list[EntryPoint]:
        """Where to dial a peer; what its record says is a stranger's word, so only what leads to that peer is taken."""
        ways: list[EntryPoint] = []
        for text in entry_points[:MAX_DIALED]:
            with suppress(ConfigError):
                entry = parse_entry_point(text)
                if entry.peer_id == peer_id:
                    ways.append(entry)
        relays = [e for e in self._entry_points if e.relay is None and e.peer_id not in (peer_id, self.peer_id)]
        ways += [EntryPoint(peer_id, circuit(relay)) for relay in relays[:MAX_DETOURS]]
        return list(dict.fromkeys(ways))

    async def _make_node(self) -> Any:
        from hivemind.dht.node import DHTNode

        from lowcomm_node.discovery.guard import guard, place_of

        try:
            async with asyncio.timeout(CALL_DEADLINE):
                node = await DHTNode.create(
                    p2p=self._p2p,
                    node_id=place_of(self.peer_id),
                    cache_locally=False,
                    cache_nearest=0,
                    blacklist_time=_BAN,
                    backoff_rate=1.0,
                )
        except TimeoutError:
            raise NodeError("p2pd started, but does not answer: is this machine overloaded? Try again.") from None
        guard(node.protocol, self._provenances)
        return node

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the DHT; None if it fails, or while p2pd is started again."""
        if self._node is None:
            return None
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                return await getattr(self._node, method)(*arguments, **options)
        except Exception as error:  # whatever the answers of strangers make hivemind raise
            log.debug("dht.call_failed", method=method, error=repr(error))
            return None

    async def _look_at_ourselves(self) -> None:
        """Learn at which addresses we can be reached; they change with networks and NATs."""
        _, found = await self._control().identify(CALL_DEADLINE)
        dials = []
        for address in found:
            with suppress(ConfigError):  # those that no other node can use
                dials.append(parse_entry_point(f"{address}/p2p/{self.peer_id}").dial)
        self._visible = tuple(dials)

    async def _look_from_outside(self) -> None:
        """Learn where others see us, which tells the port that a NAT has given us."""
        if not self._wants_places or self._announce:
            return
        control = self._control()
        connected = {connection.peer_id for connection in await control.connections()}
        asked = [entry.peer_id for entry in self._entry_points if entry.peer_id in connected and entry.relay is None]
        answers = [await observed(control, peer_id) for peer_id in list(dict.fromkeys(asked))[:MAX_OBSERVERS]]
        self._observed = tuple(dict.fromkeys(dial for dial in answers if dial and dial not in self._visible))

    def _seen_at(self) -> tuple[str, ...]:
        """Addresses at which others may reach us, also those that only a hole in a NAT leads to."""
        return (*self._observed, *sorted(self._announce or self._visible, key=lambda dial: "/udp/" not in dial))

    def _known_peers(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    async def _enter(self, entries: Sequence[EntryPoint]) -> list[float]:
        """Dial and ping peers, then look for our neighbours; by how many seconds the clocks of those are ahead."""
        alone = not self._known_peers()
        answers = await asyncio.gather(*(self._knock(entry) for entry in entries))
        offsets = [offset for offset in answers if offset is not None]
        if offsets:
            if alone:
                await wait_routing(self._p2p)
            await self._call("find_nearest_nodes", [self._node.node_id])
        return offsets

    async def _knock(self, entry: EntryPoint) -> float | None:
        if entry.peer_id == self.peer_id or not await dial(self._p2p, entry.peer_id, entry):
            return None
        return await ping(self._node, entry.peer_id)


def _preference(dial: str) -> tuple[int, bool]:
    """Addresses that reach further come first, of those TCP, which every network lets through."""
    return -reach(dial), "/udp/" in dial


def _check_clock(offsets: Sequence[float], most: float) -> None:
    """Raise Unhealthy if our clock differs from everybody's."""
    nearest = min(offsets, key=abs, default=0.0)
    if abs(nearest) > most:
        where = "behind" if nearest > 0 else "ahead of"
        raise Unhealthy(
            f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {most:.0f} s are "
            "allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap server."
        )
