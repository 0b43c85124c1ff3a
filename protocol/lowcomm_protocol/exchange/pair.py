"""One exchange of one fragment between two peers: who takes part, and whether it is applied.

    GATHERING   call candidates one after the other, accept a call
    CAPTURING   the partner is known; our contribution is captured at a step boundary and coded
    TRADING     both contributions travel at once
    CONFIRMING  each tells the other whose contributions it holds
    APPLIED     both said the same: the outer step is taken
    ENDED       nothing is applied, training goes on

What one stream carries:

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── content, chunk* ────► both              at once, in both directions
    both   ── confirm ────────────► both              "I hold exactly these contributions"

The table of transitions is the protocol: a missing key is a violation. No clock, no sockets: events
go in, effects come out. Only the last confirmation can leave two ends in doubt (one has applied,
the other has not); ``in_doubt`` counts it, and the consensus term or a resync heals it.
``group.py`` has larger groups, ``base.py`` what both share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.base import (
    Accepted,
    Admit,
    Apply,
    Capture,
    Captured,
    Cause,
    Crossed,
    DeadlinePassed,
    Dial,
    Effect,
    ExchangeMember,
    Gathering,
    GatheringClosed,
    GaveUp,
    Knocked,
    Lost,
    Refused,
    Stage,
    WentAway,
    look_up,
    no_partner,
)
from lowcomm_protocol.matching import Refusal


class PairState(StrEnum):
    """Where one stream stands, as seen from one end."""

    OFFERED = "offered"  # we called; no answer yet
    AGREED = "agreed"  # accepted; our contribution is not captured yet
    RECEIVED = "received"  # as AGREED, and theirs has arrived whole
    STREAMING = "streaming"  # ours is on its way, theirs has not arrived
    PROMISED = "promised"  # as STREAMING, and they have confirmed
    HELD = "held"  # theirs has arrived whole
    READY = "ready"  # as HELD, and they have confirmed
    CONFIRMING = "confirming"  # we have confirmed, they have not
    DONE = "done"  # both have confirmed
    REFUSED = "refused"
    LOST = "lost"


class PairInput(StrEnum):
    """What can happen to a stream."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    CAPTURED = "captured"  # our contribution is coded
    VERIFIED = "verified"  # their contribution has arrived whole, and decodes to what is allowed
    SETTLED = "settled"  # the exchange knows its members
    CONFIRMED = "confirmed"  # they have confirmed
    FAILED = "failed"  # stream lost, corrupt content, deadline, or either side gave up


class Output(StrEnum):
    """What a stream must send."""

    SEND_CONTENT = "send-content"
    SEND_CONFIRM = "send-confirm"


TERMINAL = frozenset({PairState.DONE, PairState.REFUSED, PairState.LOST})
HOLDING = frozenset({PairState.HELD, PairState.READY, PairState.CONFIRMING, PairState.DONE})
"""States in which their contribution may be used."""

_NOTHING: tuple[Output, ...] = ()
_CONTENT = (Output.SEND_CONTENT,)
_CONFIRM = (Output.SEND_CONFIRM,)

PAIR_TRANSITIONS: dict[tuple[PairState, PairInput], tuple[tuple[Output, ...], PairState]] = {
    (PairState.OFFERED, PairInput.ACCEPTED): (_NOTHING, PairState.AGREED),
    (PairState.OFFERED, PairInput.REFUSED): (_NOTHING, PairState.REFUSED),
    (PairState.AGREED, PairInput.CAPTURED): (_CONTENT, PairState.STREAMING),
    (PairState.AGREED, PairInput.VERIFIED): (_NOTHING, PairState.RECEIVED),
    (PairState.RECEIVED, PairInput.CAPTURED): (_CONTENT, PairState.HELD),
    # They confirm only what they hold, so no confirmation can come before our content was sent.
    (PairState.STREAMING, PairInput.VERIFIED): (_NOTHING, PairState.HELD),
    (PairState.STREAMING, PairInput.CONFIRMED): (_NOTHING, PairState.PROMISED),
    (PairState.PROMISED, PairInput.VERIFIED): (_NOTHING, PairState.READY),
    (PairState.HELD, PairInput.CONFIRMED): (_NOTHING, PairState.READY),
    (PairState.HELD, PairInput.SETTLED): (_CONFIRM, PairState.CONFIRMING),
    (PairState.READY, PairInput.SETTLED): (_CONFIRM, PairState.DONE),
    (PairState.CONFIRMING, PairInput.CONFIRMED): (_NOTHING, PairState.DONE),
    **{
        (state, PairInput.FAILED): (_NOTHING, PairState.LOST)
        for state in PairState
        if state not in TERMINAL
    },
}


def step(state: PairState, event: PairInput) -> tuple[tuple[Output, ...], PairState]:
    """What to send, and the next state. Raises ProtocolViolation where the table has no entry."""
    return look_up(PAIR_TRANSITIONS, state, event)


# Events and effects, besides those of every exchange


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A member's contribution has arrived whole and decodes to what is allowed."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A member told whose contributions it holds, as ``members_digest`` has it."""

    peer: str
    members: bytes


Event = base.Event | Crossed | Knocked | WentAway | Verified | Confirmed


@dataclass(frozen=True, kw_only=True)
class SendContent(Effect):
    """Send our coded contribution."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class SendConfirm(Effect):
    """Tell a member whose contributions we hold."""

    peer: str
    members: bytes


def members_digest(members: Sequence[str]) -> bytes:
    """What a confirmation carries: SHA-256 over the sorted peer ids."""
    return sha256("\n".join(sorted(members)).encode()).digest()


@dataclass
class Exchange(Gathering):
    """The decisions of one peer in one exchange of two. ``handle`` takes an event and gives the
    effects to carry out."""

    _next: int = 0
    _waiting: str = ""
    """Who has knocked."""
    _late: bool = False
    _confirmed: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        if self.group > 2:
            raise ValueError(f"An Exchange is of two peers, not {self.group}: use GroupExchange.")

    def start(self) -> list[Effect]:
        """Begin to call candidates."""
        return self._gather()

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event. Raises ProtocolViolation where a peer did what is not allowed in its
        state."""
        if self.over:
            return []
        match event:
            case Accepted():
                return self._on_accepted(event)
            case Refused(peer=peer, reason=reason, detail=detail):
                return self._on_refused(peer, reason, detail)
            case Crossed(peer=peer):
                return self._on_crossed(peer)
            case Knocked(peer=peer):
                self._waiting = peer
                return []
            case WentAway():
                self._waiting = ""
                return []
            case Captured():
                return self._on_captured()
            case Verified(peer=peer):
                return self._advance(peer, PairInput.VERIFIED) + self._settle()
            case Confirmed(peer=peer, members=members):
                effects = self._advance(peer, PairInput.CONFIRMED)
                self._confirmed[peer] = members
                return effects + self._conclude()
            case Lost(peer=peer, reason=reason, cause=cause):
                return self._on_lost(peer, reason, cause)
            case GatheringClosed():
                return self._on_gathering_closed()
            case DeadlinePassed():
                return self._on_deadline()
            case GaveUp(reason=reason, cause=cause):
                return self._give_in(reason, cause)

    # GATHERING

    def _gather(self) -> list[Effect]:
        # One call at a time: a second peer that accepted would wait in vain.
        if not self.partners and not self._in(PairState.OFFERED):
            return self._dial_next()
        return super()._gather()

    def _dial_next(self) -> list[Effect]:
        while not self._waiting and self._next < len(self.candidates):
            peer = self.candidates[self._next]
            self._next += 1
            if peer not in self._members:
                self._members[peer] = ExchangeMember(PairState.OFFERED)
                return [Dial(peer=peer)]
        return self._close_gathering()

    def _close_gathering(self) -> list[Effect]:
        if self._waiting and not self.partners:
            peer, self._waiting = self._waiting, ""
            return [Admit(peer=peer)]
        return super()._close_gathering()

    def _begin(self) -> list[Effect]:
        self.stage = Stage.CAPTURING
        return [Capture(members=tuple(sorted([self.me, *self.partners])))]

    # CAPTURING, TRADING

    def _on_captured(self) -> list[Effect]:
        if self.stage is not Stage.CAPTURING:
            raise ProtocolViolation(f"A capture is not expected while {self.stage.value}.")
        self.stage = Stage.TRADING
        (partner,) = self.partners
        return self._advance(partner, PairInput.CAPTURED) + self._settle()

    def _settle(self) -> list[Effect]:
        holders = self._in(*HOLDING)
        if self.stage is not Stage.TRADING or not holders:
            return []
        self.stage = Stage.CONFIRMING
        return self._advance(holders[0], PairInput.SETTLED) + self._conclude()

    # CONFIRMING

    def _conclude(self) -> list[Effect]:
        if self.stage is not Stage.CONFIRMING:
            return []
        (partner,) = self.partners
        members = self._all_members()
        confirmed = self._confirmed.get(partner)
        if confirmed is None:
            return []
        if confirmed != members_digest(members):
            # Whoever told us otherwise has not applied our members, so no doubt is left.
            return self._end("the members do not hold the same contributions", Cause.DISAGREED)
        self.stage = Stage.APPLIED
        offer = self._members[partner].offer
        assert offer is not None
        return [Apply(members=members, swarm_step=offer.swarm_step)]

    # any stage

    def _on_lost(self, peer: str, reason: str, cause: Cause | Refusal) -> list[Effect]:
        if not self.is_open(peer):
            return []
        reason = reason or "was lost"
        self._lose(peer, reason, cause)
        if self.stage is Stage.CONFIRMING:
            # It may have our confirmation, and have applied.
            return self._give_in(f"{reason} before everybody had confirmed", cause)
        return self._gather() if self.stage is Stage.GATHERING else self._give_in(reason, cause)

    def _on_deadline(self) -> list[Effect]:
        first, self._late = not self._late, True
        if self.stage is Stage.TRADING:
            reason = "was too slow for the deadline"
            effects = self._give_up(self.partners, reason, Cause.LATE)
            return effects + self._give_in(no_partner(self.refusals), Cause.LATE)
        if self.stage is Stage.CONFIRMING and first:
            # Their confirmation may be on its way: ending now would put both ends in doubt.
            return []
        return self._give_in("ran past its deadline", Cause.LATE)

    def _give_in(self, reason: str, cause: Cause | Refusal) -> list[Effect]:
        return self._end(reason, cause, in_doubt=self.stage is Stage.CONFIRMING)

    def _step(self, peer: str, member: ExchangeMember, event: str) -> list[Effect]:
        outputs, member.state = step(PairState(member.state), PairInput(event))
        return [self._send(peer, output) for output in outputs]

    def _send(self, peer: str, output: Output) -> Effect:
        if output is Output.SEND_CONTENT:
            return SendContent(peer=peer)
        return SendConfirm(peer=peer, members=members_digest(self._all_members()))

    def _all_members(self) -> tuple[str, ...]:
        return tuple(sorted([self.me, *self._in(*HOLDING)]))
