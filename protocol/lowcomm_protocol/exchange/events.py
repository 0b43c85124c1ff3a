"""What goes into the machine of a peer (events), and what it has its driver do (effects).

Events and effects of a single exchange are in ``base.py`` and with its kind. They travel wrapped,
with the number of the exchange: `In` on the way in, `Do` on the way out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from lowcomm_protocol.errors import Offence
from lowcomm_protocol.exchange.base import Cause, Effect
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


# Events


@dataclass(frozen=True, kw_only=True)
class TrainerReady:
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


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The trainer has taken one inner step."""

    swarm_step: int
    steps: int
    tokens: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Opened:
    """From now on we exchange: we train, and are not leaving."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """From now on no exchange begins; those under way go on."""


@dataclass(frozen=True, kw_only=True)
class GaveUpAll:
    """All exchanges under way are given up."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Called:
    """An authenticated peer has called us with an offer."""

    call: int
    """Which call: the driver's number."""
    peer: str
    offer: Offer
    place: str = ""
    """The network address that it called from."""


@dataclass(frozen=True, kw_only=True)
class CallDropped:
    """A peer has dropped its call before it was answered."""

    call: int


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A peer that we called has accepted."""

    exchange: int
    peer: str
    offer: Offer


@dataclass(frozen=True, kw_only=True)
class OfferRefused:
    """A peer that we called has refused."""

    exchange: int
    peer: str
    reason: Refusal
    detail: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Nothing can come from a peer of an exchange any more."""

    exchange: int
    peer: str
    reason: str
    deed: Offence | None = None
    """What it did that no honest peer does."""
    broke: bool = False
    """Whether its stream broke off or ended before its time."""
    stands: bool = False
    """Whether its stream still stands, so that it can be told why."""
    cause: Cause | Refusal = Cause.LOST


@dataclass(frozen=True, kw_only=True)
class Unused:
    """What a member of a group brought can't be used. The exchange goes on with it, but without
    its contribution."""

    exchange: int
    peer: str
    reason: str
    deed: Offence | None


@dataclass(frozen=True, kw_only=True)
class Coming:
    """The contribution of a peer comes slowly."""

    exchange: int
    peer: str
    seconds: float
    """From the beginning of the exchange until it is whole, at the pace so far, with slack."""


@dataclass(frozen=True, kw_only=True)
class ContentCame:
    """The contribution of a peer has arrived whole; it is not decoded yet."""

    exchange: int
    peer: str
    line: float | None = None
    """Seconds that contents took one way; None if that can't be told."""


@dataclass(frozen=True, kw_only=True)
class In:
    """An event of one exchange, as its kind defines it."""

    exchange: int
    event: Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an exchange needed here, known when it is over."""

    work: float = 0.0
    """Seconds that the trainer took for it, waiting for the end of a step included."""
    rate: float | None = None
    """Bytes a second of the slowest content; None if that can't be told."""
    line: float | None = None
    """Seconds that contents took one way, or would have taken; None if that can't be told."""
    share: float | None = None
    """Bytes that went one way, in those that the fragment has at most; None if not all went."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The outer step of an exchange is merged into the weights."""

    exchange: int
    swarm_step: int
    steps: int
    """Own inner steps when the contribution was captured."""
    tokens: int
    slow_digest: bytes
    momentum_digest: bytes
    measured: Measured = Measured()
    detail: str = ""
    """What is to be told of it."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """The contribution to an exchange that has ended is dropped."""

    exchange: int
    reason: str
    measured: Measured = Measured()


@dataclass(frozen=True, kw_only=True)
class Released:
    """The memory of an exchange that is over is free again."""

    exchange: int


@dataclass(frozen=True, kw_only=True)
class Misbehaved:
    """A peer did something outside an exchange that is held against it."""

    peer: str
    deed: Offence
    reason: str


@dataclass(frozen=True, kw_only=True)
class StateCopied:
    """The state of others was copied, because we had drifted; it took so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class DriftEndured:
    """Nobody could hand over a state: we train on as we are."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The time of ``Peer.next_timer`` has come."""


Event = (
    TrainerReady
    | Stepped
    | Opened
    | Closed
    | GaveUpAll
    | Called
    | CallDropped
    | Answered
    | OfferRefused
    | Failed
    | Unused
    | Coming
    | ContentCame
    | In
    | Merged
    | Dropped
    | Released
    | Misbehaved
    | StateCopied
    | DriftEndured
    | Tick
)

# Effects


@dataclass(frozen=True, kw_only=True)
class Accept(Effect):
    """Answer a call: the exchange goes on over its stream."""

    exchange: int
    call: int
    peer: str
    offer: Offer


@dataclass(frozen=True, kw_only=True)
class Refuse(Effect):
    """Answer a call: no."""

    call: int
    peer: str
    reason: Refusal


@dataclass(frozen=True, kw_only=True)
class Began(Effect):
    """An exchange has begun: it needs memory. Comes before all its other effects."""

    exchange: int


@dataclass(frozen=True, kw_only=True)
class CancelCall(Effect):
    """Drop our own call to a peer: its call crossed ours, and goes on."""

    exchange: int
    peer: str


@dataclass(frozen=True, kw_only=True)
class Decline(Effect):
    """Tell a peer that has accepted why nothing comes of it, and end the stream."""

    exchange: int
    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CutOff(Effect):
    """A peer is lost to an exchange: cancel its stream, or it would wait for us."""

    exchange: int
    peer: str
    reason: str
    tells: bool = False
    """Whether to tell it why first: to one that hears nothing our line looks broken."""
    cause: Cause | Refusal = Cause.LOST


@dataclass(frozen=True, kw_only=True)
class Do(Effect):
    """An effect of one exchange, as its kind defines it."""

    exchange: int
    effect: Effect


@dataclass(frozen=True, kw_only=True)
class RanLate(Effect):
    """The deadline of an exchange passes now, and it is not over."""

    exchange: int


@dataclass(frozen=True, kw_only=True)
class Unanswered(Effect):
    """A peer has not answered our offer in time."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Penalty(Effect):
    """A deed is held against a peer."""

    peer: str
    deed: Offence
    reason: str
    score: float
    """Of the peer from now on; 1.0 while a stumble is forgiven."""
    forgiven: bool = False


@dataclass(frozen=True, kw_only=True)
class Over(Effect):
    """An exchange is over, and no longer under way."""

    exchange: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True, kw_only=True)
class Drifted(Effect):
    """We are too far from most peers for exchanges to bring us back: copy their state."""
