"""Events of a node, by their names in the log, in ``join --json`` and in the API, and the board
that hands them to all that listen.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from time import monotonic, time
from typing import Any

from lowcomm_node.catalogue import Waiting
from lowcomm_node.fetch import StateAdopted
from lowcomm_node.node import messages
from lowcomm_node.node.messages import Evaluated, InnerStepTaken, Saved, StepFigures, Tokenizing
from lowcomm_node.owner.rules import Hold
from lowcomm_node.status.model import AmendmentText, CheckpointStatus, Limits, Progress, read
from lowcomm_node.swarm import standing
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.logs import Event, log


class PhaseEntered(Event, name="phase"):
    """The node is in another phase."""

    phase: str
    """As `phase` in `status`."""


class Warned(Event, name="warning"):
    """Something that the owner should know."""

    text: str
    """A sentence."""
    code: str = ""
    """Its code in the catalogue."""


class LimitsChanged(Event, Limits, name="limits"):
    """The owner has changed the limits on traffic."""


class RunAmended(Event, AmendmentText, name="amended"):
    """The creator has changed the run."""


class Paused(Event, Hold, name="paused"):
    """The node stops training, by its owner's will."""


class Resumed(Event, name="resumed"):
    """The node goes on training."""


class SavingAgain(Event, name="saving-again"):
    """Checkpoints can be saved again."""


class PieceSkipped(Event, name="piece-skipped"):
    """Nobody gave a piece of packed text, so this node reads others."""

    text: str
    """Name of the part."""
    epoch: int
    piece: int


class Contributed(Event, name="contributed"):
    """The last event of a node: what it has given to the run, and where its model lies."""

    steps: int
    """Inner steps of this node, from the beginning of the run."""
    tokens: int
    """Tokens that it has trained on, from the beginning of the run."""
    exchanges: int
    """Exchanges that were applied since this start."""
    bytes_sent: int
    """Bytes of contents sent since this start."""
    checkpoint: str | None
    """Folder of the newest checkpoint; null if there is none."""


class OtherEvent(Event, name="other"):
    """An event that this release does not know."""

    content: Mapping[str, Any]
    """The event as JSON, with its name."""

    @property
    def name(self) -> str:
        """The name that the node gave it."""
        return str(self.content["event"])

    def to_json(self) -> dict[str, Any]:
        """As it came."""
        return {**self.content}


KINDS: tuple[type[Event], ...] = (
    PhaseEntered, Warned, standing.SwarmConnected, standing.SwarmLost, standing.SwarmUnlisted,
    standing.EntryPointAnswers, standing.EntryPointSilent, standing.AddressesChanged,
    StateAdopted, messages.Skipped, messages.MicroBatch,
    Evaluated, Saved, messages.NotSaved, SavingAgain, messages.TrainerFailed, ExchangeEnded,
    RunAmended, PieceSkipped, LimitsChanged, Paused, Resumed, messages.Finished, Contributed,
)  # fmt: skip
EVENTS = {name: kind for kind in KINDS for name in kind.names()}


@dataclass(frozen=True)
class Notice:
    """An event, and when it happened."""

    time: float
    """Unix seconds."""
    event: Event
    number: int = field(default=0, compare=False)
    """Its place in the journal, which grows with every notice; 0 for none."""

    def to_json(self) -> dict[str, Any]:
        """One line of ``join --json`` and of the API."""
        return {"time": self.time, **self.event.to_json()}


def read_notice(content: Mapping[str, Any], number: int = 0) -> Notice:
    """A notice from its JSON; also of an event that only a newer node knows. Raises Unhealthy."""
    time, name = read(float, content.get("time")), read(str, content.get("event"))
    kind = EVENTS.get(name)
    if kind is None:
        rest = {key: value for key, value in content.items() if key != "time"}
        return Notice(time, OtherEvent(content=rest), number)
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    known_content = {key: one for key, one in content.items() if key in known}
    return Notice(time, read(kind, known_content), number)


def details(event: Event) -> dict[str, Any]:
    """The fields of an event beside its name and its time."""
    return {key: value for key, value in event.to_json().items() if key not in ("event", "time")}


MAX_WAITING = 1000
MAX_WARNINGS = 20


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
        self.warnings: list[Warned] = []
        """The last ones, the newest last."""
        self.queues = set[asyncio.Queue[Notice]]()
        """Of those that listen: each removes its own."""

    def subscribe(self, most: int = MAX_WAITING) -> asyncio.Queue[Notice]:
        """A queue of up to ``most`` events from now on; inner steps are none of them."""
        queue: asyncio.Queue[Notice] = asyncio.Queue(most)
        self.queues.add(queue)
        return queue

    def enter(self, phase: str, waiting: Waiting | None) -> None:
        """Enter a phase, and show what the node waits for in it."""
        self.show(waiting)
        if phase != self.phase:
            self.phase = phase
            self.changed = monotonic()
            self.tell(PhaseEntered(phase=phase))

    def show(self, waiting: Waiting | None) -> None:
        """Show what the node waits for; None for nothing."""
        if waiting != self.waiting:
            self.waiting = waiting
            self.changed = monotonic()

    def showing(self, code: str) -> Callable[[str | None], None]:
        """For a room that waits for one thing only: takes its sentence, or None."""
        return lambda text: self.show(None if text is None else Waiting(code, text))

    def warn(self, code: str, text: str) -> None:
        """Report something that the owner should know."""
        warned = Warned(text=text, code=code)
        self.warnings = [*self.warnings, warned][-MAX_WARNINGS:]
        self.tell(warned)

    def warning(self, code: str) -> Callable[[str], None]:
        """For a room that warns of one thing only: takes its sentence."""
        return partial(self.warn, code)

    def withdraw(self, code: str) -> None:
        """Drop warnings that hold no longer."""
        self.warnings = [one for one in self.warnings if one.code != code]

    def tell(self, event: Event) -> None:
        """Take in an event, log it, and hand it to all that listen; of inner steps the figures."""
        if isinstance(event, InnerStepTaken):
            self.advance(**{one.name: getattr(event, one.name) for one in fields(StepFigures)})
            return
        if isinstance(event, Evaluated) and event.loss is not None:
            first = self.progress.val_loss_first
            first = event.loss if first is None else first
            self.advance(val_loss_first=first, val_loss_last=event.loss)
        elif isinstance(event, Saved):
            self.checkpoint = CheckpointStatus(step=event.swarm_step, path=event.path)
        notice = Notice(time(), event)
        for queue in self.queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(notice)
        log.info(event.name, **details(event))

    def advance(self, **figures: Any) -> None:
        """Take in newer figures of ``Progress``."""
        self.progress = replace(self.progress, **figures)

    def position(self) -> tuple[int, int, float]:
        """Swarm step, own steps and tokens a second, as the own record has them."""
        now = self.progress
        return now.swarm_step or 0, now.steps or 0, now.tokens_per_second or 0.0
