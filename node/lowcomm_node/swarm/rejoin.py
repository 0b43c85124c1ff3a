"""Keeps a peer in its swarm: observes, and does what the watchdog decides. Training never waits for
it.

own addresses ─┐
knocks ────────┼─► watchdog ─► restart p2pd, knock, publish, read back
listed peers ──┘        └────► status: our state in the swarm, and why
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic, time

from lowcomm_node.dht.hivemind import Discovery, Knock, check_clock
from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.net.addresses import by_peer, host_of, port_of, relay_of
from lowcomm_node.net.targets import held_addresses
from lowcomm_node.swarm.hosts import own_addresses
from lowcomm_node.swarm.remembered_peers import RememberedPeers
from lowcomm_node.swarm.watchdog import (
    AddressesChanged,
    EntryPointAnswers,
    EntryPointSilent,
    EntryPointState,
    SwarmConnected,
    SwarmLost,
    SwarmState,
    SwarmUnlisted,
    Watchdog,
)
from lowcomm_node.system.logs import Event, log
from lowcomm_node.system.tasks import DEFECT_PAUSE, Enduring

SAVE_EVERY = 30.0
_EVENTS = {
    SwarmState.CONNECTED: SwarmConnected,
    SwarmState.LOST: SwarmLost,
    SwarmState.UNLISTED: SwarmUnlisted,
}


class Rejoin(Watchdog):
    """Keeps one peer in its swarm."""

    def __init__(
        self,
        discovery: Discovery,
        named: Sequence[str],
        remembered: RememberedPeers | None,
        tell: Callable[[Event], None],
        warn: Callable[[str], None] = lambda text: None,
        restarts: bool = True,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        """``named``: the owner's entry points; ``restarts``: whether p2pd may be restarted.

        ``warn``: this machine's clock is off; ``withdraw``: it is right again.
        """
        known = remembered.peers() if remembered is not None else []
        before = {peer.peer_id: peer.addresses for peer in known}
        super().__init__(by_peer(named), before, restarts)
        self._discovery = discovery
        self._remembered = remembered
        self._tell = tell
        self._warn = warn
        self._withdraw = withdraw
        self._record: tuple[str, str] | None = None
        self._publish: Callable[[], Awaitable[None]] | None = None
        self.on_move: Callable[[], None] = lambda: None
        """Called when the addresses of this machine have changed."""
        self.has_p2pd = False
        """Whether p2pd answered at the last look."""
        self._saved = monotonic()
        self._state = SwarmState.LOOKING
        self._clock_is_off = False
        self._enduring = Enduring("the node does not look whether it is in the swarm")

    def keep(self, remembered: RememberedPeers) -> None:
        """Remember entry points in this file from now on: the run is known."""
        self._remembered = remembered
        for peer in remembered.peers():
            self.learned(peer.peer_id, peer.addresses)
        for entry in self.entries.values():
            if entry.answers:
                self._remember(entry)

    def publish_with(
        self, publish: Callable[[], Awaitable[None]], record: tuple[str, str] | None
    ) -> None:
        """Set how our records are published, and key and subkey of the record that shows whether
        they arrived."""
        self._publish = publish
        self._record = record

    async def enter(self, seconds: float) -> bool:
        """Look for the swarm until an entry point answers, for at most ``seconds`` and one look.
        Returns whether one answered."""
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
        addresses = own_addresses()
        if self.own_addresses(addresses, held_addresses()):
            self._tell(AddressesChanged(addresses=addresses))
            self.on_move()
        self.has_p2pd = await self._discovery.revive()
        isolated = not await self._discovery.connected_peers()
        plan = self.plan(isolated)
        if plan.restart:
            log.info("dht.restart", reason=self.reason)
            await self._discovery.revive(restart=True)
            self.restarted()
            return 0.1
        if plan.knock:
            await self._knock(plan.knock)
        if self._publish is not None and self.must_publish and self.connected:
            await self._publish()
            self.must_publish = False
        if plan.read_back and self._record is not None:
            held = await self._discovery.held_by_others(*self._record, newest=False)
            self.read_back(held is not None)
        if (state := self.state) is not self._state:
            self._state = state
            self._tell(_EVENTS[state](reason=self.reason))
        if monotonic() - self._saved >= SAVE_EVERY:
            await self.save()
        return plan.wait

    async def _knock(self, entry_points: Mapping[str, Sequence[str]]) -> None:
        news = False
        knocks = await self._discovery.knock(entry_points)
        for peer_id, knock in knocks.items():
            if (entry := self.entries.get(peer_id)) is None:
                continue
            was_tried, before = entry.answers or entry.failures > 0, entry.reason
            news |= knock.reason is None and not (self.connected and entry.answers)
            if knock.reason is None:
                self.answered(peer_id, await self._answers_at(entry))
                self._remember(entry)
            else:
                self.silent(peer_id, knock.reason)
            if entry.reason != before or not was_tried:
                self._report(entry, is_news=not before)
        self._look_at_clock(knocks)
        if news:
            await self._discovery.find_neighbours()

    async def _answers_at(self, entry: EntryPointState) -> str:
        """The known address to which our connection to a peer leads; empty if there is none."""
        connected = await self._discovery.connected_at(entry.peer_id)
        places = {(host_of(at), port_of(at), relay_of(at)) for at in connected}
        known = entry.addresses
        exact = (at for at in known if (host_of(at), port_of(at), relay_of(at)) in places)
        return next(exact, "")

    def _remember(self, entry: EntryPointState) -> None:
        if self._remembered is not None:
            self._remembered.answered(entry.peer_id, entry.addresses, time(), entry.named)

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

    def _report(self, entry: EntryPointState, is_news: bool) -> None:
        """Report an entry point named by the owner when it begins or stops to answer."""
        peer_id, address, reason = entry.peer_id, entry.place, entry.reason
        if not reason:
            event: Event = EntryPointAnswers(peer_id=peer_id, address=address)
        else:
            event = EntryPointSilent(peer_id=peer_id, address=address, reason=reason)
        if not entry.named:
            log.debug(event.name, peer_id=peer_id, address=address, reason=reason)
        elif is_news or not reason:
            self._tell(event)

    async def save(self) -> None:
        """Keep the entry points for the next start. Never raises: they are useful, not needed."""
        self._saved = monotonic()
        try:
            if self._remembered is not None:
                await asyncio.to_thread(self._remembered.save)
        except (NodeError, OSError) as error:
            log.warning("remembered_peers.not_kept", reason=str(error))
