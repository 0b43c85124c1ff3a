"""Keeps a peer in its swarm. Training never waits for it.

    looking ── a peer answers ──► connected ── none answers any more ──► lost, until one does
                                   │     ▲
                   others do not list us ──► unlisted ── they list us

An *entry point* is a peer at which the swarm can be entered: named by the owner, met, or
remembered.

- One that answers is knocked at every HEARTBEAT seconds, a silent one with growing pauses.
- Named ones are always knocked at. Others only while fewer than WANTED answer, or if the DHT no
  longer lists them without a goodbye: it may have split, and an answer joins the halves.
- A peer that answers for the first time after a silence may have forgotten us: we publish again.
- When an address of ours is gone, so are the connections that use it, unnoticed: p2pd is restarted.
- If no peer answers and none is connected, a new p2pd dials at once, as the old one would not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic, time

from lowcomm_node.dht.hivemind import Discovery, clock_trouble
from lowcomm_node.errors import NodeError
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.net.targets import held_addresses
from lowcomm_node.swarm import standing
from lowcomm_node.swarm.hosts import own_addresses
from lowcomm_node.swarm.remembered_peers import RememberedPeer, read_remembered, remember
from lowcomm_node.system.logs import Event, log

HEARTBEAT = 10.0
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_ASIDE = 2.0, 30.0, 3600.0
"""Seconds between two knocks at a silent entry point: the first pause, the longest, and the longest
for those that are not named, while any answers."""
WANTED = 2
"""Entry points that must answer before others are left alone."""
AT_ONCE = 4
"""Entry points that are knocked at together, besides the named ones."""
READ_BACK = 15.0
"""Seconds between two checks whether others have our record."""
UNLISTED_AFTER = 2
"""Failed checks in a row."""
RESTART_EVERY = 60.0
"""Seconds without an answer or connection after which p2pd is restarted."""
MAX_ENTRY_POINTS = 64


@dataclass(eq=False)
class _Entry:
    """An entry point."""

    peer_id: str
    addresses: tuple[str, ...] = ()
    named: bool = False
    reason: str | None = None
    """Why it does not answer; empty: it does; None: it is left alone."""
    failures: int = 0
    """In a row."""
    due: float = -inf
    """When it is knocked at next (monotonic seconds)."""
    answered: float | None = None
    """Unix time of its last answer."""
    missing: bool = False
    """Whether the DHT does not list it, and it has not said goodbye."""

    @property
    def answers(self) -> bool:
        return self.reason == ""


class Rejoin:
    """Knows the named entry points of one peer, and others up to MAX_ENTRY_POINTS in all."""

    def __init__(
        self,
        discovery: Discovery,
        named: Sequence[str],
        tell: Callable[[Event], None],
        on_clock: Callable[[str | None], None] = lambda trouble: None,
        restarts: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``on_clock``: this machine's clock is off, or right again (None); ``restarts``: whether
        p2pd may be restarted."""
        self._discovery = discovery
        self._tell = tell
        self._on_clock = on_clock
        self._restarts = restarts
        self._clock = clock
        self._entries = {
            peer_id: _Entry(peer_id, addresses, named=True)
            for peer_id, addresses in by_peer(named).items()
        }
        """Named ones first."""
        self._file: Path | None = None
        self.publish: Callable[[], Awaitable[None]] | None = None
        """Publishes our records."""
        self.record: tuple[str, str] | None = None
        """Key and subkey of the record that shows whether others have ours."""
        self.on_move: Callable[[], None] = lambda: None
        """Called when the addresses of this machine have changed."""
        self.has_p2pd = False
        """Whether p2pd answered at the last look."""
        self.state = "looking"
        self._since = clock()
        self._must_publish = False
        """Whether others may lack our records."""
        self._read_back_at = self._restarted_at = -inf
        self._unheld = 0
        """Checks in a row that did not find our record at others."""
        self._ours = own_addresses()
        self._clock_is_off = False

    async def keep(self, file: Path) -> None:
        """Use the entry points in this file, and remember there who answers, or has answered."""
        self._file = file
        for peer in read_remembered(file, time()):
            self.learned(peer.peer_id, peer.addresses)
        await self.save()

    def learned(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Note where a peer can be dialed, unless the owner has named its addresses."""
        known = self._entries.get(peer_id)
        if not addresses or (known is not None and known.named):
            return
        others = [entry for entry in self._entries.values() if not entry.named]
        if known is None and len(self._entries) >= MAX_ENTRY_POINTS and others:
            del self._entries[min(others, key=lambda entry: entry.answers).peer_id]
        self._entries.setdefault(peer_id, _Entry(peer_id)).addresses = tuple(addresses)

    def listed(self, peer_ids: Collection[str]) -> None:
        """Note the peers that the DHT lists now."""
        for entry in self._entries.values():
            entry.missing = entry.peer_id not in peer_ids

    def left(self, peer_id: str) -> None:
        """Note a peer's goodbye."""
        if peer_id in self._entries and not self._entries[peer_id].named:
            del self._entries[peer_id]

    async def enter(self, seconds: float) -> bool:
        """Look for the swarm until an entry point answers, for at most ``seconds`` and one look.
        Returns whether one answered."""
        end = self._clock() + seconds
        wait = await self.step()
        while not self.connected and self._clock() + wait < end:
            await asyncio.sleep(wait)
            wait = await self.step()
        return self.connected

    async def run(self) -> None:
        """Repeat ``step`` until cancelled."""
        while True:
            wait = await self.step()
            await asyncio.sleep(wait)

    async def step(self) -> float:
        """Look once, and do what is due. Returns the seconds until the next step."""
        is_cut = self._look_at_addresses()
        self.has_p2pd = await self._discovery.revive()
        quiet = self._clock() - max(self._since, self._restarted_at)
        is_long = not self.connected and quiet >= RESTART_EVERY
        is_stuck = is_long and not await self._discovery.connected_peers()
        if self._restarts and self._entries and (is_cut or is_stuck):
            log.info("dht.restart", reason=self.reason)
            self._restarted_at = self._clock()
            await self._discovery.revive(restart=True)
            self._knock_at_all()
        await self._knock()
        self._look_at_state()
        if self.publish is not None and self._must_publish and self.connected:
            await self.publish()
            self._must_publish = False
        now = self._clock()
        if self.record is not None and self.connected and now - self._read_back_at >= READ_BACK:
            self._read_back_at = now
            held = await self._discovery.held_by_others(*self.record, newest=False)
            self._unheld = 0 if held is not None else self._unheld + 1
            self._must_publish |= held is None
        return min(max(self._ahead(), FIRST_PAUSE), HEARTBEAT / 2)

    def _look_at_addresses(self) -> bool:
        """Returns whether one is gone, and the connections that used it."""
        before, self._ours = self._ours, own_addresses()
        if self._ours == before:
            return False
        self._must_publish = True
        self._knock_at_all()
        self._tell(standing.AddressesChanged(addresses=self._ours))
        self.on_move()
        # One that new connections do not use may still be there.
        return not {*before} <= {*self._ours, *held_addresses()}

    def _look_at_state(self) -> None:
        state = "looking" if self.state == "looking" else "lost"
        if any(entry.answers for entry in self._entries.values()):
            is_listed = self._unheld < UNLISTED_AFTER
            state = "connected" if is_listed else "unlisted"
        if state != self.state:
            self.state, self._since = state, self._clock()
            self._tell(standing.EVENTS[state](reason=self.reason))
            if state != "connected":
                self._knock_at_all()

    def _knock_at_all(self) -> None:
        for entry in self._entries.values():
            entry.due, entry.failures = -inf, 0

    async def _knock(self) -> None:
        due = self._due()
        knocks = await self._discovery.knock({entry.peer_id: entry.addresses for entry in due})
        has_news = False
        for entry in due:
            reason = knocks[entry.peer_id].reason or ""
            is_new = entry.reason is None or bool(entry.reason) != bool(reason)
            entry.reason = reason
            if reason:
                longest = LONGEST_PAUSE if entry.named or not self.connected else LONGEST_ASIDE
                pause = min(FIRST_PAUSE * 2 ** min(entry.failures, 20), longest)
                entry.due, entry.failures = self._clock() + pause, entry.failures + 1
            else:
                has_news |= is_new
                entry.due, entry.failures = self._clock() + HEARTBEAT, 0
                entry.answered = time()
            if entry.named and is_new:
                who, at = entry.peer_id, entry.addresses[0]
                if reason:
                    self._tell(standing.EntryPointSilent(peer_id=who, address=at, reason=reason))
                else:
                    self._tell(standing.EntryPointAnswers(peer_id=who, address=at))
        if any(entry.answers for entry in due):
            trouble = clock_trouble(knocks)
            if self._clock_is_off != bool(trouble):
                self._clock_is_off = bool(trouble)
                self._on_clock(trouble)
        if has_news:
            self._must_publish = True
            await self._discovery.find_neighbours()
            await self.save()

    def _due(self) -> list[_Entry]:
        """The entry points to knock at now."""
        wanted, now = self._wanted(), self._clock()
        for entry in self._entries.values():
            if entry not in wanted:
                entry.reason = None  # an old answer says nothing
        due = [entry for entry in wanted if entry.due <= now]
        others = [entry for entry in due if not entry.named]
        # First those that answer, to keep them alive; then those that wait longest.
        others.sort(key=lambda entry: (not entry.answers, entry.due))
        return [*(entry for entry in due if entry.named), *others[:AT_ONCE]]

    def _wanted(self) -> list[_Entry]:
        """The entry points that are knocked at when they are due."""
        entries = list(self._entries.values())
        up = [entry for entry in entries if entry.answers]
        if len(up) < WANTED or self.state == "unlisted":
            return entries
        return [it for it in entries if it.named or it.missing or it in up[:WANTED]]

    def _ahead(self) -> float:
        """Seconds until the next knock."""
        dues = (entry.due for entry in self._wanted())
        return max(0.0, min(dues, default=inf) - self._clock())

    @property
    def connected(self) -> bool:
        """Whether any entry point answers."""
        return self.state in ("connected", "unlisted")

    @property
    def reason(self) -> str | None:
        """Why we are not in the swarm; None if we are, or know no entry point."""
        if self.state == "unlisted":
            return "other peers answer, but do not list us: we knock at all that we know"
        if self.state == "connected" or not self._entries:
            return None
        quiet = "no peer answered"
        if self.state == "lost":
            quiet = f"no peer answers for {self._clock() - self._since:.0f} s"
        tried = self.unanswered(3)
        return f"{quiet}: {tried}; next attempt in {self._ahead():.0f} s" if tried else quiet

    def unanswered(self, most: int = 8) -> str:
        """The first entry points that do not answer, and why."""
        silent = [entry for entry in self._entries.values() if entry.reason]
        return "; ".join(f"{it.addresses[0]} ({it.reason})" for it in silent[:most])

    def describe(self) -> standing.SwarmStatus:
        """State, since when, why, and the entry points named or tried, for ``status``."""
        now, wanted = self._clock(), self._wanted()
        return standing.SwarmStatus(
            state=self.state,
            seconds=now - self._since,
            reason=self.reason,
            doors=tuple(
                standing.EntryPointStatus(
                    peer_id=entry.peer_id,
                    address=entry.addresses[0],
                    named=entry.named,
                    answers=entry.answers,
                    reason=entry.reason or None,
                    next_attempt=max(0.0, entry.due - now) if entry in wanted else None,
                )
                for entry in self._entries.values()
                if entry.named or entry.reason is not None
            ),
        )

    async def save(self) -> None:
        """Keep the entry points for the next start. Never raises: they are useful, not needed."""
        entries = [entry for entry in self._entries.values() if entry.answered is not None]
        peers = [RememberedPeer.model_validate(it, from_attributes=True) for it in entries]
        try:
            if self._file is not None:
                await asyncio.to_thread(remember, self._file, peers, time())
        except (NodeError, OSError) as error:
            log.warning("remembered_peers.not_kept", reason=str(error))
