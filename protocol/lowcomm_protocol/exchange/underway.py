"""One exchange under way: its machine, its timers, and the story of what its machine was told."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter
from typing import Any

from lowcomm_protocol.exchange.base import Gathering
from lowcomm_protocol.exchange.events import Called
from lowcomm_protocol.exchange.kinds import Kind
from lowcomm_protocol.exchange.missed import Lacking, lacking
from lowcomm_protocol.exchange.story import Story
from lowcomm_protocol.matching import Offer, keeps_momentum, must_realign, steps_ahead


@dataclass
class Underway:
    """One exchange of this peer."""

    number: int
    kind: Kind
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
    """Whose contributions are captured, ours included; sorted. Empty while that is not known."""
    id: str = ""
    """What all members call it, see ``exchange_id``; empty while they are not known."""
    realign: bool = False
    """Whether slow weights travel whole in fp32, because those of the members differ."""
    keep_momentum: bool = False
    lacking: Lacking | None = None
    """Members that lack outer steps, which others hand over to them; a realignment else."""
    ahead: int = 0
    """How many inner steps longer than we the other members claim to have trained."""
    apart: int = 0
    """In a pair whose slow weights may differ: for how many of our inner steps they have parted
    (`Company.apart`)."""
    blake3: bool = False
    """Whether all members know BLAKE3 as the digest of contents."""
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
    timers: list[tuple[float, Any]] = field(default_factory=list[tuple[float, Any]])
    """What its machine is told when, the next one first."""
    story: Story = field(init=False)
    _struck: Counter[type] = field(default_factory=Counter[type])
    """Timers that have passed, by kind of event."""

    def __post_init__(self) -> None:
        expected = (self.call.peer,) if self.call else ()
        self.story = Story(self.kind.name, self.machine.me, self.machine.group, expected)

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
            else:  # what is due by now is told at the next tick
                self.timers.append((self.began + after, event))

    def next_event(self, now: float) -> Any | None:
        """The event of the next timer, if its time has come; it is told once."""
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
        others = self.machine.offers(members)
        known = {peer: self.machine.offer_of(peer) for peer in members if peer != self.machine.me}
        offers = {self.machine.me: self.offer} | {
            peer: offer for peer, offer in known.items() if offer is not None
        }
        self.members = members
        self.id = exchange_id(members, [self.offer, *others])
        # Everybody sees in the offers where slow weights should be equal and are not: somebody has
        # applied more.
        self.lacking = lacking(offers, is_whole=is_whole)
        self.realign = self.lacking is None and must_realign(self.offer, others)
        self.keep_momentum = self.realign and keeps_momentum(self.offer, others)
        self.ahead = steps_ahead(self.offer, others, interval)
        self.blake3 = self.offer.blake3 and all(offer.blake3 for offer in others)


def exchange_id(members: Sequence[str], offers: Sequence[Offer]) -> str:
    """32 hexadecimal digits that follow from what all members of an exchange know: the run, the
    fragment, who they are, and the latest round that one of them offers.

    Calls that cross, and members of a group, may offer different rounds. The same members that try
    a round again have the same id.
    """
    first, latest = offers[0], max(offer.round for offer in offers)
    told = [first.run_id, str(first.fragment), str(latest), *sorted(members)]
    return sha256("\n".join(told).encode()).hexdigest()[:32]
