"""One exchange of one fragment among two or more peers: who takes part, and whether it is applied.

    GATHERING   call candidates, accept calls      pairs: one after the other; groups: all of the slice at once
    CAPTURING   members are known; our contribution is captured at a step boundary and coded
    TRADING     contributions travel over one stream a member
    CONFIRMING  every member tells every other whose contributions it holds
    APPLIED     all said the same: the outer step is taken;   ENDED otherwise: nothing is applied, training goes on

No clock, no sockets: events go in, effects come out. Only the last confirmation can leave two ends in doubt (one has
applied, the other has not); ``in_doubt`` counts it, and the consensus term or a resync heals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.matching import Offer, Refusal, wins_crossing
from lowcomm_protocol.swap import HOLDING, TERMINAL, Input, Output, State, step


class Stage(StrEnum):
    """Where an exchange stands."""

    GATHERING = "gathering"
    CAPTURING = "capturing"
    TRADING = "trading"
    CONFIRMING = "confirming"
    APPLIED = "applied"
    ENDED = "ended"


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
class Captured:
    """Our contribution is coded and can be sent."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A member's contribution has arrived whole and decodes to what is allowed."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A member told whose contributions it holds, as ``members_digest`` has it."""

    peer: str
    members: bytes


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A member's stream failed."""

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GatheringClosed:
    """Time is up for candidates that have not answered."""


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """Time is up: the first time for contributions, the second time for confirmations too."""


@dataclass(frozen=True, kw_only=True)
class GaveUp:
    """We can't go on ourselves: the trainer failed, or the node leaves."""

    reason: str


Event = Accepted | Refused | Captured | Verified | Confirmed | Lost | GatheringClosed | DeadlinePassed | GaveUp

# Effects


@dataclass(frozen=True, kw_only=True)
class Dial:
    """Call a candidate with our offer."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Capture and code our contribution at the next step boundary."""


@dataclass(frozen=True, kw_only=True)
class SendContent:
    """Send our coded contribution."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class SendConfirm:
    """Tell a member whose contributions we hold."""

    peer: str
    members: bytes


@dataclass(frozen=True, kw_only=True)
class Abandon:
    """Close a member's stream and tell why."""

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Take the outer step over the contributions of these members, in this order, our own included."""

    members: tuple[str, ...]
    swarm_step: int


@dataclass(frozen=True, kw_only=True)
class End:
    """Nothing is applied; why."""

    reason: str


Effect = Dial | Capture | SendContent | SendConfirm | Abandon | Apply | End


def members_digest(members: Sequence[str]) -> bytes:
    """What a confirmation carries: SHA-256 over the sorted peer ids."""
    return sha256("\n".join(sorted(members)).encode()).digest()


@dataclass
class _Member:
    state: State
    offer: Offer | None = None
    confirmed: bytes | None = None
    reason: str = ""


@dataclass
class Exchange:
    """The decisions of one peer in one exchange. ``handle`` takes an event and gives the effects to carry out."""

    me: str
    candidates: Sequence[str]
    group: int
    stage: Stage = Stage.GATHERING
    in_doubt: bool = False
    reason: str = ""
    _members: dict[str, _Member] = field(default_factory=dict[str, _Member])
    _next: int = 0
    _late: bool = False

    def start(self) -> list[Effect]:
        """Begin to call candidates."""
        return self._gather() if self.group == 2 else self._dial_all()

    def expect(self, peer: str) -> None:
        """Take in a peer that has called us, before ``start``: it is not called back."""
        self._members[peer] = _Member(State.OFFERED)

    @property
    def over(self) -> bool:
        """Whether the exchange has been applied or has ended."""
        return self.stage in (Stage.APPLIED, Stage.ENDED)

    @property
    def refusals(self) -> dict[str, str]:
        """Why each candidate that does not take part does not."""
        return {peer: m.reason for peer, m in self._members.items() if m.state in (State.REFUSED, State.LOST)}

    @property
    def partners(self) -> tuple[str, ...]:
        """The peers that take part with us so far, sorted."""
        return tuple(sorted(p for p, m in self._members.items() if m.state not in (State.OFFERED, *_OUT)))

    def has_room_for(self, peer: str) -> bool:
        """Whether a peer that calls us can still take part."""
        # A peer that has refused us, or that we could not reach, may still call us itself.
        others = [p for p, m in self._members.items() if p != peer and m.state not in _OUT]
        return self.stage is Stage.GATHERING and peer not in self.partners and len(others) < self.group - 1

    def is_calling(self, peer: str) -> bool:
        """Whether we have called this peer and it has not answered."""
        member = self._members.get(peer)
        return member is not None and member.state is State.OFFERED

    def is_open(self, peer: str) -> bool:
        """Whether anything is still to come from this peer."""
        member = self._members.get(peer)
        return not self.over and member is not None and member.state not in TERMINAL

    def offer_of(self, peer: str) -> Offer | None:
        """What a member brought."""
        member = self._members.get(peer)
        return member.offer if member else None

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event. Raises ProtocolViolation where a peer did what is not allowed in its state."""
        if self.over:
            return []
        match event:
            case Accepted():
                return self._on_accepted(event)
            case Refused(peer=peer, reason=reason, detail=detail):
                return self._on_refused(peer, reason, detail)
            case Captured():
                return self._on_captured()
            case Verified(peer=peer):
                return self._advance(peer, Input.VERIFIED) + self._settle()
            case Confirmed(peer=peer, members=members):
                effects = self._advance(peer, Input.CONFIRMED)
                self._members[peer].confirmed = members
                return effects + self._conclude()
            case Lost(peer=peer, reason=reason):
                return self._on_lost(peer, reason)
            case GatheringClosed():
                return self._on_gathering_closed()
            case DeadlinePassed():
                return self._on_deadline()
            case GaveUp(reason=reason):
                return self._end(reason)

    # GATHERING

    def _dial_next(self) -> list[Effect]:
        while self._next < len(self.candidates):
            peer = self.candidates[self._next]
            self._next += 1
            if peer not in self._members:
                self._members[peer] = _Member(State.OFFERED)
                return [Dial(peer=peer)]
        return self._close_gathering()

    def _dial_all(self) -> list[Effect]:
        room = self.group - 1 - len(self._members)
        peers = [peer for peer in self.candidates if peer not in self._members][:room]
        self._members.update({peer: _Member(State.OFFERED) for peer in peers})
        return [Dial(peer=peer) for peer in peers] or self._gather()

    def _gather(self) -> list[Effect]:
        if any(m.state is State.OFFERED for m in self._members.values()):
            return []
        if self.group == 2 and not self.partners:
            return self._dial_next()
        return self._close_gathering()

    def _close_gathering(self) -> list[Effect]:
        if not self.partners:
            return self._end(_no_partner(self.refusals))
        self.stage = Stage.CAPTURING
        return [Capture()]

    def _on_accepted(self, event: Accepted) -> list[Effect]:
        peer, member = event.peer, self._members.get(event.peer)
        if peer in self.partners or (not event.called_us and (member is None or member.state is State.REFUSED)):
            raise ProtocolViolation(f"{peer} has accepted a call that is not open.")
        if event.called_us and self.has_room_for(peer):
            member = self._members[peer] = _Member(State.OFFERED)
        if self.stage is not Stage.GATHERING or member is None or member.state is not State.OFFERED:
            return [Abandon(peer=peer, reason="the exchange has begun without you")]
        effects = self._advance(peer, Input.ACCEPTED)
        member.offer = event.offer
        return effects + self._gather()

    def _on_refused(self, peer: str, reason: Refusal, detail: str) -> list[Effect]:
        if reason is Refusal.CROSSED and wins_crossing(peer, self.me):
            return []  # Their own call is on its way to us; until it comes the member counts as called.
        effects = self._advance(peer, Input.REFUSED)
        self._members[peer].reason = self._members[peer].reason or detail
        return effects + (self._gather() if self.stage is Stage.GATHERING else [])

    def _on_gathering_closed(self) -> list[Effect]:
        if self.stage is not Stage.GATHERING:
            return []
        effects = self._lose_all(State.OFFERED, reason="did not answer in time")
        return effects + self._close_gathering()

    # CAPTURING, TRADING

    def _on_captured(self) -> list[Effect]:
        if self.stage is not Stage.CAPTURING:
            raise ProtocolViolation(f"A capture is not expected while {self.stage.value}.")
        self.stage = Stage.TRADING
        effects: list[Effect] = []
        for peer in self.partners:
            effects += self._advance(peer, Input.CAPTURED)
        return effects + self._settle()

    def _settle(self) -> list[Effect]:
        if self.stage is not Stage.TRADING:
            return []
        if any(m.state in (State.STREAMING, State.PROMISED) for m in self._members.values()):
            return []
        if not self._holders():
            return self._end(_no_partner(self.refusals))
        self.stage = Stage.CONFIRMING
        effects: list[Effect] = []
        for peer in self._holders():
            effects += self._advance(peer, Input.SETTLED)
        return effects + self._conclude()

    # CONFIRMING

    def _conclude(self) -> list[Effect]:
        if self.stage is not Stage.CONFIRMING:
            return []
        members = self._all_members()
        holders = [self._members[peer] for peer in self._holders()]
        if any(m.confirmed is not None and m.confirmed != members_digest(members) for m in holders):
            # Whoever told us otherwise told it to all, so nobody can have applied our members: no doubt is left.
            return self._end("the members do not hold the same contributions", in_doubt=False)
        if any(m.state is not State.DONE for m in holders):
            return []
        self.stage = Stage.APPLIED
        return [Apply(members=members, swarm_step=max(m.offer.swarm_step for m in holders if m.offer))]

    # any stage

    def _on_lost(self, peer: str, reason: str) -> list[Effect]:
        member = self._members.get(peer)
        if member is None or member.state in TERMINAL:
            return []
        member.reason = reason = reason or "was lost"
        member.state = step(member.state, Input.FAILED)[1]
        if self.stage is Stage.CONFIRMING:
            return self._end(f"{reason} before everybody had confirmed")
        if self.stage is Stage.GATHERING:
            return self._gather()
        if not self.partners:
            return self._end(reason)
        return self._settle()

    def _on_deadline(self) -> list[Effect]:
        first, self._late = not self._late, True
        if self.stage is Stage.TRADING:
            effects = self._lose_all(State.STREAMING, State.PROMISED, reason="was too slow for the deadline")
            return effects + self._settle()
        if self.stage is Stage.CONFIRMING and first:
            return []  # The others' confirmations may be on their way: ending now would put both ends in doubt.
        return self._end("ran past its deadline")

    def _lose_all(self, *states: State, reason: str) -> list[Effect]:
        late = [peer for peer, m in self._members.items() if m.state in states]
        for peer in late:
            self._members[peer].reason = reason
            self._members[peer].state = step(self._members[peer].state, Input.FAILED)[1]
        return [Abandon(peer=peer, reason=reason) for peer in late]

    def _end(self, reason: str, in_doubt: bool = True) -> list[Effect]:
        self.in_doubt = in_doubt and self.stage is Stage.CONFIRMING
        self.stage, self.reason = Stage.ENDED, reason
        open_ = [peer for peer, m in self._members.items() if m.state not in _OUT]
        return [*(Abandon(peer=peer, reason=reason) for peer in open_), End(reason=reason)]

    def _advance(self, peer: str, event: Input) -> list[Effect]:
        member = self._members.get(peer)
        if member is None:
            raise ProtocolViolation(f"{peer}: {event.value!r} from a peer that has no part in this exchange.")
        if member.state is State.LOST:
            return []  # It was on its way when we gave the member up.
        outputs, member.state = step(member.state, event)
        return [self._send(peer, output) for output in outputs]

    def _send(self, peer: str, output: Output) -> Effect:
        if output is Output.SEND_CONTENT:
            return SendContent(peer=peer)
        return SendConfirm(peer=peer, members=members_digest(self._all_members()))

    def _holders(self) -> list[str]:
        return sorted(peer for peer, m in self._members.items() if m.state in HOLDING)

    def _all_members(self) -> tuple[str, ...]:
        return tuple(sorted([self.me, *self._holders()]))


_OUT = (State.REFUSED, State.LOST)


def _no_partner(refusals: dict[str, str]) -> str:
    if not refusals:
        return "no partner: nobody else is training"
    told = "; ".join(f"{peer[-6:]} {reason}" for peer, reason in list(refusals.items())[:4])
    more = f"; and {len(refusals) - 4} more" if len(refusals) > 4 else ""
    return f"no partner: {told}{more}"
