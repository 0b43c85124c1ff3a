"""The table of all events, by their names in the log, in ``join --json`` and in the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowcomm_node.fetch.records import StateAdopted
from lowcomm_node.net.congestion import CongestionChanged
from lowcomm_node.node.messages import (
    Evaluated,
    Failed,
    Finished,
    MicroBatch,
    NotSaved,
    Saved,
    Skipped,
    Stepped,
)
from lowcomm_node.status.model import Contribution, Limits
from lowcomm_node.status.wire import read
from lowcomm_node.swarm.records import (
    AddressesChanged,
    EntryPointAnswers,
    EntryPointSilent,
    SwarmConnected,
    SwarmLooking,
    SwarmLost,
    SwarmUnlisted,
)
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.events import Event


@dataclass(frozen=True, kw_only=True)
class PhaseEntered(Event):
    """The node is in another phase."""

    wire_name: ClassVar[str] = "phase"
    phase: str
    """As `phase` in `status`."""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something that the owner should know."""

    wire_name: ClassVar[str] = "warning"
    text: str
    """A sentence."""
    code: str = ""
    """Its code in docs/messages.md."""


@dataclass(frozen=True, kw_only=True)
class LimitsChanged(Event, Limits):
    """The owner has changed the limits on traffic."""

    wire_name: ClassVar[str] = "limits"


@dataclass(frozen=True, kw_only=True)
class RunAmended(Event):
    """The creator has changed the run."""

    wire_name: ClassVar[str] = "amended"
    text: str
    """The amendment in words."""
    number: int
    """Its place in the chain, from 1."""
    at: int
    """Swarm step from which it holds."""
    settings: Mapping[str, Any]
    """What it changes, by the names of the specification."""


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """The node stops training, by its owner's will."""

    wire_name: ClassVar[str] = "paused"
    rule: str
    """What the owner set: `owner` (the command), `schedule`, `in-use` or `battery`."""
    reason: str
    """The same in words."""
    until: float | None
    """When it ends (Unix seconds); null if that is not known."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The node goes on training."""

    wire_name: ClassVar[str] = "resumed"


@dataclass(frozen=True, kw_only=True)
class SavingAgain(Event):
    """Checkpoints can be saved again."""

    wire_name: ClassVar[str] = "saving-again"


@dataclass(frozen=True, kw_only=True)
class Contributed(Event, Contribution):
    """The last event of a node: what it has given to the run."""

    wire_name: ClassVar[str] = "contributed"


@dataclass(frozen=True, kw_only=True)
class OtherEvent(Event):
    """An event that this release does not know."""

    wire_name: ClassVar[str] = "other"
    told: Mapping[str, Any]
    """The event as JSON, with its name."""

    @property
    def name(self) -> str:
        """The name that the node gave it."""
        return str(self.told["event"])

    def to_json(self) -> dict[str, Any]:
        """As it came."""
        return dict(self.told)


KINDS: tuple[type[Event], ...] = (
    PhaseEntered,
    Warned,
    SwarmLooking,
    SwarmConnected,
    SwarmLost,
    SwarmUnlisted,
    EntryPointAnswers,
    EntryPointSilent,
    AddressesChanged,
    CongestionChanged,
    StateAdopted,
    Stepped,
    Skipped,
    MicroBatch,
    Evaluated,
    Saved,
    NotSaved,
    SavingAgain,
    Failed,
    ExchangeEnded,
    RunAmended,
    LimitsChanged,
    Paused,
    Resumed,
    Finished,
    Contributed,
)
EVENTS = {name: kind for kind in KINDS for name in kind.names()}


@dataclass(frozen=True)
class Notice:
    """An event, and when it happened."""

    time: float
    """Unix seconds."""
    event: Event

    def to_json(self) -> dict[str, Any]:
        """One line of ``join --json`` and of the API."""
        return {"time": self.time, **self.event.to_json()}


def read_notice(told: Mapping[str, Any]) -> Notice:
    """A notice from its JSON; also of an event that only a newer node knows. Raises Unhealthy."""
    time, name = read(float, told.get("time")), read(str, told.get("event"))
    kind = EVENTS.get(name)
    if kind is None:
        rest = {key: value for key, value in told.items() if key != "time"}
        return Notice(time, OtherEvent(told=rest))
    return Notice(time, read(kind, told))


def details(event: Event) -> dict[str, Any]:
    """What an event tells beside its name and its time."""
    return {key: value for key, value in event.to_json().items() if key not in ("event", "time")}
