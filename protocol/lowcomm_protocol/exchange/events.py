"""What goes into the machine of a peer (events), and what it has its driver do (effects).

One flat list of each. What belongs to an exchange has the number of that exchange in ``exchange``;
the machines of a single exchange (``pair.py``, ``group.py``) ignore it, and the peer fills it in. A
`MemberMessage` is both: as an effect it is to be sent to ``peer``, as an event ``peer`` has sent
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self, dataclass_transform

from lowcomm_protocol.errors import Offence
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.plan import FragmentProgress


class PeerView(Protocol):
    """What a peer may look up while it decides. It reads, and changes nothing."""

    def partners(self) -> Sequence[str]:
        """The peers that train, are alive, and answer offers."""
        ...

    def training(self) -> Sequence[tuple[str, int]]:
        """The peers that are alive and train, each with the swarm step that its record claims."""
        ...

    def furthest(self, but: str) -> int:
        """The highest swarm step that any live peer but ``but`` claims; 0 where there is none."""
        ...

    def knows(self, peer: str) -> bool:
        """Whether a valid record of this peer is held, and it may take part."""
        ...

    def sharing(self) -> int:
        """How many transfers besides exchanges share our line."""
        ...

    def has_room_for(self, place: str, callers: Sequence[str], free: int) -> bool:
        """Whether a call from ``place`` may begin an exchange beside those of ``callers``: no
        address takes all."""
        ...

    def transfer_seconds(self, size: int, streams: int) -> float:
        """Seconds that ``size`` bytes take at our owner's limits while ``streams`` share the
        line."""
        ...


class Outcome(StrEnum):
    """How an exchange ended."""

    APPLIED = "applied"
    NO_PARTNER = "no-partner"
    FAILED = "failed"


class Stage(StrEnum):
    """Where an exchange stands; not every kind of exchange has every stage."""

    GATHERING = "gathering"
    AGREEING = "agreeing"  # groups: on the list of members
    CAPTURING = "capturing"
    TRADING = "trading"  # pairs
    REDUCING = "reducing"  # groups: contributions travel, to the owner of each shard
    AVERAGING = "averaging"  # groups: means are made and travel, from the owner of each shard
    CONFIRMING = "confirming"
    COMMITTING = "committing"  # groups: members say which shards they would apply
    APPLIED = "applied"
    ENDED = "ended"


class Cause(StrEnum):
    """Why an exchange was not applied, or a peer takes no part in it, unless a ``Refusal`` says
    it."""

    NOBODY = "nobody-training"
    NO_PARTNER = "no-partner"  # those that were called do not take part, for different reasons
    UNANSWERED = "unanswered"
    LOST = "lost"
    GAVE_UP = "gave-up"  # the peer said that it gives up
    GAVE_WAY = "gave-way"  # it took longer than usual, and one of our own was due
    LATE = "late"
    UNUSABLE = "unusable"
    VIOLATED = "violated"
    DISAGREED = "disagreed"
    MINORITY = "minority"  # most of the group are there and take no part now
    STOPPED = "stopped"  # the node leaves, pauses, or goes on without its trainer
    REMOVED = "removed"
    OWN_FAULT = "own-fault"


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Record:
    def __init_subclass__(cls) -> None:
        # Type checks keep them frozen. At run time that would take half of what an event costs.
        dataclass(kw_only=True, unsafe_hash=True)(cls)

    def of(self, **changed: Any) -> Self:
        """A copy with other values of some fields; `dataclasses.replace` takes six times as long,
        and a machine makes several copies for each event."""
        copy = object.__new__(type(self))
        copy.__dict__ |= self.__dict__ | changed
        return copy


class PeerEvent(_Record):
    """Something that happened."""

    exchange: int = 0
    """Number of the exchange that it belongs to; 0: none, or all."""


class Effect(_Record):
    """Something to do."""

    exchange: int = 0


class MemberMessage(PeerEvent, Effect):
    """What members of an exchange send each other. As an event it was checked: contents are whole
    and decode to what is allowed. Events keep the order in which a member sent them."""

    peer: str
    """Whom it goes to, or who sent it."""


# Events of the peer


class TrainerReady(PeerEvent):
    """The trainer has built, resumed or adopted its state."""

    plan: str
    """Digest of the fragment plan."""
    sizes: tuple[tuple[int, int], ...]
    """Fewest and most coded bytes of each fragment."""
    realign_sizes: tuple[int, ...]
    """Bytes of each fragment in a realignment (fp32)."""
    exchanges: int
    """How many exchanges may hold memory at once."""
    swarm_step: int
    steps: int
    tokens: int
    progress: tuple[FragmentProgress, ...]
    slow_digests: tuple[bytes, ...]
    """SHA-256 of each fragment's slow weights."""
    momentum_digests: tuple[bytes, ...]


class Stepped(PeerEvent):
    """The trainer has taken one inner step."""

    swarm_step: int
    steps: int
    tokens: int
    seconds: float = 0.0


class Opened(PeerEvent):
    """Exchanges may begin: we train, and are not leaving."""


class Closed(PeerEvent):
    """No exchange begins any more; those under way go on."""


class Called(PeerEvent):
    """An authenticated peer has called us with an offer."""

    call: int
    """Number of the call, which the driver gives it."""
    peer: str
    offer: Offer
    place: str = ""
    """The network address that it called from."""


class CallDropped(PeerEvent):
    """A peer has dropped its call before it was answered."""

    call: int


class Misbehaved(PeerEvent):
    """A peer did something outside an exchange that is held against it."""

    peer: str
    deed: Offence
    reason: str


class StateCopied(PeerEvent):
    """The state of others was copied, because we had drifted; it took ``seconds``."""

    seconds: float


class DriftEndured(PeerEvent):
    """Nobody could hand over a state: we train on as we are."""


class Tick(PeerEvent):
    """The time of ``Peer.next_timer`` has come."""


# Events of an exchange


class Accepted(PeerEvent):
    """A peer that we called accepted, or one that called us was accepted (``called_us``)."""

    peer: str
    offer: Offer
    called_us: bool = False


class Refused(PeerEvent):
    """A peer that we called refused."""

    peer: str
    reason: Refusal


class Crossed(PeerEvent):
    """A peer called us while our own call to it was open; it was answered that ours goes on."""

    peer: str


class Knocked(PeerEvent):
    """The peer that we would meet first calls us while our call to another is open. Its call waits
    for that one's answer."""

    peer: str


class WentAway(PeerEvent):
    """A peer whose call waited has dropped it."""

    peer: str


class GatheringClosed(PeerEvent):
    """Time is up for candidates that have not answered."""


class Equal(PeerEvent):
    """All must hold the same slow weights. With ``least``, that many members must take part, and
    more than are there and do not: parts of a group could not hand over different outer steps."""

    least: int | None = None


class AgreeingClosed(PeerEvent):
    """Time is up for members that hold up a group; comes every few seconds after gathering has
    closed. At the end it is up for members that do not commit, where the other votes decide."""


class Captured(PeerEvent):
    """Our contribution is coded and can be sent."""


class Missed(PeerEvent):
    """Members lack outer steps that most have taken (`underway.Lacking`)."""

    receivers: tuple[str, ...] = ()
    """Members that we hand them over to."""
    donor: str = ""
    """The member that hands them over to us; empty where we lack none."""
    stranded: bool = False
    """Whether we lack steps that nobody can hand over."""


class Coming(PeerEvent):
    """The contribution of a peer comes slowly."""

    peer: str
    seconds: float
    """From the beginning of the exchange until it is whole, at the pace so far, with slack."""


class ContentCame(PeerEvent):
    """The contribution of a peer has arrived whole; it is not decoded yet."""

    peer: str
    line: float | None = None
    """Seconds that contents took one way; None if that can't be known."""


class Unused(PeerEvent):
    """What a member of a group brought can't be used. The exchange goes on with it, but without
    its contribution."""

    peer: str
    reason: str
    deed: Offence | None


class ReduceClosed(PeerEvent):
    """Time is up for contributions to our shard; a member whose contribution is missing takes part
    all the same."""


class Reduced(PeerEvent):
    """The mean of our shard is coded and can be sent."""

    digest: bytes


class ConfirmingClosed(PeerEvent):
    """Time is up for `Holdings`; comes between the two ``DeadlinePassed``."""


class DeadlinePassed(PeerEvent):
    """Time is up: the first time for contributions, the second time for confirmations too."""


class Lost(PeerEvent):
    """Nothing can come from a peer any more."""

    peer: str
    reason: str
    cause: Cause | Refusal = Cause.LOST
    deed: Offence | None = None
    """What it did that no honest peer does."""
    broke: bool = False
    """Whether its stream broke off or ended before its time."""
    stands: bool = False
    """Whether its stream still stands, so that the reason can be sent to it."""


class GaveUp(PeerEvent):
    """An exchange, or all of them, can't go on: the trainer failed, or the node leaves."""

    reason: str
    cause: Cause = Cause.STOPPED


class Measured(_Record):
    """What an exchange needed here, known when it is over."""

    work: float = 0.0
    """Seconds that the trainer took for it, waiting for the end of a step included."""
    rate: float | None = None
    """Bytes a second of the slowest content; None if that can't be known."""
    line: float | None = None
    """Seconds that contents took one way, or would have taken; None if that can't be known."""
    share: float | None = None
    """Bytes that went one way, in those that the fragment has at most; None if not all went."""


class Merged(PeerEvent):
    """The outer step of an exchange is merged into the weights."""

    swarm_step: int
    steps: int
    """Own inner steps when the contribution was captured."""
    tokens: int
    slow_digest: bytes
    momentum_digest: bytes
    measured: Measured = Measured()
    detail: str = ""
    """What is special about it."""


class Dropped(PeerEvent):
    """The contribution to an exchange that has ended is dropped."""

    reason: str
    measured: Measured = Measured()


class Released(PeerEvent):
    """The memory of an exchange that is over is free again."""


# Messages between members


class WholeContribution(MemberMessage):
    """A contribution to a pair."""


class Confirm(MemberMessage):
    """Whose contributions the sender holds, as ``pair.members_digest`` has it."""

    members: bytes


class Roll(MemberMessage):
    """The peers that the sender holds a stream with, sorted, itself included."""

    roll: tuple[str, ...]


class Members(MemberMessage):
    """A list of members that the sender names."""

    members: tuple[str, ...]


class MissedSteps(MemberMessage):
    """The outer steps that the receiver lacks."""


class Shard(MemberMessage):
    """A contribution to the shard that the receiver owns."""


class ShardMean(MemberMessage):
    """The mean of the shard that the sender owns."""

    digest: bytes


class Holdings(MemberMessage):
    """The means that the sender holds: a digest for each member, empty where it holds none."""

    held: tuple[bytes, ...]


class Commit(MemberMessage):
    """Which shards the sender would apply, and whose `Holdings` it knows, by member."""

    shards: tuple[bool, ...]
    heard: tuple[bool, ...]


# Effects: calls


class Accept(Effect):
    """Answer a call: the exchange goes on over its stream."""

    call: int
    peer: str
    offer: Offer


class Refuse(Effect):
    """Answer a call: no."""

    call: int
    peer: str
    reason: Refusal


class Dial(Effect):
    """Call a candidate with our offer."""

    peer: str


class CancelCall(Effect):
    """Drop our own call to a peer: its call crossed ours, and goes on."""

    peer: str


class Unanswered(Effect):
    """A peer has not answered our offer in time."""

    peer: str


# Effects: an exchange


class Began(Effect):
    """An exchange has begun: it needs memory. Comes before all its other effects."""


class Admit(Effect):
    """Accept the call of a peer that waits."""

    peer: str


class Capture(Effect):
    """Capture and code our contribution to an exchange of these members, at the next step
    boundary."""

    members: tuple[str, ...]
    """Sorted, our own id included."""


class Abandon(Effect):
    """Close a member's stream and tell it the reason."""

    peer: str
    reason: str


class CutOff(Effect):
    """A peer is lost to an exchange: cancel its stream, or it would wait for us."""

    peer: str
    reason: str
    tells: bool = False
    """Whether to tell it the reason first: to one that hears nothing our line looks broken."""
    cause: Cause | Refusal = Cause.LOST


class Reduce(Effect):
    """Average our shard over these members' contributions, our own included."""

    contributors: tuple[str, ...]


class RanLate(Effect):
    """An exchange has reached its deadline unfinished."""


class Stumbled(Effect):
    """A member has left out what the others agree on."""

    peer: str
    reason: str


class Apply(Effect):
    """Take the outer step over the contributions of these members, in this order, our own
    included."""

    members: tuple[str, ...]
    swarm_step: int
    shards: tuple[bool, ...] = ()
    """In groups: which shards are applied, one for each member; a pair applies the whole
    fragment."""


class End(Effect):
    """Nothing is applied, for this reason."""

    reason: str


class Over(Effect):
    """An exchange is over, and no longer under way."""

    outcome: Outcome
    reason: str


# Effects: the peer


class Penalty(Effect):
    """An offence is held against a peer."""

    peer: str
    deed: Offence
    reason: str
    score: float
    """Of the peer from now on; 1.0 while a stumble is forgiven."""
    forgiven: bool = False


class Drifted(Effect):
    """We are too far from most peers for exchanges to bring us back: copy their state."""
