"""Decides whether this node is in its swarm, and what to do if not. No I/O: the clock (seconds,
monotonic) and observations are arguments.

    LOOKING ── a peer answers ──► CONNECTED ── none answers any more ──► LOST ── a peer answers ──►
    CONNECTED
                                   │      ▲
                     others answer, but do not list us ──► UNLISTED ── they list us ──┘

An *entry point* is a peer at which the swarm can be entered: named by the owner, met, or
remembered.

- One that answers is knocked at every HEARTBEAT seconds, a silent one with growing pauses.
- Named ones are always knocked at. Others only while fewer than WANTED answer, or if the DHT no
  longer lists them without a goodbye: it may have split, and an answer joins the halves.
- A peer that answers for the first time after a silence may have forgotten us: we publish again.
- When an address of ours is gone, so are the connections that use it, unnoticed: p2pd is restarted.
- If no peer answers and none is connected, a new p2pd dials at once, as the old one would not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

from lowcomm_node.system.logs import Event

HEARTBEAT = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds between two knocks at a silent named entry point: the first and the longest pause."""
LONGEST_ASIDE = 600.0
"""The longest pause for the others while any answers."""
WANTED = 2
"""Entry points that must answer before others are left alone."""
AT_ONCE = 4
"""Entry points that are knocked at together, besides the named ones."""
MISSING_AFTER, MISSED_FOR = 20.0, 3600.0
"""Seconds from and to which a peer that the DHT no longer lists is knocked at."""
LOST_AFTER = 2.5 * HEARTBEAT
"""Seconds without an answer after which we are not connected."""
READ_BACK = 15.0
"""Seconds between two checks whether others have our record."""
UNLISTED_AFTER = 2
"""Failed checks in a row."""
RESTART_AFTER, LONGEST_RESTART = 30.0, 120.0
"""Seconds without an answer before p2pd is restarted; doubled after each restart."""
MAX_ENTRY_POINTS, MAX_ADDRESSES = 64, 4
"""Addresses: of one entry point."""
MAX_SHOWN = 16
"""Entry points in ``status``."""


class SwarmState(StrEnum):
    """Our state in the swarm."""

    LOOKING = "looking"
    """No peer has answered yet."""
    CONNECTED = "connected"
    LOST = "lost"
    """Peers did answer, and none does now."""
    UNLISTED = "unlisted"
    """Others answer, but do not have our record: the DHT has split, or they have forgotten us."""


@dataclass(frozen=True, kw_only=True)
class EntryPointStatus:
    """A peer at which the swarm can be entered."""

    peer_id: str
    """Its peer id."""
    address: str | None
    """Its multiaddress; null if none is known."""
    named: bool
    """Whether the owner named it with `--peers`."""
    answers: bool
    """Whether it answered when it was called last."""
    reason: str | None
    """Why it does not answer."""
    next_attempt: float | None
    """Seconds until it is called again; null if it is left alone."""


@dataclass(frozen=True, kw_only=True)
class SwarmStatus:
    """How a node stands to the swarm."""

    state: str
    """`looking`, `connected`, `lost`, or `unlisted` while others do not have its record."""
    seconds: float
    """Seconds since it is connected, or since a peer answered last."""
    reason: str | None
    """Why it is not connected."""
    doors: tuple[EntryPointStatus, ...] = ()
    """The peers that the owner named, and others that were tried; 16 at most."""


class EntryPointAnswers(Event, name="door.open"):
    """An entry point that the owner named answers."""

    peer_id: str
    """Its peer id."""
    address: str | None
    """Its multiaddress."""


class EntryPointSilent(Event, name="door.closed"):
    """An entry point that the owner named does not answer."""

    peer_id: str
    address: str | None
    """Multiaddress of the entry point."""
    reason: str
    """Why it does not answer."""


class SwarmConnected(Event, name="swarm.connected"):
    """The node is in its swarm."""

    reason: str | None = None
    """Always null."""


class SwarmLost(Event, name="swarm.lost"):
    """No peer answers any more."""

    reason: str | None
    """Why the node is not in the swarm."""


class SwarmUnlisted(Event, name="swarm.unlisted"):
    """Other peers answer, but do not have the record of this node."""

    reason: str | None
    """Why the node is not in the swarm."""


class AddressesChanged(Event, name="addresses.changed"):
    """The addresses of this machine have changed."""

    addresses: tuple[str, ...]
    """All that it has now."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What to do now."""

    knock: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Peer id and addresses of each entry point to knock at."""
    restart: bool = False
    """Restart p2pd first."""
    read_back: bool = False
    """After the knocks, check whether others have our record."""
    wait: float = 1.0
    """Seconds until the next look."""


@dataclass(eq=False)
class EntryPointState:
    """What is known of an entry point."""

    peer_id: str
    named: bool
    given: tuple[str, ...]
    """The owner's addresses."""
    seen: float
    """When the DHT last listed it, or it answered."""
    addresses: tuple[str, ...] = ()
    answers: bool = False
    answered: float = float("-inf")
    failures: int = 0
    """In a row."""
    due: float = float("-inf")
    reason: str = ""
    missing: bool = False
    at: str = ""
    """The address where it answered last."""

    @property
    def place(self) -> str | None:
        """The address where it answers, or else the first that is known."""
        return (self.answers and self.at) or next(iter(self.addresses), None)


class Watchdog:
    """Decides for one node. Holds the named entry points, and others up to MAX_ENTRY_POINTS in
    all."""

    def __init__(
        self,
        named: Mapping[str, Sequence[str]],
        remembered: Mapping[str, Sequence[str]],
        restarts: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``named``, ``remembered``: addresses by peer id, best first; ``restarts``: p2pd may be
        restarted."""
        self._restarts = restarts
        self._clock = clock
        self.entries: dict[str, EntryPointState] = {}
        self._quiet_since = self._since = self._read_due = self._restarted = clock()
        self._ever_connected = False
        self._unheld = 0
        """Checks in a row that did not find our record at others."""
        self.must_publish = False
        """Whether others may lack our records."""
        self._restart_after = RESTART_AFTER
        self._is_cut = False
        """Whether an address of ours is gone since p2pd was started."""
        self._ours: frozenset[str] | None = None
        for is_named, entries in ((True, named), (False, remembered)):
            for peer_id, addresses in entries.items():
                self.learned(peer_id, addresses, is_named)

    # what was seen

    def learned(self, peer_id: str, addresses: Sequence[str], named: bool = False) -> None:
        """Note where a peer can be dialed."""
        if not addresses:
            return
        entry = self.entries.get(peer_id)
        if entry is None:
            given = tuple(addresses) if named else ()
            entry = EntryPointState(peer_id, named, given, seen=self._clock())
            others = [other for other in self.entries.values() if not other.named]
            self.entries[peer_id] = entry
            if len(self.entries) > MAX_ENTRY_POINTS and others:
                del self.entries[min(others, key=lambda old: (old.answers, old.seen)).peer_id]
        # The owner's addresses stay in front; of the others the newest are kept.
        entry.addresses = tuple(dict.fromkeys((*entry.given, *addresses)))[:MAX_ADDRESSES]

    def listed(self, peer_ids: Collection[str]) -> None:
        """Note the peers that the DHT lists now."""
        now = self._clock()
        for entry in self.entries.values():
            if entry.peer_id in peer_ids:
                entry.seen, entry.missing = now, False
                continue
            absent = not entry.named and MISSING_AFTER < now - entry.seen < MISSED_FOR
            if absent and not entry.missing:
                entry.due = now
            entry.missing = absent

    def left(self, peer_id: str) -> None:
        """Note a peer's goodbye."""
        if (entry := self.entries.get(peer_id)) is not None and not entry.named:
            del self.entries[peer_id]

    def answered(self, peer_id: str, at: str = "") -> None:
        """Note an answer of an entry point; ``at``: the address, if it is known."""
        entry, now = self.entries.get(peer_id), self._clock()
        if entry is None:
            return
        self.must_publish |= not entry.answers
        if not self.connected:
            self._since = now
        entry.answers, entry.answered, entry.failures, entry.reason = True, now, 0, ""
        entry.at, entry.due, entry.seen, entry.missing = at, now + HEARTBEAT, now, False
        self._quiet_since = now
        self._ever_connected = True
        self._restart_after = RESTART_AFTER

    def silent(self, peer_id: str, reason: str) -> None:
        """Note that an entry point did not answer."""
        if (entry := self.entries.get(peer_id)) is None:
            return
        entry.answers, entry.reason = False, reason
        longest = LONGEST_ASIDE if not entry.named and self.connected else LONGEST_PAUSE
        entry.due = self._clock() + min(FIRST_PAUSE * 2 ** min(entry.failures, 20), longest)
        entry.failures += 1

    def read_back(self, held: bool) -> None:
        """Note whether others have our record."""
        self._unheld = 0 if held else self._unheld + 1
        self.must_publish |= not held
        if self._unheld == UNLISTED_AFTER:
            self._since = now = self._clock()
            for entry in self.entries.values():
                entry.due = min(entry.due, now)

    def own_addresses(self, addresses: Collection[str], held: Collection[str] = ()) -> bool:
        """Update the addresses of this machine. Returns whether they have changed. ``held``:
        addresses that still exist, but are not used for new connections."""
        before, self._ours = self._ours, frozenset(addresses)
        if before is None or before == self._ours:
            return False
        # An additional address breaks no connection.
        self._is_cut |= bool(before - self._ours - set(held))
        self.must_publish = True
        self._try_all()
        return True

    def restarted(self) -> None:
        """Note that p2pd was restarted."""
        if not self._is_cut:
            self._restart_after = min(2 * self._restart_after, LONGEST_RESTART)
        self._is_cut = False
        self._try_all()

    def _try_all(self) -> None:
        self._restarted = now = self._clock()
        for entry in self.entries.values():
            entry.due, entry.failures = now, 0

    # what follows

    @property
    def connected(self) -> bool:
        """Whether any entry point answers."""
        since = self._clock() - LOST_AFTER
        return any(entry.answers and entry.answered > since for entry in self.entries.values())

    def plan(self, isolated: bool = False) -> Watch:
        """What to do now; ``isolated``: p2pd has no connection at all."""
        now, connected = self._clock(), self.connected
        is_long = now - max(self._quiet_since, self._restarted) >= self._restart_after
        is_needed = self._is_cut or (not connected and isolated and is_long)
        restart = self._restarts and bool(self.entries) and is_needed
        knock = {entry.peer_id: entry.addresses for entry in self._due()} if not restart else {}
        read_back = connected and now >= self._read_due
        if read_back:
            self._read_due = now + READ_BACK
        dues = (entry.due for entry in self.entries.values() if self._is_wanted(entry))
        ahead = max(1.0, min(dues, default=now + HEARTBEAT) - now)
        wait = FIRST_PAUSE if knock else min(ahead, HEARTBEAT / 2)
        return Watch(knock=knock, restart=restart, read_back=read_back, wait=wait)

    @property
    def state(self) -> SwarmState:
        """Our state in the swarm."""
        if not self.connected:
            return SwarmState.LOST if self._ever_connected else SwarmState.LOOKING
        is_listed = self._unheld < UNLISTED_AFTER
        return SwarmState.CONNECTED if is_listed else SwarmState.UNLISTED

    @property
    def reason(self) -> str | None:
        """Why we are not in the swarm, and when we try again; None if we are, or know no entry
        point."""
        state, now = self.state, self._clock()
        if state is SwarmState.CONNECTED or (state is SwarmState.LOOKING and not self.entries):
            return None
        if state is SwarmState.UNLISTED:
            return (
                "other peers answer, but do not list us: we publish again, and knock at all that "
                "we know"
            )
        entries = sorted(self.entries.values(), key=lambda entry: not entry.named)
        tried = [entry for entry in entries if entry.reason]
        quiet = "no peer answered"
        if state is SwarmState.LOST:
            quiet = f"no peer answers for {now - self._quiet_since:.0f} s"
        if not tried:
            return quiet
        reasons = "; ".join(f"{entry.addresses[0]}: {entry.reason}" for entry in tried[:3])
        more = f" and {len(tried) - 3} more" if len(tried) > 3 else ""
        ahead = max(0.0, min(entry.due for entry in entries if self._is_wanted(entry)) - now)
        return f"{quiet}: {reasons}{more}; next attempt in {ahead:.0f} s"

    def unanswered(self) -> str:
        """The entry points that do not answer, and why."""
        silent = [entry for entry in self._shown() if entry.reason]
        reasons = "; ".join(f"{entry.place} ({entry.reason})" for entry in silent[:8])
        return reasons or "any address"

    def describe(self) -> SwarmStatus:
        """State, since when, why, and the entry points named or tried, for ``status``."""
        now = self._clock()
        return SwarmStatus(
            state=self.state.value,
            seconds=now - (self._since if self.connected else self._quiet_since),
            reason=self.reason,
            doors=tuple(
                EntryPointStatus(
                    peer_id=entry.peer_id,
                    address=entry.place,
                    named=entry.named,
                    answers=entry.answers,
                    reason=entry.reason or None,
                    next_attempt=max(0.0, entry.due - now) if self._is_wanted(entry) else None,
                )
                for entry in self._shown()
            ),
        )

    def _shown(self) -> list[EntryPointState]:
        shown = [it for it in self.entries.values() if it.failures or self._is_wanted(it)]
        return sorted(shown, key=lambda entry: (not entry.named, not entry.answers))[:MAX_SHOWN]

    def _due(self) -> list[EntryPointState]:
        now = self._clock()
        due = [it for it in self.entries.values() if it.due <= now and self._is_wanted(it)]
        # First those that answer, to keep them alive; then those missed, then the least tried,
        # newest first.
        due.sort(key=lambda it: (not it.answers, not it.missing, it.failures, -it.seen))
        others = [entry for entry in due if not entry.named]
        return [*(entry for entry in due if entry.named), *others[:AT_ONCE]]

    def _is_wanted(self, entry: EntryPointState) -> bool:
        if entry.named or entry.missing or self._unheld >= UNLISTED_AFTER:
            return True
        up = [other for other in self.entries.values() if other.answers]
        up.sort(key=lambda other: (not other.named, -other.answered))
        return entry in up[:WANTED] if entry.answers else len(up) < WANTED
