"""Keeps a peer in its swarm: observes, asks the watchdog what to do, and does it.

Training never waits for it.

own addresses ─┐
knocks ────────┼─► watchdog ─► restart p2pd, knock, publish, read back
listed peers ──┘        └────► status: our state in the swarm, and why
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic, time

from cachetools import LRUCache

from lowcomm_node.dht.interface import Discovery, Knock, by_peer, check_clock
from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.net.addresses import host_of, port_of, relay_of
from lowcomm_node.net.targets import held_addresses
from lowcomm_node.swarm.hosts import own_addresses
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.swarm.watchdog import (
    MAX_ENTRY_POINTS,
    AddressesChanged,
    EntryPointAnswers,
    EntryPointSilent,
    SwarmConnected,
    SwarmLooking,
    SwarmLost,
    SwarmState,
    SwarmStatus,
    SwarmUnlisted,
    Watchdog,
)
from lowcomm_node.system.logs import Event, log
from lowcomm_node.system.tasks import DEFECT_PAUSE, Enduring

SAVE_EVERY = 30.0
Addresses = Callable[[], tuple[str, ...]]
_EVENTS = {
    SwarmState.LOOKING: SwarmLooking,
    SwarmState.CONNECTED: SwarmConnected,
    SwarmState.LOST: SwarmLost,
    SwarmState.UNLISTED: SwarmUnlisted,
}


class Rejoin:
    """Keeps one peer in its swarm."""

    def __init__(
        self,
        discovery: Discovery,
        named: Sequence[str],
        remembered: RememberedPeers | None,
        tell: Callable[[Event], None],
        warn: Callable[[str], None] = lambda text: None,
        addresses: Addresses = own_addresses,
        restarts: bool = True,
        held: Addresses = held_addresses,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        """``named``: the owner's entry points; ``restarts``: whether p2pd may be restarted.

        ``warn``: this machine's clock is off; ``withdraw``: it is right again.
        ``addresses``: this machine's addresses in use; ``held``: all that it has.
        """
        self._discovery = discovery
        self._remembered = remembered
        self._tell = tell
        self._warn = warn
        self._withdraw = withdraw
        self._addresses = addresses
        self._held = held
        self._named = by_peer(named)
        known = remembered.peers() if remembered is not None else []
        before = {peer.peer_id: peer.addresses for peer in known}
        self._watchdog = Watchdog(monotonic(), self._named, before, restarts)
        self._record: tuple[str, str] | None = None
        self._publish: Callable[[], Awaitable[None]] | None = None
        self._on_move: Callable[[], None] = lambda: None
        self._saved = monotonic()
        self._reported: LRUCache[str, str | None] = LRUCache(2 * MAX_ENTRY_POINTS)
        """Why each entry point did not answer when it was last called; None: it did."""
        self._state = SwarmState.LOOKING
        self._clock_is_off = False
        self._enduring = Enduring("the node does not look whether it is in the swarm")

    # what it hears

    def keep(self, remembered: RememberedPeers) -> None:
        """Remember entry points in this file from now on: the run is known."""
        self._remembered = remembered
        for peer in remembered.peers():
            self.learned(peer.peer_id, peer.addresses)
        for peer_id, entry in self._watchdog.entries.items():
            if entry.answers:
                remembered.answered(peer_id, entry.addresses, time(), entry.named)

    def publish_with(
        self, publish: Callable[[], Awaitable[None]], record: tuple[str, str] | None
    ) -> None:
        """Set how our records are published, and key and subkey of the record that shows whether
        they arrived."""
        self._publish = publish
        self._record = record

    def on_move(self, move: Callable[[], None]) -> None:
        """Set what to do when the addresses of this machine change."""
        self._on_move = move

    def learned(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Note where a peer can be dialed."""
        if addresses:
            self._watchdog.learned(peer_id, addresses, monotonic())

    def listed(self, peer_ids: set[str]) -> None:
        """Note the peers that the DHT lists."""
        self._watchdog.listed(peer_ids, monotonic())

    def left(self, peer_id: str) -> None:
        """Note a peer's goodbye."""
        self._watchdog.left(peer_id)

    # what it says

    @property
    def connected(self) -> bool:
        """Whether any entry point answers."""
        return self._watchdog.is_connected(monotonic())

    @property
    def reason(self) -> str | None:
        """Why we are not in the swarm; None if we are."""
        return self._watchdog.reason(monotonic())

    def unanswered(self) -> str:
        """The entry points that do not answer, and why."""
        silent = [entry for entry in self.describe().doors if entry.reason]
        reasons = "; ".join(f"{entry.address} ({entry.reason})" for entry in silent[:8])
        return reasons or "any address"

    def describe(self) -> SwarmStatus:
        """Our state in the swarm, for ``status``."""
        return self._watchdog.describe(monotonic())

    # the loop

    async def enter(self, seconds: float) -> bool:
        """Look for the swarm until an entry point answers, for at most ``seconds`` and one look.

        Returns whether one answered.
        """
        end = monotonic() + seconds
        while True:
            wait = await self.step()
            if self.connected or monotonic() >= end:
                return self.connected
            await asyncio.sleep(min(wait, max(0.0, end - monotonic())))

    async def run(self) -> None:
        """Repeat ``step`` until cancelled."""
        while True:
            wait = await self.step()
            await asyncio.sleep(wait)

    async def step(self) -> float:
        """Look once, and do what is due. Returns the seconds until the next step. Never raises."""
        with self._enduring:
            return await self._step()
        return DEFECT_PAUSE

    async def _step(self) -> float:
        self._look_at_ourselves()
        await self._discovery.revive()
        isolated = not await self._discovery.connected_peers()
        plan = self._watchdog.plan(monotonic(), isolated)
        if plan.restart:
            log.info("dht.restart", reason=self.reason)
            await self._discovery.restart()
            self._watchdog.restarted(monotonic())
            return 0.1
        if plan.knock:
            await self._knock(plan.knock)
        if self._publish is not None and self._watchdog.must_publish(monotonic()):
            await self._publish()
            self._watchdog.published()
        if plan.read_back and self._record is not None:
            held = await self._discovery.held_by_others(*self._record, newest=False)
            self._watchdog.read_back(held is not None, monotonic())
        state = self._watchdog.state(monotonic())
        if state is not self._state:
            self._state = state
            self._tell(_EVENTS[state](reason=self.reason))
        if monotonic() - self._saved >= SAVE_EVERY:
            await self.save()
        return plan.wait

    async def _knock(self, entry_points: Mapping[str, Sequence[str]]) -> None:
        was_connected, news = self.connected, False
        knocks = await self._discovery.knock(entry_points)
        for peer_id, knock in knocks.items():
            if knock.reason is None:
                news |= not was_connected or self._reported.get(peer_id, "") is not None
                at = await self._answers_at(peer_id)
                self._watchdog.answered(peer_id, monotonic(), at)
                entry = self._watchdog.entries.get(peer_id)
                if self._remembered is not None and entry is not None:
                    self._remembered.answered(peer_id, entry.addresses, time(), entry.named)
            else:
                self._watchdog.silent(peer_id, knock.reason, monotonic())
            self._report(peer_id, knock.reason)
        self._look_at_clock(knocks)
        if news:
            await self._discovery.find_neighbours()

    async def _answers_at(self, peer_id: str) -> str:
        """The address to which our connection to a peer leads; empty if that is not known. The
        first address that is known of it may be another, where no peer is."""
        connected = await self._discovery.connected_at(peer_id)
        entry = self._watchdog.entries.get(peer_id)
        known = entry.addresses if entry is not None else ()
        # A name is looked up by p2pd alone, which does not say what it has found.
        by_name = [text for text in known if host_of(text) is None and relay_of(text) is None]
        places = {(host_of(one), port_of(one), relay_of(one)) for one in connected}
        exact = [text for text in known if (host_of(text), port_of(text), relay_of(text)) in places]
        other = [f"{one}/p2p/{peer_id}" for one in connected if relay_of(one) is None]
        return next(iter((*exact, *by_name, *other)), "")

    def _look_at_clock(self, knocks: Mapping[str, Knock]) -> None:
        if all(knock.reason for knock in knocks.values()):
            return
        try:
            check_clock(knocks)
        except Unhealthy as error:
            if not self._clock_is_off:
                self._warn(str(error))
            self._clock_is_off = True
        else:
            if self._clock_is_off:
                self._withdraw()
            self._clock_is_off = False

    def _report(self, peer_id: str, reason: str | None) -> None:
        """Report an entry point named by the owner when it begins or stops to answer."""
        before = self._reported.get(peer_id, "")
        self._reported[peer_id] = reason
        if before == reason:
            return
        entry = self._watchdog.entries.get(peer_id)
        address = entry.place if entry is not None else None
        if reason is None:
            event: Event = EntryPointAnswers(peer_id=peer_id, address=address)
        else:
            event = EntryPointSilent(peer_id=peer_id, address=address, reason=reason)
        if peer_id not in self._named:
            log.debug(event.name, peer_id=peer_id, address=address, reason=reason)
        elif reason is None or not before:  # it answered before, or was unknown
            self._tell(event)

    def _look_at_ourselves(self) -> None:
        addresses = self._addresses()
        if self._watchdog.own_addresses(addresses, monotonic(), self._held()):
            self._tell(AddressesChanged(addresses=tuple(addresses)))
            self._on_move()

    async def save(self) -> None:
        """Keep the entry points for the next start. Never raises: they are useful, not needed."""
        self._saved = monotonic()
        try:
            if self._remembered is not None:
                await asyncio.to_thread(self._remembered.save)
        except (NodeError, OSError) as error:
            log.warning("remembered_peers.not_kept", reason=str(error))
