"""Is this node in its swarm, and what to do if it is not? No I/O, no clock: time is an argument (seconds of a clock that
never goes back), and so is whatever was seen.

    LOOKING ── a peer answers ──► CONNECTED ── none answers any more ──► LOST ── a peer answers ──► CONNECTED
                                   │      ▲
                     others answer, but do not have our record ──► UNLISTED ── they have it ──┘

A *door* is a peer at which the swarm can be entered: one that the owner has named, or one that was met or is remembered.

- A door that answers is knocked at again every HEARTBEAT seconds, one that does not later and later.
- Named doors are always knocked at. Others only while fewer than WANTED answer, or if the DHT no longer tells of them
  though they did not say goodbye: then it may have split, and whoever answers brings the halves together.
- Whoever answers for the first time since it was silent may have forgotten us: we publish again.
- An address of ours that is gone takes the connections with it that use it. They do not know it yet: they are given up.
- p2pd waits longer and longer between two dials. Where nothing answers and nothing is connected, a fresh one dials at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

HEARTBEAT = 10.0
FIRST_PAUSE = 2.0
LONGEST_PAUSE = 30.0
"""Seconds between two knocks at a door that does not answer, the first time and at most, if it is a named one."""
LONGEST_ASIDE = 600.0
"""The same for the others while somebody answers."""
WANTED = 2
"""Doors that shall answer before others are left alone."""
AT_ONCE = 4
"""Doors that are knocked at together, besides the named ones."""
MISSING_AFTER = 20.0
"""Seconds after which a peer that the DHT no longer tells of is knocked at."""
MISSED_FOR = 3600.0
"""Seconds after which it is not any more."""
LOST_AFTER = 2.5 * HEARTBEAT
"""Seconds without an answer after which we are not connected."""
READ_BACK = 15.0
"""Seconds between two looks whether others have our record."""
UNLISTED_AFTER = 2
"""Looks in a row that do not find it."""
RESTART_AFTER = 30.0
"""Seconds without an answer after which p2pd is started again; the next time after twice as many."""
RESTART_MOVED = 12.0
"""The same after our address has changed."""
LONGEST_RESTART = 120.0
"""By then p2pd waits for about 40 s between two dials; it would go on to five minutes."""
MAX_DOORS = 64
MAX_ADDRESSES = 4
"""Of one door."""


class State(StrEnum):
    """How we stand to the swarm."""

    LOOKING = "looking"
    """Nobody has answered yet."""
    CONNECTED = "connected"
    LOST = "lost"
    """Somebody did answer, and nobody does now."""
    UNLISTED = "unlisted"
    """Others answer, but do not have our record: the DHT has split, or they have forgotten us."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now."""

    knock: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Peer id and addresses of each door to knock at."""
    forget: frozenset[str] = frozenset()
    """Give up the connections that use these addresses of ours first: they are gone."""
    restart: bool = False
    """Start p2pd again first."""
    read_back: bool = False
    """Look whether others have our record, after the knocks."""
    wait: float = 1.0
    """Seconds until the next plan is due."""


@dataclass
class _Door:
    peer_id: str
    named: bool
    given: tuple[str, ...]
    """The owner's addresses."""
    addresses: tuple[str, ...]
    seen: float
    """When the DHT told of it last, or it answered."""
    answers: bool = False
    answered: float | None = None
    failures: int = 0
    """In a row."""
    due: float = float("-inf")
    reason: str = ""
    missing: bool = False


class Watchdog:
    """Decides for one node. Holds the named doors, and others up to MAX_DOORS in all."""

    def __init__(
        self,
        now: float,
        named: Mapping[str, Sequence[str]],
        remembered: Mapping[str, Sequence[str]],
        restarts: bool = True,
    ) -> None:
        """``named``, ``remembered``: addresses by peer id, the best first; ``restarts``: whether p2pd may be restarted."""
        self._restarts = restarts
        self._doors: dict[str, _Door] = {}
        self._quiet_since = self._since = now
        self._ever = False
        self._unheld = 0
        self._read_due = now
        self._publish = False
        self._forget = frozenset[str]()
        self._restart_after = RESTART_AFTER
        self._moved = False
        self._restarted = now
        self._ours: frozenset[str] | None = None
        for is_named, doors in ((True, named), (False, remembered)):
            for peer_id, addresses in doors.items():
                self._add(peer_id, addresses, now, is_named)

    # what was seen

    def learned(self, peer_id: str, addresses: Sequence[str], now: float) -> None:
        """A peer tells where it can be dialed."""
        self._add(peer_id, addresses, now, named=False)

    def listed(self, peer_ids: Collection[str], now: float) -> None:
        """These are the peers that the DHT tells of now."""
        for door in self._doors.values():
            if door.peer_id in peer_ids:
                door.seen, door.missing = now, False
                continue
            absent = not door.named and MISSING_AFTER < now - door.seen < MISSED_FOR
            if absent and not door.missing:
                door.due = now
            door.missing = absent

    def left(self, peer_id: str) -> None:
        """A peer has said goodbye."""
        if (door := self._doors.get(peer_id)) is not None and not door.named:
            del self._doors[peer_id]

    def answered(self, peer_id: str, now: float) -> None:
        """A door answered."""
        door = self._doors.get(peer_id)
        if door is None:
            return
        if not door.answers:
            self._publish = True
        if not self._connected(now):
            self._since = now
        door.answers, door.answered, door.failures, door.reason = True, now, 0, ""
        door.due, door.seen, door.missing = now + HEARTBEAT, now, False
        self._quiet_since = now
        self._ever = True
        self._restart_after = RESTART_AFTER
        self._moved = False

    def silent(self, peer_id: str, reason: str, now: float) -> None:
        """A door did not answer."""
        door = self._doors.get(peer_id)
        if door is None:
            return
        door.answers, door.reason = False, reason
        aside = not door.named and self._connected(now)
        longest = LONGEST_ASIDE if aside else LONGEST_PAUSE
        door.due = now + min(FIRST_PAUSE * 2 ** min(door.failures, 20), longest)
        door.failures += 1

    def read_back(self, held: bool, now: float) -> None:
        """Whether others have our record."""
        listed_before = self._unheld < UNLISTED_AFTER
        self._unheld = 0 if held else self._unheld + 1
        if held:
            return
        self._publish = True
        if listed_before and self._unheld >= UNLISTED_AFTER:
            self._since = now
            for door in self._doors.values():
                door.due = min(door.due, now)

    def own_addresses(self, addresses: Collection[str], now: float, held: Collection[str] = ()) -> bool:
        """The addresses of this machine; whether they have changed since the last time.

        ``held``: those that it no longer uses for what is new, but still has.
        """
        before = self._ours
        self._ours = frozenset(addresses)
        if before is None or before == self._ours:
            return False
        # A new one beside the others breaks nothing that there is.
        self._forget |= before - self._ours - set(held)
        self._publish = self._moved = True
        self._restarted = now
        for door in self._doors.values():
            door.due, door.failures = now, 0
        return True

    def restarted(self, now: float) -> None:
        """P2pd was started again."""
        self._restarted = now
        self._restart_after = min(2 * self._restart_after, LONGEST_RESTART)
        self._moved = False
        for door in self._doors.values():
            door.due, door.failures, door.answers = now, 0, False

    def published(self) -> None:
        """What is ours was published."""
        self._publish = False

    def open_doors(self, now: float) -> list[str]:
        """The peer ids of doors that answer."""
        doors = self._doors.values()
        return [door.peer_id for door in doors if door.answers and now - (door.answered or 0.0) < LOST_AFTER]

    def must_publish(self, now: float) -> bool:
        """Whether others may not have what is ours, and can be told."""
        return self._publish and self._connected(now)

    # what follows

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """Where a door can be dialed; empty if there is none of that name."""
        door = self._doors.get(peer_id)
        return door.addresses if door is not None else ()

    def plan(self, now: float, isolated: bool = False) -> Plan:
        """What to do now; ``isolated``: p2pd has no connection to anybody."""
        connected = self._connected(now)
        forget = self._forget
        self._forget = frozenset[str]()
        after = RESTART_MOVED if self._moved else self._restart_after
        quiet = now - max(self._quiet_since, self._restarted)
        restart = (
            self._restarts and bool(self._doors) and not connected and quiet >= after and (isolated or self._moved)
        )
        knock = {door.peer_id: door.addresses for door in self._due(now)} if not restart else {}
        read_back = connected and now >= self._read_due
        if read_back:
            self._read_due = now + READ_BACK
        return Plan(
            knock=knock,
            forget=forget,
            restart=restart,
            read_back=read_back,
            wait=self._wait(now, set(knock)),
        )

    def state(self, now: float) -> State:
        """How we stand to the swarm."""
        if not self._connected(now):
            return State.LOST if self._ever else State.LOOKING
        return State.UNLISTED if self._unheld >= UNLISTED_AFTER else State.CONNECTED

    def reason(self, now: float) -> str | None:
        """Why we are not in the swarm, and when that is tried again; None if we are, or know nobody to look for."""
        match self.state(now):
            case State.CONNECTED:
                return None
            case State.UNLISTED:
                return "other peers answer, but do not tell of us: we publish again, and knock at all that we know"
            case state:
                return self._why_quiet(now, state)

    def describe(self, now: float) -> dict[str, Any]:
        """For ``status``: state, since when, why, and the named doors and others that were tried."""
        shown = [door for door in self._doors.values() if door.named or door.failures or self._is_wanted(door, now)]
        return {
            "state": self.state(now).value,
            "seconds": now - (self._since if self._connected(now) else self._quiet_since),
            "reason": self.reason(now),
            "doors": [
                {
                    "peer_id": door.peer_id,
                    "address": door.addresses[0] if door.addresses else None,
                    "named": door.named,
                    "answers": door.answers,
                    "reason": door.reason or None,
                    "next_attempt": max(0.0, door.due - now) if self._is_wanted(door, now) else None,
                }
                for door in sorted(shown, key=lambda door: (not door.named, not door.answers))[:16]
            ],
        }

    # doors

    def _add(self, peer_id: str, addresses: Sequence[str], now: float, named: bool) -> None:
        door = self._doors.get(peer_id)
        if door is None:
            given = tuple(addresses) if named else ()
            door = self._doors[peer_id] = _Door(peer_id, named, given, (), seen=now)
            self._make_room(door)
        # The owner's addresses stay in front; of the others the newest hold.
        door.addresses = tuple(dict.fromkeys((*door.given, *addresses)))[:MAX_ADDRESSES]

    def _make_room(self, newest: _Door) -> None:
        while len(self._doors) > MAX_DOORS:
            others = [door for door in self._doors.values() if not door.named and door is not newest]
            if not others:
                return
            del self._doors[min(others, key=lambda door: (door.answers, door.seen)).peer_id]

    def _connected(self, now: float) -> bool:
        return bool(self.open_doors(now))

    def _due(self, now: float) -> list[_Door]:
        due = [door for door in self._doors.values() if door.due <= now and self._is_wanted(door, now)]
        named = [door for door in due if door.named]
        others = [door for door in due if not door.named]
        # Who answers is not to be forgotten; then who was missed or tried least lately, the newest first.
        others.sort(key=lambda door: (not door.answers, not door.missing, door.failures, -door.seen))
        return [*named, *others[:AT_ONCE]]

    def _is_wanted(self, door: _Door, now: float) -> bool:
        if door.named or door.missing or self._unheld >= UNLISTED_AFTER:
            return True
        up = [other for other in self._doors.values() if other.answers]
        up.sort(key=lambda other: (not other.named, -(other.answered or 0.0)))
        if door.answers:
            return door in up[:WANTED]
        return len(up) < WANTED

    def _wait(self, now: float, knocking: Collection[str]) -> float:
        dues = [
            door.due for door in self._doors.values() if door.peer_id not in knocking and self._is_wanted(door, now)
        ]
        return min(max(min(dues, default=now + HEARTBEAT) - now, 1.0), FIRST_PAUSE if knocking else HEARTBEAT / 2)

    def _why_quiet(self, now: float, state: State) -> str | None:
        if not self._doors:
            return None
        doors = sorted(self._doors.values(), key=lambda door: not door.named)
        tried = [door for door in doors if door.reason]
        seconds = now - self._quiet_since
        quiet = f"no peer answers for {seconds:.0f} s" if state is State.LOST else "no peer answered"
        if not tried:
            return quiet
        told = "; ".join(
            f"{door.addresses[0] if door.addresses else door.peer_id}: {door.reason}" for door in tried[:3]
        )
        more = f" and {len(tried) - 3} more" if len(tried) > 3 else ""
        ahead = max(0.0, min(door.due for door in doors if self._is_wanted(door, now)) - now)
        return f"{quiet}: {told}{more}; next attempt in {ahead:.0f} s"
