"""One exchange under way: its machine, its timers, and the outer steps that members lack."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter

from lowcomm_protocol.exchange.base import Gathering
from lowcomm_protocol.exchange.events import Called, PeerEvent
from lowcomm_protocol.exchange.kinds import ExchangeKind
from lowcomm_protocol.matching import Offer, keeps_momentum, must_realign

KEPT = 4
"""Outer steps of a fragment that a member keeps for others, at most."""
STATE_MARK_BYTES = 8
UNKNOWN = bytes(32)
"""Digest that a member offers after it has failed to take over missed steps. Nobody holds it, so
the member counts as stranded."""
TRIES = 2
"""Failed exchanges before a member offers `UNKNOWN`."""


def kept(coded: int, whole: int) -> int:
    """How many outer steps of ``coded`` bytes each are kept, of a fragment of ``whole`` bytes in
    fp32: with a contribution they are no larger than what a realignment sends."""
    return max(0, min(KEPT, whole // coded - 1))


@dataclass(frozen=True)
class Lacking:
    """Members of a group that lack the last outer steps of most of them, and what they take over:
    the means of those steps, in the bits that they travelled in."""

    steps: Mapping[str, int]
    """How many steps each lacks."""
    donors: Mapping[str, str]
    """The member that hands them over to each."""
    stranded: frozenset[str]
    """Members that lack steps which nobody can hand over."""
    slow_digest: bytes
    """Of what they hold then, as most do now."""
    momentum_digest: bytes

    def receivers(self, donor: str) -> tuple[str, ...]:
        """The members that a donor hands steps over to."""
        return tuple(peer for peer, other in self.donors.items() if other == donor)


def lacking(offers: Mapping[str, Offer], *, is_whole: bool = False) -> Lacking | None:
    """The members that lack outer steps, by the offers of all; None where nobody does, or where it
    can't be mended so. ``is_whole``: whether the swarm is no larger than a group.

    Two or more must hold the same, and be at least half of all that are not stranded: the others
    take their word for what they had missed.
    """
    states = {peer: (one.slow_digest, one.momentum_digest) for peer, one in offers.items()}
    counts = Counter(states.values())
    most = max(counts.values())
    if most == len(offers) or most < 2:
        return None
    for state in sorted(state for state, count in counts.items() if count == most):
        led = _led_to(state, states, offers)
        # A liar is alone with what it claims. Others that differ and hold the same are heard.
        is_alone = all(is_whole and counts[states[peer]] == 1 for peer in led.stranded)
        if is_alone and 2 * most >= len(offers) - len(led.stranded):
            return led
    return None


def _led_to(
    state: tuple[bytes, bytes],
    states: Mapping[str, tuple[bytes, bytes]],
    offers: Mapping[str, Offer],
) -> Lacking:
    free = sorted(peer for peer, held in states.items() if held == state)
    # Another donor each time: if it fails, the next may not.
    first = max(one.round for one in offers.values()) % len(free)
    free = free[first:] + free[:first]
    steps, donors, stranded = dict[str, int](), dict[str, str](), set[str]()
    for peer in sorted(peer for peer, held in states.items() if held != state):
        mark = state_mark(*states[peer])
        donor = next((one for one in free if mark in offers[one].previous), None)
        if donor is None:
            stranded.add(peer)
            continue
        free.remove(donor)
        previous = offers[donor].previous
        steps[peer], donors[peer] = len(previous) - previous.index(mark), donor
    return Lacking(steps, donors, frozenset(stranded), *state)


def state_mark(slow_digest: bytes, momentum_digest: bytes) -> bytes:
    """`STATE_MARK_BYTES` that differ between two states of a fragment."""
    return sha256(slow_digest + momentum_digest).digest()[:STATE_MARK_BYTES]


@dataclass
class Underway:
    """One exchange of this peer."""

    number: int
    kind: ExchangeKind
    machine: Gathering
    offer: Offer
    """What we bring."""
    began: float
    call: Called | None = None
    """The call of a peer that began it; None where our own schedule did."""
    deadline: float = 0.0
    """Seconds from its beginning on."""
    needs: float = 0.0
    """Seconds that we need for it ourselves."""
    usual: float = 0.0
    """The deadline where nobody but we needs longer than usual."""
    waiting: Called | None = None
    """A call that waits for the answer to ours."""
    calling: set[str] = field(default_factory=set[str])
    """Peers that we called and that have not answered."""
    members: tuple[str, ...] = ()
    """Peers whose contributions are captured, ours included; sorted. Empty until it is known."""
    id: str = ""
    """The `exchange_id` of its members; empty while they are not known."""
    realign: bool = False
    """Whether slow weights travel whole in fp32, because those of the members differ."""
    keep_momentum: bool = False
    lacking: Lacking | None = None
    """Members that lack outer steps, which others hand over to them; a realignment else."""
    ahead: int = 0
    """How many inner steps longer than we the other members claim to have trained."""
    apart: int = 0
    """In a pair whose slow weights may differ: for how many of our inner steps they have parted
    (`RecentPartners.apart`)."""
    stalled: bool = False
    """Whether a member was given up for which the others have waited."""
    decided: float | None = None
    """When it was known that it is applied."""
    come: dict[str, float] = field(default_factory=dict[str, float])
    """Peers whose contributions have arrived whole, with the seconds from its beginning on."""
    muted: frozenset[str] = frozenset()
    """Members whose contributions we do not use: because we do not trust them (`Peer.muted`), or
    because they can't be used."""
    stumbled: set[str] = field(default_factory=set[str])
    """Members that left out what the others agreed on."""
    asked: float = 0.0
    """The most seconds that a member asks for."""
    due: float | None = None
    """Since when it has kept one of our own waiting; None if it does not."""
    timers: list[tuple[float, PeerEvent]] = field(default_factory=list[tuple[float, PeerEvent]])
    """Events of its machine at their times, the next one first."""
    _struck: Counter[type] = field(default_factory=Counter[type])
    """Timers that have passed, by kind of event."""

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.offer.fragment

    @property
    def partners(self) -> tuple[str, ...]:
        """The peers that take part with us so far, sorted."""
        return self.machine.partners

    def lacks(self, peer: str) -> bool:
        """Whether a member lacks outer steps, which another hands over to it."""
        return self.lacking is not None and peer in self.lacking.steps

    def set_timers(self, hello: float, deadline: float) -> None:
        """Count its seconds; again with more of them, where a member needs those."""
        self.deadline = deadline
        struck = Counter(self._struck)
        self.timers = []
        for after, event in sorted(self.kind.timetable(hello, deadline), key=itemgetter(0)):
            if struck[type(event)]:
                struck[type(event)] -= 1
            else:  # what is due already comes at the next tick
                self.timers.append((self.began + after, event))

    def next_event(self, now: float) -> PeerEvent | None:
        """The event of the next timer, once, if its time has come."""
        if not self.timers or self.timers[0][0] > now:
            return None
        _, event = self.timers.pop(0)
        self._struck[type(event)] += 1
        return event

    def begin_capture(
        self, members: tuple[str, ...], interval: int, *, is_whole: bool = False
    ) -> None:
        """Take in who the members are; what each of them brings is known, too. ``is_whole``:
        whether the swarm is no larger than a group."""
        ours, others = self.offer, self.machine.offers(members)
        self.members = members
        self.id = exchange_id(members, [self.offer, *others.values()])
        # Everybody sees in the offers where slow weights should be equal and are not: some member
        # has applied more.
        offers = {self.machine.me: self.offer} | others
        self.lacking = lacking(offers, is_whole=is_whole)
        self.realign = self.lacking is None and must_realign(self.offer, others.values())
        self.keep_momentum = self.realign and keeps_momentum(self.offer, others.values())
        # By their claims. A merge that only one of both has taken counts as half an interval, since
        # slow weights moved.
        self.ahead = max(
            other.steps - ours.steps + abs(other.version - ours.version) * interval // 2
            for other in others.values()
        )


def exchange_id(members: Sequence[str], offers: Sequence[Offer]) -> str:
    """32 hexadecimal digits that follow from what all members of an exchange know: the run, the
    fragment, who they are, and the latest round that one of them offers.

    Calls that cross, and members of a group, may offer different rounds. The same members that try
    a round again have the same id.
    """
    first, latest = offers[0], max(offer.round for offer in offers)
    named = [first.run_id, str(first.fragment), str(latest), *sorted(members)]
    return sha256("\n".join(named).encode()).hexdigest()[:32]
