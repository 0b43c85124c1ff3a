"""What pairs and groups share: who is called, who takes part, and who does not and why.

A kind of exchange is a subclass of `Gathering` (``pair.py``, ``group.py``) and an entry of the
table in ``kinds.py``. No clock, no sockets: events go in, effects come out (``events.py``).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.events import Cause, Effect, PeerEvent, Stage
from lowcomm_protocol.matching import REFUSAL_TEXT, Offer, Refusal, wins_crossing

OFFERED, DONE, REFUSED, LOST = "offered", "done", "refused", "lost"
"""States of a member in every kind: we called; nothing more is due; both ways out."""
ACCEPTED_INPUT, REFUSED_INPUT, FAILED_INPUT = "accepted", "refused", "failed"
"""Inputs of every kind; ``failed``: stream lost, corrupt content, deadline, or a side gave up."""
UNANSWERED = "did not answer in time"
"""Why a candidate is given up that has said nothing to our offer."""
_OUT = frozenset({REFUSED, LOST})
_NO_PART = _OUT | {OFFERED}
_TERMINAL = _OUT | {DONE}

M = TypeVar("M", bound=events.MemberMessage)
Transitions = Mapping[tuple[str, str], str]
"""The next state of a member by its state and an input. A missing key is a violation."""


def with_failures(table: Transitions) -> Transitions:
    """A table in which every state that is not final can fail."""
    states = {state for state, _ in table} | set(table.values())
    return {**table, **{(state, FAILED_INPUT): LOST for state in states - _TERMINAL}}


@dataclass
class ExchangeMember:
    """One peer as an exchange sees it."""

    state: str
    """In the table of the exchange. All tables begin with ``offered`` and end out of it as
    ``refused`` or ``lost``."""
    offer: Offer | None = None
    reason: str = ""
    cause: Cause | Refusal | None = None
    crossed: bool = False
    """It has called us while our own call to it was open."""
    called_twice: bool = False


@dataclass
class Gathering(ABC):
    """The decisions of one peer in one exchange. ``handle`` takes an event and gives the effects to
    carry out."""

    TRANSITIONS: ClassVar[Transitions]
    DOUBTFUL: ClassVar[Stage]
    """Stage in which others may have applied the exchange when we end it."""

    me: str
    candidates: Sequence[str]
    group: int = 2
    stage: Stage = Stage.GATHERING
    in_doubt: bool = False
    reason: str = ""
    cause: Cause | Refusal | None = None
    """Why it was not applied."""
    _members: dict[str, ExchangeMember] = field(default_factory=dict[str, ExchangeMember])
    _partners: tuple[str, ...] | None = None
    """Cached answer; None once a state has changed."""
    _late: bool = False
    """Whether its deadline has passed once."""

    def start(self) -> list[Effect]:
        """Begin to call candidates."""
        return self._gather()

    @abstractmethod
    def _begin(self) -> list[Effect]:
        """Go on from gathering, with at least one partner."""

    @abstractmethod
    def _on_captured(self) -> list[Effect]:
        """Our contribution is coded."""

    @abstractmethod
    def _on_own(self, event: PeerEvent) -> list[Effect]:
        """Take in an event of this kind alone; ignore those that it does not know."""

    @abstractmethod
    def _on_lost(self, peer: str, reason: str, cause: Cause | Refusal) -> list[Effect]:
        """Nothing more can come from a peer from which something was due."""

    @abstractmethod
    def _on_deadline(self, *, first: bool) -> list[Effect]:
        """The deadline has passed, for the first or the second time."""

    def handle(self, event: PeerEvent) -> list[Effect]:
        """Take in an event; what to carry out. Raises ProtocolViolation for what a peer must not
        do in its state."""
        if self.over:
            return []
        match event:
            case events.MemberMessage():
                return self._on_own(event)
            case events.Accepted():
                return self._on_accepted(event)
            case events.Refused(peer=peer, reason=reason):
                return self._on_refused(peer, reason)
            case events.Crossed(peer=peer):
                if self.is_calling(peer):
                    self._members[peer].crossed = True
                return []
            case events.GatheringClosed():
                return self._on_gathering_closed()
            case events.Captured():
                if self.stage is not Stage.CAPTURING:
                    raise ProtocolViolation(f"A capture is not expected while {self.stage.value}.")
                return self._on_captured()
            case events.Lost(peer=peer, reason=reason, cause=cause):
                if self.is_open(peer):
                    return self._on_lost(peer, reason or "was lost", cause)
                return []
            case events.DeadlinePassed():
                first, self._late = not self._late, True
                return self._on_deadline(first=first)
            case events.GaveUp(reason=reason, cause=cause):
                return self._give_in(reason, cause)
            case _:
                return self._on_own(event)

    def expect(self, peer: str) -> None:
        """Take in a peer that has called us, before ``start``: it is not called back."""
        self._members[peer] = ExchangeMember(OFFERED)

    @property
    def over(self) -> bool:
        """Whether the exchange has been applied or has ended."""
        return self.stage in (Stage.APPLIED, Stage.ENDED)

    @property
    def refusals(self) -> dict[str, str]:
        """Why each candidate that does not take part does not."""
        return {peer: m.reason for peer, m in self._members.items() if m.state in _OUT}

    @property
    def causes(self) -> dict[str, Cause | Refusal]:
        """The same as codes."""
        return {p: m.cause or Cause.LOST for p, m in self._members.items() if m.state in _OUT}

    @property
    def partners(self) -> tuple[str, ...]:
        """The peers that take part with us so far, sorted."""
        if self._partners is None:
            there = [peer for peer, m in self._members.items() if m.state not in _NO_PART]
            self._partners = tuple(sorted(there))
        return self._partners

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

    def offers(self, members: Iterable[str]) -> dict[str, Offer]:
        """What these members bring, as far as it is known; not ours."""
        known = {peer: self.offer_of(peer) for peer in members if peer != self.me}
        return {peer: offer for peer, offer in known.items() if offer is not None}

    def takes_part(self, peer: str) -> bool | None:
        """Whether most others take part with a peer; None if none has said."""
        return None

    def _to_all(self, message: type[M], **values: Any) -> list[M]:
        """A message to each partner."""
        return [message(peer=peer, **values) for peer in self.partners]

    def _gather(self) -> list[Effect]:
        return [] if self._in(OFFERED) else self._close_gathering()

    def _close_gathering(self) -> list[Effect]:
        if self.partners:
            return self._begin()
        return self._end(no_partner(self.refusals), self._common_cause())

    def _on_accepted(self, event: events.Accepted) -> list[Effect]:
        peer, member = event.peer, self._members.get(event.peer)
        if peer in self.partners or (
            not event.called_us and (member is None or member.state == REFUSED)
        ):
            raise ProtocolViolation(f"{peer} has accepted a call that is not open.")
        if event.called_us and self.has_room_for(peer):
            member = self._members[peer] = ExchangeMember(OFFERED)
            self._partners = None
        if self.stage is not Stage.GATHERING or member is None or member.state != OFFERED:
            return [events.Abandon(peer=peer, reason="the exchange has begun without you")]
        self._advance(peer, ACCEPTED_INPUT)
        member.offer = event.offer
        return self._gather()

    def _on_refused(self, peer: str, reason: Refusal) -> list[Effect]:
        if reason == Refusal.CROSSED and wins_crossing(peer, self.me):
            # Their own call is on its way to us; until it comes the member counts as called.
            return []
        member = self._members.get(peer)
        if member and member.state == OFFERED and member.crossed and not member.called_twice:
            # It refused before it called us, and waits for our call: its refusal was overtaken.
            member.called_twice = True
            return [events.Dial(peer=peer)]
        self._advance(peer, REFUSED_INPUT)
        member = self._members[peer]
        member.reason, member.cause = REFUSAL_TEXT[reason], reason
        return self._gather() if self.stage is Stage.GATHERING else []

    def _on_gathering_closed(self) -> list[Effect]:
        if self.stage is not Stage.GATHERING:
            return []
        given_up = self._give_up(self._in(OFFERED), UNANSWERED, Cause.UNANSWERED)
        return given_up + self._close_gathering()

    def _in(self, *states: str) -> list[str]:
        return sorted(peer for peer, m in self._members.items() if m.state in states)

    def _give_up(self, peers: Sequence[str], reason: str, cause: Cause) -> list[Effect]:
        for peer in peers:
            self._lose(peer, reason, cause)
        return [events.Abandon(peer=peer, reason=reason) for peer in peers]

    def _lose(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        self._advance(peer, FAILED_INPUT)
        self._members[peer].reason, self._members[peer].cause = reason, cause

    def _next_state(self, peer: str, event: str) -> str | None:
        """The state that an input leads to; None if it was on its way when we gave the member up.
        Raises ProtocolViolation where the table has no entry."""
        member = self._members.get(peer)
        if member is None:
            raise ProtocolViolation(
                f"{peer}: {event!r} from a peer that has no part in this exchange."
            )
        if member.state == LOST:
            return None
        state = self.TRANSITIONS.get((member.state, event))
        if state is None:
            raise ProtocolViolation(
                f"{event!r} is not allowed in state {member.state!r}: the stream is closed."
            )
        return state

    def _advance(self, peer: str, event: str) -> None:
        if (state := self._next_state(peer, event)) is not None:
            self._members[peer].state, self._partners = state, None

    def _common_cause(self) -> Cause | Refusal:
        """Why nobody takes part, where all have the same reason."""
        causes = set(self.causes.values())
        if not causes:
            return Cause.NOBODY
        return causes.pop() if len(causes) == 1 else Cause.NO_PARTNER

    def _give_in(self, reason: str, cause: Cause | Refusal) -> list[Effect]:
        return self._end(reason, cause, in_doubt=self.stage is self.DOUBTFUL)

    def _end(
        self, reason: str, cause: Cause | Refusal = Cause.LOST, *, in_doubt: bool = False
    ) -> list[Effect]:
        self.in_doubt = in_doubt
        self.stage, self.reason, self.cause = Stage.ENDED, reason, cause
        open_ = [peer for peer, m in self._members.items() if m.state not in _OUT]
        abandoned = [events.Abandon(peer=peer, reason=reason) for peer in open_]
        return [*abandoned, events.End(reason=reason)]


def no_partner(refusals: Mapping[str, str]) -> str:
    """The reason of an exchange that nobody took part in."""
    if not refusals:
        return "no partner: nobody else is training"
    reasons = "; ".join(f"{peer[-6:]} {reason}" for peer, reason in list(refusals.items())[:4])
    more = f"; and {len(refusals) - 4} more" if len(refusals) > 4 else ""
    return f"no partner: {reasons}{more}"
