"""The DHT of hivemind, in our own event loop.

We use its Kademlia (``DHTNode``) and its client of p2pd (``P2P``), but not its processes, averaging
or optimizers.

    start              p2pd -> client -> DHTNode, guarded -> knock at the entry points
                       -> look for neighbours
    knock              connect and ping; reconnect to a peer that is connected and silent
    revive             restart p2pd if it died; refresh our addresses; keep places at relays, so
                       that others reach us behind a NAT. ``Rejoin`` calls this and knocks,
                       periodically
    connect            to a peer, at its addresses and through our entry points as relays, whichever
                       works first; over a relay, hole punching is tried
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TTLCache

from lowcomm_node.dht.keys import Provenances
from lowcomm_node.dht.records import DhtRecords, place_of_key
from lowcomm_node.errors import LinkLost, NodeError, NoPeers, PortInUse, Unhealthy
from lowcomm_node.net import hivemind_client as client
from lowcomm_node.net.addresses import (
    MAX_DIALED,
    EntryPoint,
    EntryPoints,
    also_over_quic,
    by_peer,
    leading_to,
    relay_of,
)
from lowcomm_node.net.control import Control, OpenStream, StreamListener, TakeStream
from lowcomm_node.net.p2pd import P2pDaemon, RelayLimits
from lowcomm_node.net.punching import PROTOCOL as PUNCH
from lowcomm_node.net.punching import Puncher
from lowcomm_node.net.relays import Reachability, start_as_relay
from lowcomm_node.net.targets import Targets
from lowcomm_node.system.logs import log
from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.identity import Identity

MAX_CLOCK_OFFSET = 3.0
"""Seconds. Records live for seconds to minutes: with a larger offset they seem expired, or not
issued yet."""
MAX_REASONS = 256
"""Peers whose connection errors we remember."""
BAN_SECONDS, MAX_BANNED = 10.0, 8192
"""For how long hivemind avoids a silent peer. Bans do not grow, or a peer that returns would be
ignored for hours."""
ANSWERED_SECONDS, MAX_ANSWERED = 3600.0, 8192
"""For how long an answer counts: the longest life of a record."""


@dataclass(frozen=True)
class Knock:
    """The result of connecting to a DHT peer and pinging it."""

    reason: str | None
    """Why it failed; None: the peer answered."""
    ahead: float = 0.0
    """Seconds that its clock is ahead of ours; 0 within the call's duration."""


@dataclass(frozen=True, kw_only=True)
class DhtSettings:
    """Where a peer of the DHT listens, whom it knows, and what it does for others."""

    listen: Sequence[str]
    """Multiaddresses."""
    initial_peers: Sequence[str] = ()
    """The owner's entry points."""
    learned: Sequence[str] = ()
    """Addresses to enter at that the owner has not named."""
    announce: Sequence[str] = ()
    """Multiaddresses to announce; empty: those at which we are seen."""
    require_peers: bool = True
    """Whether to start only if an entry point answers."""
    wants_places: bool = False
    """Whether we may not be dialable, and need relays."""
    punching: bool = True
    """Whether holes are punched to peers that only relays reach."""
    relay: RelayLimits | None = None
    """What we give as a relay."""
    relays: bool = True
    """False: we carry nothing for others, where ``relay`` says nothing."""


class Discovery(DhtRecords):
    """A peer of the DHT, and its streams to others (``control.Streams``)."""

    def __init__(
        self,
        identity: Identity,
        key_file: Path,
        settings: DhtSettings,
        refusals: Refusals | None = None,
    ) -> None:
        """``key_file``: the key of ``identity``; ``refusals``: where refused records are counted.
        Raises ConfigError that names a malformed address."""
        self._answered_peers: TTLCache[str, bool] = TTLCache(MAX_ANSWERED, ANSWERED_SECONDS)
        super().__init__(Provenances(refusals), self._answered_peers)
        self.peer_id = identity.peer_id
        self._entry_points = EntryPoints(self.peer_id, settings.initial_peers, settings.learned)
        self._reachability = Reachability(
            self.peer_id,
            self._entry_points,
            self._control,
            settings.announce,
            settings.wants_places,
        )
        # A node that listens on loopback only belongs to a swarm on this machine.
        local = all("/127.0.0.1/" in one or "/::1/" in one for one in settings.listen)
        self.targets = Targets([*settings.initial_peers, *settings.learned], local=local)
        self._key_file = key_file
        self._settings = settings
        self._listen = tuple(settings.listen)
        self._daemon: P2pDaemon | None = None
        self._p2p: Any = None
        self.max_clock_offset = MAX_CLOCK_OFFSET
        """Seconds that our clock may differ from everybody's."""
        self._puncher = Puncher(self.peer_id, self._reachability.seen_at)
        self._served = StreamListener()
        self._opening = asyncio.Lock()
        """Held while p2pd is started or ended: there must never be two under one identity."""
        self._closed = False
        if settings.punching:
            self._served.add(PUNCH, lambda stream: self._puncher.take(self._control(), stream))
        self._reasons: LRUCache[str, str] = LRUCache(MAX_REASONS)
        """Why peers could not be connected to, while p2pd waits before it dials again."""

    async def start(self) -> None:
        """Enter the DHT. Raises NoPeers, PortInUse, ConfigError, Unhealthy if our clock is off."""
        try:
            entries = tuple(self._entry_points)
            async with self._opening:
                await self._open(self._listen)
            knocks = await self.knock(by_peer([str(entry) for entry in entries]))
            if (
                entries
                and self._settings.require_peers
                and all(knock.reason for knock in knocks.values())
            ):
                reasons = [f"{entry} ({knocks[entry.peer_id].reason})" for entry in entries[:8]]
                raise NoPeers(nobody_answers("; ".join(reasons)))
            # Only peers named by the owner may keep us from starting.
            named = {entry.peer_id for entry in self._entry_points.named}
            knocks = {peer: knock for peer, knock in knocks.items() if peer in named}
            if (trouble := clock_trouble(knocks, self.max_clock_offset)) is not None:
                raise Unhealthy(trouble)
            await self.find_neighbours()
            with suppress(LinkLost):  # it is looked for again
                await self._reachability.look_from_outside()
        except BaseException:
            await self.close()
            raise

    def answered(self, peer_id: str) -> None:
        """A peer has answered us, or called and authenticated: its records come first."""
        self._answered_peers[peer_id] = True

    def proved(self, key: str) -> frozenset[str]:
        """The peers under a key that stored their record here themselves, or have answered."""
        if self.node is None:
            return frozenset()
        return self.node.protocol.storage.proved(place_of_key(key))

    def origin(self, key: str, subkey: str) -> str:
        """The address from which a record was stored here, or its relay; empty if unknown."""
        if self.node is None:
            return ""
        return self.node.protocol.storage.origin(place_of_key(key), subkey)

    def addresses(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        return self._reachability.addresses()

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """Remember addresses to try when the others do not answer; malformed ones are skipped."""
        self._entry_points.add(addresses)

    async def knock(self, entry_points: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        """Connect to peers at the given addresses, and have them know us. Never raises."""
        alone = not self.known_peers()
        calls = (self._knock(peer, leading_to(peer, at)) for peer, at in entry_points.items())
        knocks = await asyncio.gather(*calls)
        if alone and any(knock.reason is None for knock in knocks):
            await client.wait_routing(self._p2p)
        return dict(zip(entry_points, knocks, strict=True))

    async def revive(self, restart: bool = False) -> bool:
        """Restart p2pd if it has died, and refresh our addresses. Returns whether it works.
        ``restart``: in any case, dropping its connections."""
        try:
            async with self._opening:
                is_dead = self._daemon is None or not self._daemon.running
                if is_dead:
                    log.warning("dht.lost", reason="p2pd ended; it is started again")
                if is_dead or restart:
                    await self._renew()
                await self._tell_what_is_served()
            await self._reachability.look_at_ourselves()
            await self._reachability.look_from_outside()
        except (NodeError, OSError) as error:
            log.warning("dht.trouble", reason=str(error))
            return False
        return True

    async def connected_peers(self) -> frozenset[str]:
        """The peers that we are connected to, by proven ids; empty if p2pd can't tell."""
        with suppress(LinkLost):
            return frozenset(found.peer_id for found in await self._control().connections())
        return frozenset()

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """Connect to a peer: at these addresses, or through our own entry points as relays. Raises
        LinkLost with the reason if it fails."""
        control = self._control()
        admitted = await self._admitted(control, peer_id, entry_points)
        entries = self._entry_points.entries_for(peer_id, admitted)
        if entry_points and not entries:
            raise LinkLost(self.targets.refusal(entry_points))
        await control.connect(peer_id, entries, seconds)
        if self._settings.punching:
            await self._puncher.improve(control, peer_id, entries)

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer, such as dead ones. Never raises."""
        with suppress(LinkLost):
            await self._control().disconnect(peer_id)

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream to a connected peer. Raises LinkLost."""
        return await self._control().open_stream(peer_id, protocol, seconds)

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with each incoming stream of a protocol. Raises LinkLost."""
        self._served.add(protocol, take)
        async with self._opening:
            await self._tell_what_is_served()

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of the connections to a peer; empty if there are none."""
        with suppress(LinkLost):
            found = await self._control().connections()
            return tuple(one.address for one in found if one.peer_id == peer_id)
        return ()

    async def close(self) -> None:
        """Leave the DHT."""
        self._closed = True
        await self._served.close()
        await self._puncher.close()
        async with self._opening:
            await self._shut()

    async def _shut(self) -> None:
        """End p2pd and its clients."""
        node, p2p, daemon = self.node, self._p2p, self._daemon
        self.node = self._p2p = self._daemon = None
        self._served.forget()
        if node is not None:
            with suppress(Exception):  # it waits for p2pd, which may be dead
                async with asyncio.timeout(client.CLOSE_DEADLINE):
                    await node.shutdown()
        if p2p is not None:
            await client.detach(p2p)
        if daemon is not None:
            await daemon.stop()

    async def _renew(self) -> None:
        """Close and open at the same ports, so that the addresses that others know stay valid."""
        await self._shut()
        try:
            await self._open(
                tuple(_with_port(listen, self._reachability.visible) for listen in self._listen)
            )
        except PortInUse:
            await self._open(self._listen)

    async def _open(self, listen: Sequence[str]) -> None:
        self._refuse_closed()
        try:
            self._daemon = await self._start_daemon(listen)
            self._refuse_closed()
            from lowcomm_node.dht.guard import Callers

            self._p2p = await client.attach(
                self._daemon, Callers(self._control().connections).enter
            )
            self.node = await self._make_node()
            await self._reachability.look_at_ourselves()
            await self._served.register(self._control(), self._daemon.pid)
        except BaseException:
            await self._shut()
            raise

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LinkLost("we have left the DHT")

    async def _start_daemon(self, listen: Sequence[str]) -> P2pDaemon:
        settings, relay = self._settings, self._settings.relay
        make = partial(
            P2pDaemon,
            self._key_file,
            listen,
            self._reachability.announced,
            relay=relay,
            punching=settings.punching,
            relays=settings.relays,
        )
        if relay is not None and relay.peers > 0:
            await client.load_hivemind()
            return await start_as_relay(make, relay)
        daemon = make()
        try:
            await asyncio.gather(daemon.start(), client.load_hivemind())
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _tell_what_is_served(self) -> None:
        """Register our protocols with p2pd. What fails is repeated later, or when p2pd is
        restarted."""
        if self._daemon is None or not self._daemon.running:
            return
        try:
            await self._served.register(self._control(), self._daemon.pid)
        except LinkLost as error:
            log.warning("stream.not_served", reason=str(error))

    def _control(self) -> Control:
        if self._daemon is None or not self._daemon.running:
            raise LinkLost("p2pd is not running: it is started again")
        return Control(self._daemon.control)

    async def _make_node(self) -> Any:
        from lowcomm_node.dht.guard import Silent, guard  # after load_hivemind
        from lowcomm_node.net.hivemind_parts import DHTNode

        try:
            async with asyncio.timeout(client.CALL_DEADLINE):
                node = await DHTNode.create(
                    p2p=self._p2p,
                    node_id=place_of_key(self.peer_id),
                    cache_locally=False,
                    cache_nearest=0,
                )
        except TimeoutError:
            raise NodeError(
                "p2pd started, but does not answer: is this machine overloaded? Try again."
            ) from None
        setattr(node, "blacklist", Silent(MAX_BANNED, BAN_SECONDS))  # noqa: B010 - of another class
        named = {entry.peer_id for entry in self._entry_points.named}
        guard(node.protocol, self._provenances, named, self._answered_peers)
        return node

    async def _admitted(
        self, control: Control, peer_id: str, addresses: Sequence[str]
    ) -> Sequence[str]:
        """A peer's addresses that may be dialed now; all if it is connected, since nothing is
        dialed then."""
        connections = await control.connections()
        for connection in connections:
            self.targets.reached(connection.address)
            self._puncher.targets.reached(connection.address)
        if any(connection.peer_id == peer_id for connection in connections):
            return addresses
        return self.targets.admit(addresses, most=MAX_DIALED)

    async def _knock(self, peer_id: str, entries: Sequence[EntryPoint]) -> Knock:
        if peer_id == self.peer_id:
            return Knock("is ourselves")
        if self.node is None:
            return Knock("p2pd is not running: it is started again")
        try:
            given = [str(entry) for entry in entries]
            admitted = set(await self._admitted(self._control(), peer_id, given))
            entries = also_over_quic([entry for entry in entries if str(entry) in admitted])
            if given and not entries:
                return Knock(self.targets.refusal(given))
            await self._control().connect(peer_id, entries, client.KNOCK_DEADLINE)
            ahead = await client.ping(self.node, peer_id)
            if ahead is None:
                # A dead connection looks alive for minutes. Only a new one proves it.
                await self.disconnect(peer_id)
                await self._control().connect(peer_id, entries, client.KNOCK_DEADLINE)
                ahead = await client.ping(self.node, peer_id)
        except LinkLost as error:
            reason = client.in_words(str(error))
            if reason == client.BACKED_OFF:  # p2pd did not dial: tell why it failed before
                reason = self._reasons.get(peer_id, reason)
            else:
                self._reasons[peer_id] = reason
            return Knock(
                (reason == client.NO_WAY and await client.lookup_failure(entries)) or reason
            )
        if ahead is None:
            return Knock("is there, but does not answer as a peer of the DHT")
        return Knock(None, ahead)


def _with_port(listen: str, dials: Sequence[str]) -> str:
    """A listening address with the port that was used last, in place of a free one."""
    found = re.fullmatch(r"(/(ip[46])/[^/]+/(tcp|udp))/0(/quic-v1)?", listen)
    if found is None:
        return listen
    place, family, transport, rest = found.groups("")
    for dial in dials:
        _, its_family, _, its_transport, port, *_ = [*dial.split("/"), "", "", ""]
        if (its_family, its_transport) == (family, transport) and relay_of(dial) is None:
            return f"{place}/{port}{rest}"
    return listen


def nobody_answers(where: str) -> str:
    """An error text; ``where``: addresses and reasons in words."""
    return f"No peer answers at {where}: check the address, and that the bootstrap server runs."


def clock_trouble(knocks: Mapping[str, Knock], most: float = MAX_CLOCK_OFFSET) -> str | None:
    """What is wrong if our clock differs from that of every peer that answered."""
    nearest = min(
        (knock.ahead for knock in knocks.values() if knock.reason is None), key=abs, default=0.0
    )
    if abs(nearest) <= most:
        return None
    where = "behind" if nearest > 0 else "ahead of"
    return (
        f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {most:.0f} "
        "s are allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap "
        "server."
    )
