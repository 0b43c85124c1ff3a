"""Events of a node, by their names in the log, in ``join --json`` and in the API, and the board
that hands them to all that listen."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from time import monotonic, time
from typing import Any, ClassVar

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.fetch.records import StateAdopted
from lowcomm_node.net.congestion import CongestionChanged
from lowcomm_node.node.messages import (
    Evaluated,
    Finished,
    InnerStepTaken,
    MicroBatch,
    NotSaved,
    Saved,
    Skipped,
    Tokenizing,
    TrainerFailed,
)
from lowcomm_node.status.model import CheckpointStatus, Contribution, Limits, Progress, read
from lowcomm_node.swarm.watchdog import (
    AddressesChanged,
    EntryPointAnswers,
    EntryPointSilent,
    SwarmConnected,
    SwarmLost,
    SwarmUnlisted,
)
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.logs import Event, log


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
    """Its code in the catalogue."""


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
    SwarmConnected,
    SwarmLost,
    SwarmUnlisted,
    EntryPointAnswers,
    EntryPointSilent,
    AddressesChanged,
    CongestionChanged,
    StateAdopted,
    InnerStepTaken,
    Skipped,
    MicroBatch,
    Evaluated,
    Saved,
    NotSaved,
    SavingAgain,
    TrainerFailed,
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
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return Notice(time, read(kind, {key: one for key, one in told.items() if key in known}))


def details(event: Event) -> dict[str, Any]:
    """What an event tells beside its name and its time."""
    return {key: value for key, value in event.to_json().items() if key not in ("event", "time")}


MAX_WAITING = 1000
MAX_WARNINGS = 20
_OF_A_STEP = {one.name for one in fields(Progress)} & {one.name for one in fields(InnerStepTaken)}


@dataclass(frozen=True)
class Caution:
    """Something that the owner should know, with its code."""

    code: WarningCode
    text: str


class Board:
    """``status`` reads it, and each subscriber gets every event.

    A subscriber that does not read loses the oldest; it never holds up the node.
    """

    def __init__(self) -> None:
        self.phase = "starting"
        self.waiting: Waiting | None = None
        """What it waits for; None if for nothing."""
        self.changed = monotonic()
        """When its phase, or what it waits for, changed last (monotonic seconds)."""
        self.progress = Progress()
        self.checkpoint: CheckpointStatus | None = None
        """The newest."""
        self.tokenizing: Tokenizing | None = None
        """While text is tokenized."""
        self.warnings: list[Caution] = []
        """The last ones, the newest last."""
        self._queues: dict[asyncio.Queue[Notice], bool] = {}

    def subscribe(self, every_step: bool = True) -> asyncio.Queue[Notice]:
        """A queue of events from now on; inner steps are left out unless ``every_step``."""
        queue: asyncio.Queue[Notice] = asyncio.Queue(MAX_WAITING)
        self._queues[queue] = every_step
        return queue

    def unsubscribe(self, queue: asyncio.Queue[Notice]) -> None:
        """Tell this queue no more."""
        self._queues.pop(queue, None)

    def enter(self, phase: str, waiting: Waiting | None) -> None:
        """Be in a phase from now on, and perhaps wait for something in it."""
        self.show(waiting)
        if phase != self.phase:
            self.phase = phase
            self.changed = monotonic()
            self.tell(PhaseEntered(phase=phase))

    def show(self, waiting: Waiting | None) -> None:
        """Wait for something else than before."""
        if waiting != self.waiting:
            self.waiting = waiting
            self.changed = monotonic()

    def showing(self, code: WaitCode) -> Callable[[str | None], None]:
        """For a room that waits for one thing only: takes its sentence, or None."""
        return lambda text: self.show(None if text is None else Waiting(code, text))

    def warn(self, code: WarningCode, text: str) -> None:
        """Something that the owner should know."""
        self.warnings = [*self.warnings, Caution(code, text)][-MAX_WARNINGS:]
        self.tell(Warned(text=text, code=code))

    def warning(self, code: WarningCode) -> Callable[[str], None]:
        """For a room that warns of one thing only: takes its sentence."""
        return partial(self.warn, code)

    def withdraw(self, code: WarningCode) -> None:
        """Warnings of this hold no longer."""
        self.warnings = [one for one in self.warnings if one.code is not code]

    def tell(self, event: Event) -> None:
        """An event: to the log, and to all that listen."""
        self._pass_on(event, self._queues)
        log.info(event.name, **details(event))

    def tell_step(self, event: Event) -> None:
        """An inner step: only to those that asked for every one."""
        self._pass_on(event, [queue for queue, every_step in self._queues.items() if every_step])

    def _pass_on(self, event: Event, queues: Iterable[asyncio.Queue[Notice]]) -> None:
        stamped = Notice(time(), event)
        for queue in queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(stamped)

    def advance(self, **figures: Any) -> None:
        """Take in newer figures of ``Progress``."""
        self.progress = replace(self.progress, **figures)

    def stepped(self, news: InnerStepTaken) -> None:
        """Take in what the trainer tells of an inner step."""
        self.advance(**{name: getattr(news, name) for name in _OF_A_STEP})

    def evaluated(self, loss: float) -> None:
        """Take in a loss on held-out text."""
        first = self.progress.val_loss_first
        self.advance(val_loss_first=loss if first is None else first, val_loss_last=loss)

    def position(self) -> tuple[int, int, float]:
        """Swarm step, own steps and tokens a second, as others are told."""
        now = self.progress
        return now.swarm_step or 0, now.steps or 0, now.tokens_per_second or 0.0
