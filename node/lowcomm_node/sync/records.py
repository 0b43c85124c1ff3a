"""What is told of exchanges: while they run, and when they have ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from lowcomm_node.system.events import Event
from lowcomm_protocol.exchange.events import Outcome


@dataclass(frozen=True, kw_only=True)
class ExchangeStatus:
    """An exchange under way."""

    fragment: int
    """Which fragment is exchanged."""
    round: int
    """Number of the exchange of this fragment, the same at all members."""
    stage: str
    """The stage that it has reached."""
    partners: tuple[str, ...]
    """Peer ids of the other members, as far as they are known."""
    bytes_sent: int
    """Bytes of contents that this node has sent."""
    bytes_received: int
    """Bytes of contents that this node has received."""
    bytes_expected: int
    """Bytes that both directions will carry, as far as that is known."""
    seconds: float
    """Seconds since it began."""


class IntervalCause(StrEnum):
    """What makes exchanges rarer than the run says."""

    LINE = "line"
    PARTNER = "partner"
    BUDGET = "budget"
    FAILED = "failed"
    EXCHANGE = "exchange"


@dataclass(frozen=True, kw_only=True)
class IntervalStatus:
    """How often a fragment is exchanged."""

    written: int
    """Swarm steps between two exchanges of a fragment, as the run says."""
    effective: float | None = None
    """The same as the last exchanges went; null until three were applied."""
    cause: IntervalCause | None = None
    """The cause of a longer interval: the line, missing partners, the owner's budget, failed
    exchanges, or the length of an exchange; null where it is no longer."""
    reason: str = ""
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class ExchangeEnded(Event):
    """An exchange has ended."""

    wire_name: ClassVar[str] = "exchange"
    time: float
    """When it ended (Unix seconds)."""
    fragment: int
    """Which fragment was exchanged."""
    round: int
    """Number of the exchange of this fragment, the same at all members."""
    outcome: Outcome
    """How it ended."""
    reason: str
    """Why it was not applied, or what was special about it; empty where there is nothing to
    tell."""
    code: str | None = None
    """The code of that in docs/trouble.md; null where it was applied."""
    partners: tuple[str, ...]
    """Peer ids of the other members."""
    in_doubt: bool = False
    """Whether the last word was lost, so that another member may have applied what we have not."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that refused or were lost, by peer id, each with the reason."""
    left_out_codes: Mapping[str, str] = field(default_factory=dict)
    """The codes of these in docs/trouble.md."""
    swarm_step: int
    """Swarm step at which it ended."""
    bytes_sent: int
    """Bytes of contents that this node sent."""
    bytes_received: int
    """Bytes of contents that this node received."""
    seconds: float
    """Seconds that it took."""
    worst_block: float | None = None
    """Spread of the contributions in the block of 256 values where it was largest; null unless it
    was applied."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each stage took: of our trainer where it was applied, of our line always. Stages
    overlap, so their sum is not that of the exchange."""

    moments: Mapping[str, float] = field(default_factory=dict)
    """Seconds from its beginning until the members were known (`met`), our contribution was
    `captured` and `sent`, those of the others were `received` and `decoded`, and all had confirmed
    (`decided`), as far as it came."""
    id: str = ""
    """The same at all members, 32 hexadecimal digits: of run, fragment, round and members; empty
    where they were not known."""

    @property
    def name(self) -> str:
        """Such as ``exchange.applied``."""
        return f"{self.wire_name}.{self.outcome}"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """One for each outcome."""
        return tuple(f"{cls.wire_name}.{outcome}" for outcome in Outcome)
