"""The roster: peers with a valid signed record, which of them have proved recently to be there, and
which others to probe next. No clock: time is an argument.

    a record alone ──► unknown ── answers our call, or authenticates ──► alive, for ALIVE seconds
                         │  ▲                                              │
                  probed ▼  │ backoff: by peer,                            │ two exchanges in a row
                         │  │ and by place (/24, /64, relay)               │ without an answer
                        silent ◄───────────────────────────────────────────┘

A record costs its writer nothing, so it proves nothing: only alive peers are met, counted and
believed. An unknown peer gets a probe beside the exchanges, never a place in one.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from math import inf

from cachetools import FIFOCache

from lowcomm_protocol.errors import LowcommError, Reason, RecordError, Refusals, What
from lowcomm_protocol.peers import records
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.pulse import Pulse, read_pulse
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.peers.shards import SwarmSize, cell_of
from lowcomm_protocol.peers.view import ACTIVE, PASSIVE, SLACK, View

MAX_DIGESTS = 4096
MAX_RECORDS = 2 * (ACTIVE + SLACK + PASSIVE)
SWEEP_EVERY = 5.0
"""Seconds between two sweeps of useless records."""


class Roster:
    """The peers of one run in our view that may take part in it."""

    def __init__(
        self,
        own_peer_id: str,
        run_id: str,
        admission: Admission | None = None,
        refusals: Refusals | None = None,
        places: Callable[[PeerInfo], Sequence[str]] = lambda info: (),
        cells: Callable[[], int] = lambda: 1,
    ) -> None:
        """``places``: networks of the addresses in a record, or its relays; ``cells``: how many the
        swarm has now."""
        self.own_peer_id = own_peer_id
        self.run_id = run_id
        self.admission = admission or Admission(Rules(run_id, creator=""))
        """Without one any peer may take part."""
        self.liveness = Liveness(own_peer_id)
        """Signs of life. A record costs its writer nothing, and proves nothing."""
        self._cells = cells
        self.cells = 1
        """Those in which groups form now."""
        self.view = View(own_peer_id, self.in_cell)
        self.size = SwarmSize()
        self._places = places
        self._refusals = refusals or Refusals()
        self._records: dict[str, PeerInfo] = {}
        """Those of the view, and the last ones of peers that have left."""
        self._signed: dict[str, bytes] = {}
        """Records of the view as they came, to hand over."""
        self._pulses: dict[str, Pulse] = {}
        self._swept = float("-inf")
        self._heard: FIFOCache[bytes, tuple[float, float]] = FIFOCache(MAX_DIGESTS)
        """Digests of records, and the times from and to which there is no need to look again."""

    def hear(
        self, data: bytes, now: float, sender: str | None = None, listed: bool = True
    ) -> PeerInfo | None:
        """Take in a serialized signed record; its contents if they are new and valid, else None.

        With a ``sender`` only its own record is believed. ``listed``: whether the DHT lists it, or
        another peer handed it over. Refusals are counted, the same bytes once.
        """
        digest = sha256(data).digest() if len(data) <= records.MAX_RECORD_BYTES else b""
        since, until = self._heard.get(digest, (inf, -inf))
        if since <= now <= until:
            return None  # the DHT repeats the same records
        try:
            info = self._read(data, now, sender)
        except LowcommError as error:
            if digest not in self._heard:
                self._refusals.count(What.RECORD, error.reason)
            # A misplaced record may be valid in its place, and one that is too long is not hashed.
            if error.reason not in (Reason.MISPLACED, Reason.TOO_LARGE):
                # A clock that is set right may bear out what it was against.
                since = now if error.reason is Reason.EXPIRED else -inf
                until = now if error.reason is Reason.FROM_FUTURE else inf
                self._heard[digest] = since, until
            return None
        known = self._records.get(info.peer_id)
        if known is not None and records.is_from_future(known.issued, now):
            known = None  # both clocks were ahead when it came
        if info.peer_id == self.own_peer_id or (known is not None and info.issued <= known.issued):
            self._heard[digest] = -inf, inf
            return None
        self._sweep(now)
        if info.phase is Phase.LEFT:
            self.view.forget(info.peer_id)
        elif not self.view.learn(
            info.peer_id, self._places(info), now, listed or sender is not None, sender is not None
        ):
            return None
        self._heard[digest] = -inf, inf
        pulse = self._pulses.get(info.peer_id)
        self._records[info.peer_id] = info if pulse is None else pulse.update(info)
        self._signed[info.peer_id] = data
        return info

    def hear_pulse(self, data: bytes, now: float, sender: str) -> bool:
        """Take in the pulse of a peer whose record we have. Returns whether its phase changes."""
        known = self._records.get(sender)
        if known is None or known.phase is Phase.LEFT:
            return False
        try:
            pulse = read_pulse(data, self.run_id, now)
            if pulse.peer_id != sender:
                raise RecordError("Another peer's pulse is refused.", reason=Reason.MISPLACED)
        except LowcommError as error:
            self._refusals.count(What.RECORD, error.reason)
            return False
        if records.is_from_future(known.as_of, now):
            known = replace(known, as_of=0.0)  # both clocks were ahead when it came
        updated = pulse.update(known)
        if updated is known:
            return False
        self._records[sender], self._pulses[sender] = updated, pulse
        return self._records[sender].phase is not known.phase

    def get(self, peer_id: str, now: float) -> PeerInfo | None:
        """The newest valid record of a peer that may take part."""
        info = self._records.get(peer_id)
        return info if info is not None and self._holds(info, now) else None

    def known(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers with a valid record that may take part, alive or not, unordered."""
        return tuple(info for info in self._records.values() if self._holds(info, now))

    def alive(self, now: float) -> tuple[PeerInfo, ...]:
        """Those of them with a link that have answered or called us recently, ordered by id."""
        proved = sorted(peer for peer in self.view.active if self.liveness.is_proved(peer, now))
        return tuple(filter(None, (self.get(peer, now) for peer in proved)))

    def in_phase(self, phase: Phase, now: float) -> tuple[PeerInfo, ...]:
        """The alive peers in one phase."""
        return tuple(info for info in self.alive(now) if info.phase is phase)

    def partners(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers that train, are alive, and answer offers: candidates for exchanges."""
        training = self.in_phase(Phase.TRAINING, now)
        return tuple(info for info in training if self.liveness.is_alive(info.peer_id, now))

    def in_cell(self, peer: str) -> bool:
        """Whether a peer is of our cell, with which we form groups."""
        own, theirs = (cell_of(self.run_id, one, self.cells) for one in (self.own_peer_id, peer))
        return own == theirs

    def _count_cells(self, now: float) -> int:
        """Count the cells of the run, or fewer where we know all peers and one would be alone:
        nobody would meet it."""
        cells = self._cells()
        there = [self.own_peer_id, *(info.peer_id for info in self.alive(now))]
        while cells > 1 and not self.view.is_partial:
            if min(Counter(cell_of(self.run_id, one, cells) for one in there).values()) > 1:
                break
            cells //= 2
        return cells

    # links

    def heard(self, peer: str, now: float, wanted: int = 0, full: bool = False) -> bool:
        """Take in a sign of life of a peer; whether it has a link.

        ``wanted``: how many links it looks for; ``full``: it has no room for one.
        """
        self.liveness.heard(peer, now)
        if full:
            self.view.unlink(peer)
        elif self.get(peer, now) is not None and (wanted or self.view.wants(peer)):
            self.view.link(peer, now, wanted > 0, wanted)
        return peer in self.view.active

    def due(self, now: float, likely: Collection[str], most: int) -> list[PeerInfo]:
        """The peers to call now: links without a recent sign of life, and candidates for links.

        A peer whose sign of life is too old loses its link.
        """
        view, self.cells = self.view, self._count_cells(now)
        for peer in [peer for peer in view.active if not self.liveness.is_proved(peer, now)]:
            view.unlink(peer, failed=True)
        known = {info.peer_id: info for info in self.known(now)}
        links = [peer for peer in view.active if peer in known]
        others = [
            (peer, one.places, view.crowd(peer))
            for peer, one in view.passive.items()
            if peer in known and view.is_candidate(peer)
        ]
        return [known[peer] for peer in self.liveness.due(links, others, now, likely, most)]

    def to_pass(self, receiver: str, now: float) -> list[bytes]:
        """Signed records to hand over to a peer, where the DHT has more than a look brings."""
        peers = self.view.sample(receiver) if self.view.is_partial else []
        return [self._signed[peer] for peer in peers if self.get(peer, now) is not None]

    def _read(self, data: bytes, now: float, sender: str | None) -> PeerInfo:
        info = records.read_record(data, now)
        if info.run_id != self.run_id or sender not in (None, info.peer_id):
            raise RecordError(
                f"A record of {info.peer_id} that {sender or 'somebody'} told as its own, or of "
                "another run, is refused.",
                reason=Reason.MISPLACED,
            )
        self.admission.check(info.peer_id, info.claim, now)
        return info

    def _holds(self, info: PeerInfo, now: float) -> bool:
        # Checked each time: removals, expired invites and earlier claims take effect at once.
        return (
            info.expires > now
            and info.phase is not Phase.LEFT
            and not self.admission.barred(info.peer_id, now)
        )

    def _sweep(self, now: float) -> None:
        """Forget records that have expired, or whose peers are not in the view any more. One of a
        peer that has left stays until no older one can be valid, which would bring it back."""
        if abs(now - self._swept) < SWEEP_EVERY and len(self._records) < MAX_RECORDS:
            return  # hundreds of records may come at once
        self._swept = now
        full = len(self._records) >= MAX_RECORDS
        for peer_id, info in list(self._records.items()):
            stays = peer_id in self.view or (info.phase is Phase.LEFT and not full)
            if not stays or (info.expires if full else info.issued + records.MAX_LIFE) <= now:
                self.view.forget(peer_id)
                del self._records[peer_id], self._signed[peer_id]
                self._pulses.pop(peer_id, None)


ALIVE = 300.0
"""Seconds for which a sign of life counts."""
REFRESH, LONGEST_REFRESH = 10.0, 100.0
"""Seconds of silence before a link is called, of few and at most: 3 fit in ``ALIVE``."""
OF_LINK = 2.0
"""The same for each link: a call in this time keeps all of them alive."""
RETRY, MAX_SILENT = 5.0, 2
"""Seconds before a silent link is called again, and unanswered calls in a row after which it does
not count as alive."""
PROBE_EVERY = 1.0
"""Mean seconds between two probes of unknown peers."""
BURST = 16
"""Probes that may accumulate."""
FIRST_BURST = 48
"""The same for newcomers, who find only records at first; others of 64 peers have room."""
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0
"""Seconds before a silent peer is probed again: the first pause and the longest."""
FREE_MISSES = 3
"""Silent peers of one place before the place itself is probed more rarely."""
LONGEST_PLACE_PAUSE = 60.0
"""Longest pause in seconds between two probes of one place; pauses double from one second."""
MAX_MISSED = 2
"""Unanswered exchanges in a row before a peer is left out for a while."""
FIRST_REST, LONGEST_REST = 15.0, 120.0
"""Seconds for which it is left out: the first time and at most."""
MAX_HELD = 8192
"""Peers, and places, that are remembered; the oldest are evicted."""


class Pauses(FIFOCache[str, tuple[int, float, float]]):
    """Unanswered attempts in a row, by peer or place: their number, the last one's time, and the
    seconds from then to the next."""

    def __init__(self, free: int, first: float, longest: float) -> None:
        """``free``: attempts without a pause; then pauses double from ``first`` to ``longest``."""
        super().__init__(MAX_HELD)
        self._free, self._first, self._longest = free, first, longest

    def begin(self, name: str, now: float) -> None:
        """Count an attempt, and begin the pause after it."""
        count, _, _ = self.get(name) or (0, 0.0, 0.0)
        doublings = min(count - self._free, 20)
        pause = min(self._first * 2**doublings, self._longest) if doublings >= 0 else 0.0
        self[name] = count + 1, now, pause

    def is_due(self, name: str, now: float) -> bool:
        """Whether the pause is over; one from the future is none, since a clock was ahead."""
        _, since, pause = self.get(name) or (0, 0.0, 0.0)
        return not 0.0 <= now - since < pause


class Liveness:
    """One peer's knowledge of the others' signs of life."""

    def __init__(self, seed: str = "") -> None:
        """``seed``: makes the order of probes differ from peer to peer."""
        self._seed = seed
        self._turn = 0
        self._heard: FIFOCache[str, float] = FIFOCache(MAX_HELD)
        self._silent = Pauses(0, FIRST_PAUSE, LONGEST_PAUSE)
        self._places = Pauses(FREE_MISSES, 1.0, LONGEST_PLACE_PAUSE)
        self._missed = Pauses(MAX_MISSED - 1, FIRST_REST, LONGEST_REST)
        self._tokens = float(FIRST_BURST)
        self._counted = float("-inf")

    # signs of life

    def heard(self, peer: str, now: float) -> None:
        """A peer has answered a call, or has called us and authenticated."""
        self._heard[peer] = now
        self._silent.pop(peer, None)

    def reached(self, places: Sequence[str]) -> None:
        """A peer at these places has answered our call, so others there may answer, too."""
        for place in places:
            self._places.pop(place, None)

    def met(self, peer: str, now: float) -> None:
        """A peer has answered our offer, possibly with a refusal, or has made one."""
        self.heard(peer, now)
        self._missed.pop(peer, None)

    def missed(self, peer: str, now: float) -> None:
        """A peer has not answered our offer."""
        self._missed.begin(peer, now)

    def is_alive(self, peer: str, now: float) -> bool:
        """Whether a peer has proved recently to be there, and answers offers."""
        return self.is_proved(peer, now) and self._missed.is_due(peer, now)

    def is_proved(self, peer: str, now: float) -> bool:
        """Whether a peer has proved recently to be there. It may still leave offers unanswered."""
        heard = self._heard.get(peer)
        count, since = self._called(peer)
        is_silent = count >= MAX_SILENT and now - since >= RETRY
        return heard is not None and _is_recent(heard, now) and not is_silent

    # probes

    def at_once(self, now: float) -> int:
        """Concurrent probes allowed: more while no peer has proved recently to be there."""
        is_proved = any(_is_recent(heard, now) for heard in self._heard.values())
        return BURST if is_proved else FIRST_BURST

    def is_untried(self, peer: str, now: float) -> bool:
        """Whether a peer is known by its record only."""
        return not self.is_proved(peer, now) and peer not in self._silent

    def due(
        self,
        links: Sequence[str],
        others: Sequence[tuple[str, Sequence[str], int]],
        now: float,
        likely: Collection[str] = (),
        most: int = FIRST_BURST,
    ) -> list[str]:
        """Peers to call now, at most ``most``, which count as called.

        ``others``: candidates for links, their places, and how many links these have. ``likely``:
        peers connected to us otherwise.
        """
        saved = float(self.at_once(now))
        self._tokens = min(saved, self._tokens + max(0.0, now - self._counted) / PROBE_EVERY)
        self._counted = now
        self._turn = self._turn + 1
        refresh = min(LONGEST_REFRESH, max(REFRESH, OF_LINK * len(links)))
        silence = {peer: now - self._heard.get(peer, -inf) for peer in links}
        old = [
            peer
            for peer in links
            if silence[peer] >= refresh and not 0.0 <= now - self._called(peer)[1] < RETRY
        ]
        chosen = sorted(old, key=silence.__getitem__, reverse=True)[:most]
        for peer in chosen:  # a call counts as unanswered until its answer comes
            self._silent.begin(peer, now)
        unknown = list[tuple[bool, int, bytes, str, Sequence[str]]]()
        for peer, places, crowd in others:
            if self._silent.is_due(peer, now) and (peer in likely or self._is_open(places, now)):
                lot = sha256(f"{self._seed}/{self._turn}/{peer}".encode()).digest()
                unknown.append((peer not in likely, crowd, lot, peer, places))
        for unlikely, _, _, peer, places in sorted(unknown):
            if len(chosen) >= most or self._tokens < 1.0:
                break
            if unlikely and not self._is_open(places, now):
                continue  # another one of the same place was chosen just now
            self._tokens -= 1.0
            self._silent.begin(peer, now)
            for place in places:
                self._places.begin(place, now)
            chosen.append(peer)
        return chosen

    def _called(self, peer: str) -> tuple[int, float]:
        """Unanswered calls of a peer in a row, and the time of the last."""
        count, since, _ = self._silent.get(peer) or (0, -inf, 0.0)
        return count, since

    def _is_open(self, places: Sequence[str], now: float) -> bool:
        return all(self._places.is_due(place, now) for place in places)


def _is_recent(heard: float, now: float) -> bool:
    """Whether a sign of life still counts; one from the far future does not."""
    return abs(now - heard) < ALIVE
