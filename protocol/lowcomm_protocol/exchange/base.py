"""What every kind of exchange shares: its events and effects, and how it gathers those that take
part.

A kind of exchange is a subclass of `Gathering` (``pair.py``, ``group.py``) and an
entry of the table in ``kinds.py``. No clock, no sockets: events go in, effects come out.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.matching import Offer, Refusal, wins_crossing

S = TypeVar("S", bound=StrEnum)
I = TypeVar("I", bound=StrEnum)  # noqa: E741
R = TypeVar("R")


def look_up(table: Mapping[tuple[S, I], R], state: S, event: I) -> R:
    """What a table of transitions has for an input. Raises ProtocolViolation where it has no
    entry."""
    try:
        return table[state, event]
    except KeyError:
        told = f"{event.value!r} is not allowed in state {state.value!r}: the stream is closed."
        raise ProtocolViolation(told) from None


OFFERED, DONE, REFUSED, LOST = "offered", "done", "refused", "lost"
"""States that the table of every kind has: we called; nothing more is due; both ways out."""
ACCEPTED_INPUT, REFUSED_INPUT, FAILED_INPUT = "accepted", "refused", "failed"
"""Inputs that it has."""
UNANSWERED = "did not answer in time"
"""Why a candidate is given up that has said nothing to our offer."""


class Stage(StrEnum):
    """Where an exchange stands; not every kind of exchange has every stage."""

    GATHERING = "gathering"
    AGREEING = "agreeing"  # groups: on the list of members
    CAPTURING = "capturing"
    TRADING = "trading"  # pairs
    REDUCING = "reducing"  # groups: contributions travel, to the owner of each shard
    AVERAGING = "averaging"  # groups: means are made and travel, from the owner of each shard
    CONFIRMING = "confirming"
    COMMITTING = "committing"  # groups: every member has told what it would apply
    APPLIED = "applied"
    ENDED = "ended"


class Cause(StrEnum):
    """Why an exchange was not applied, or a peer takes no part in it; one that refused has its
    ``Refusal``."""

    NOBODY = "nobody-training"
    NO_PARTNER = "no-partner"
    """Those that were called do not take part, for different reasons."""
    UNANSWERED = "unanswered"
    LOST = "lost"
    GAVE_UP = "gave-up"
    """The peer told that it gives up."""
    GAVE_WAY = "gave-way"
    """It took longer than usual, and one of our own was due."""
    LATE = "late"
    UNUSABLE = "unusable"
    VIOLATED = "violated"
    DISAGREED = "disagreed"
    MINORITY = "minority"
    """Most of the group are there and take no part now."""
    STOPPED = "stopped"
    """We stopped: the node leaves, pauses, or goes on without its trainer."""
    REMOVED = "removed"
    OWN_FAULT = "own-fault"


# Events


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A member that we called accepted, or one that called us was accepted (``called_us``)."""

    peer: str
    offer: Offer
    called_us: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A member refused."""

    peer: str
    reason: Refusal
    detail: str


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """A member called us while our own call to it was open, and was told that ours goes on."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Knocked:
    """The peer that we would meet first calls us while our call to another is open. Its call waits
    for that one's answer."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class WentAway:
    """A peer whose call waited has dropped it."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Our contribution is coded and can be sent."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A member's stream failed."""

    peer: str
    reason: str
    cause: Cause | Refusal = Cause.LOST


@dataclass(frozen=True, kw_only=True)
class GatheringClosed:
    """Time is up for candidates that have not answered."""


@dataclass(frozen=True, kw_only=True)
class NeedsMost:
    """More of a group must take part than are there and do not. Else its parts would take different
    outer steps, and no part could hand its own over to the others."""

    least: int = 0
    """So many at least, as others may not be known yet."""


@dataclass(frozen=True, kw_only=True)
class Equal:
    """All must hold the same slow weights."""


@dataclass(frozen=True, kw_only=True)
class Missed:
    """Members lack outer steps that most have taken (`Lacking`)."""

    receivers: tuple[str, ...] = ()
    """Whom we hand them over to."""
    donor: str = ""
    """Who hands them over to us; empty where we lack none."""
    stranded: bool = False
    """Whether we lack steps that nobody can hand over."""


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """Time is up: the first time for contributions, the second time for confirmations too."""


@dataclass(frozen=True, kw_only=True)
class GaveUp:
    """We can't go on ourselves: the trainer failed, or the node leaves."""

    reason: str
    cause: Cause = Cause.STOPPED


Event = Accepted | Refused | Captured | Lost | GatheringClosed | DeadlinePassed | GaveUp
"""What every kind of exchange takes in; each has more of its own. Only those are told of `Crossed`,
`Knocked` and `WentAway` that name them."""

# Effects


class Effect:
    """What an exchange has its caller do."""


@dataclass(frozen=True, kw_only=True)
class Dial(Effect):
    """Call a candidate with our offer."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Admit(Effect):
    """Accept the call of a peer that waits."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Capture(Effect):
    """Capture and code our contribution to an exchange of these members, at the next step
    boundary."""

    members: tuple[str, ...]
    """Sorted, our own id included."""


@dataclass(frozen=True, kw_only=True)
class Abandon(Effect):
    """Close a member's stream and tell why."""

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Apply(Effect):
    """Take the outer step over the contributions of these members, in this order, our own
    included."""

    members: tuple[str, ...]
    swarm_step: int
    shards: tuple[bool, ...] = ()
    """In groups: which shards are applied, one for each member; a pair applies the whole
    fragment."""


@dataclass(frozen=True, kw_only=True)
class Stumbled(Effect):
    """A member has left out what the others agree on."""

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class End(Effect):
    """Nothing is applied; why."""

    reason: str


@dataclass
class ExchangeMember:
    """One peer as an exchange sees it."""

    state: str
    """In the table of the exchange. Both tables begin with ``offered`` and end out of it as
    ``refused`` or ``lost``."""
    offer: Offer | None = None
    reason: str = ""
    cause: Cause | Refusal | None = None
    crossed: bool = False
    """It has called us while our own call to it was open."""
    again: bool = False
    """We have called it a second time."""


_OVER = (Stage.APPLIED, Stage.ENDED)
_OUT = frozenset({REFUSED, LOST})
_NO_PART = _OUT | {OFFERED}
_TERMINAL = _OUT | {DONE}


@dataclass
class Gathering(ABC):
    """What pairs and groups share: who is called, who takes part, and who does not and why."""

    me: str
    candidates: Sequence[str]
    group: int = 2
    stage: Stage = Stage.GATHERING
    in_doubt: bool = False
    reason: str = ""
    cause: Cause | Refusal | None = None
    """Why it was not applied."""
    _members: dict[str, ExchangeMember] = field(default_factory=dict[str, ExchangeMember])

    @abstractmethod
    def start(self) -> list[Effect]:
        """Begin to call candidates."""

    @abstractmethod
    def handle(self, event: Any) -> list[Effect]:
        """Take in an event; what to carry out. Raises ProtocolViolation for what a peer must not
        do."""

    @abstractmethod
    def _begin(self) -> list[Effect]:
        """Go on from gathering, with at least one partner."""

    @abstractmethod
    def _step(self, peer: str, member: ExchangeMember, event: str) -> list[Effect]:
        """Take one step in the table. Raises ProtocolViolation where it has no entry."""

    def expect(self, peer: str) -> None:
        """Take in a peer that has called us, before ``start``: it is not called back."""
        self._members[peer] = ExchangeMember(OFFERED)

    @property
    def over(self) -> bool:
        """Whether the exchange has been applied or has ended."""
        return self.stage in _OVER

    @property
    def refusals(self) -> dict[str, str]:
        """Why each candidate that does not take part does not."""
        return {peer: m.reason for peer, m in self._members.items() if m.state in _OUT}

    @property
    def causes(self) -> dict[str, Cause | Refusal]:
        """The same as codes."""
        known = {peer: m.cause for peer, m in self._members.items() if m.state in _OUT}
        return {peer: cause or Cause.LOST for peer, cause in known.items()}

    @property
    def partners(self) -> tuple[str, ...]:
        """The peers that take part with us so far, sorted."""
        return tuple(sorted([peer for peer, m in self._members.items() if m.state not in _NO_PART]))

    def has_room_for(self, peer: str) -> bool:
        """Whether a peer that calls us can still take part."""
        # A peer that has refused us, or that we could not reach, may still call us itself.
        others = [p for p, m in self._members.items() if p != peer and m.state not in _OUT]
        return (
            self.stage is Stage.GATHERING
            and peer not in self.partners
            and len(others) < self.group - 1
        )

    def is_calling(self, peer: str) -> bool:
        """Whether we have called this peer and it has not answered."""
        member = self._members.get(peer)
        return member is not None and member.state == OFFERED

    def is_open(self, peer: str) -> bool:
        """Whether anything is still to come from this peer."""
        member = self._members.get(peer)
        return not self.over and member is not None and member.state not in _TERMINAL

    def offer_of(self, peer: str) -> Offer | None:
        """What a member brought."""
        member = self._members.get(peer)
        return member.offer if member else None

    def offers(self, members: Iterable[str]) -> list[Offer]:
        """What these members bring, as far as it is known; not ours."""
        known = (self.offer_of(peer) for peer in members if peer != self.me)
        return [offer for offer in known if offer is not None]

    def takes_part(self, peer: str) -> bool | None:
        """Whether most others take part with a peer; None if none has told."""
        return None

    def _gather(self) -> list[Effect]:
        if any(m.state == OFFERED for m in self._members.values()):
            return []
        return self._close_gathering()

    def _close_gathering(self) -> list[Effect]:
        return self._begin() if self.partners else self._end_alone()

    def _on_accepted(self, event: Accepted) -> list[Effect]:
        peer, member = event.peer, self._members.get(event.peer)
        if peer in self.partners or (
            not event.called_us and (member is None or member.state == REFUSED)
        ):
            raise ProtocolViolation(f"{peer} has accepted a call that is not open.")
        if event.called_us and self.has_room_for(peer):
            member = self._members[peer] = ExchangeMember(OFFERED)
        if self.stage is not Stage.GATHERING or member is None or member.state != OFFERED:
            return [Abandon(peer=peer, reason="the exchange has begun without you")]
        effects = self._advance(peer, ACCEPTED_INPUT)
        member.offer = event.offer
        return effects + self._gather()

    def _on_refused(self, peer: str, reason: Refusal, detail: str) -> list[Effect]:
        if reason is Refusal.CROSSED and wins_crossing(peer, self.me):
            # Their own call is on its way to us; until it comes the member counts as called.
            return []
        if self.is_calling(peer) and self._members[peer].crossed and not self._members[peer].again:
            # It refused before it called us, and waits for our call: its refusal was overtaken.
            self._members[peer].again = True
            return [Dial(peer=peer)]
        effects = self._advance(peer, REFUSED_INPUT)
        member = self._members[peer]
        member.reason, member.cause = member.reason or detail, member.cause or reason
        return effects + (self._gather() if self.stage is Stage.GATHERING else [])

    def _on_crossed(self, peer: str) -> list[Effect]:
        if self.is_calling(peer):
            self._members[peer].crossed = True
        return []

    def _on_gathering_closed(self) -> list[Effect]:
        if self.stage is not Stage.GATHERING:
            return []
        return (
            self._give_up(self._in(OFFERED), UNANSWERED, Cause.UNANSWERED) + self._close_gathering()
        )

    def _in(self, *states: str) -> list[str]:
        return sorted(peer for peer, m in self._members.items() if m.state in states)

    def _give_up(self, peers: Sequence[str], reason: str, cause: Cause) -> list[Effect]:
        for peer in peers:
            self._lose(peer, reason, cause)
        return [Abandon(peer=peer, reason=reason) for peer in peers]

    def _lose(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        self._advance(peer, FAILED_INPUT)
        self._members[peer].reason = reason
        self._members[peer].cause = cause

    def _advance(self, peer: str, event: str) -> list[Effect]:
        member = self._members.get(peer)
        if member is None:
            raise ProtocolViolation(
                f"{peer}: {event!r} from a peer that has no part in this exchange."
            )
        if member.state == LOST:
            return []  # It was on its way when we gave the member up.
        return self._step(peer, member, event)

    def _end_alone(self) -> list[Effect]:
        """Nobody takes part with us."""
        return self._end(no_partner(self.refusals), self._common_cause())

    def _common_cause(self) -> Cause | Refusal:
        """Why nobody takes part, where all have the same reason."""
        causes = set(self.causes.values())
        if not causes:
            return Cause.NOBODY
        return causes.pop() if len(causes) == 1 else Cause.NO_PARTNER

    def _end(
        self, reason: str, cause: Cause | Refusal = Cause.LOST, *, in_doubt: bool = False
    ) -> list[Effect]:
        self.in_doubt = in_doubt
        self.stage, self.reason, self.cause = Stage.ENDED, reason, cause
        open_ = [peer for peer, m in self._members.items() if m.state not in _OUT]
        return [*(Abandon(peer=peer, reason=reason) for peer in open_), End(reason=reason)]


def no_partner(refusals: dict[str, str]) -> str:
    """Why there is nobody to exchange with, in a line."""
    if not refusals:
        return "no partner: nobody else is training"
    told = "; ".join(f"{peer[-6:]} {reason}" for peer, reason in list(refusals.items())[:4])
    more = f"; and {len(refusals) - 4} more" if len(refusals) > 4 else ""
    return f"no partner: {told}{more}"
