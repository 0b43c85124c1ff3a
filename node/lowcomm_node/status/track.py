"""Follows a journal into TensorBoard or Weights & Biases.

A sink gets every point once, in the order of time, and the position is kept beside the journal. So
a tracker may be stopped, killed or without a network: the next start goes on where the last one
ended. The node knows nothing of it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.status.journal import Journal, JournalEntry, Sample
from lowcomm_node.storage.files import disk_full_error, lock, read_small, write_atomic
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.command import install
from lowcomm_node.system.units import clean, short_peer
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import identity_from_libp2p
from lowcomm_protocol.spec.names import Table
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, read_signed_run

MOST = 500
"""Notices, and samples, of one batch."""
MAX_POSITION_BYTES = 64 * 1024
LOOK_EVERY = 2.0
"""Seconds between two looks at a journal."""
LONGEST_PAUSE = 60.0
"""Seconds until a sink that takes nothing is tried again, at most."""
INIT_DEADLINE = 60.0
"""Seconds for Weights & Biases to begin a run."""
LEFT_OUT = ("run.members", "run.creator", "version", "optional")
"""Settings that are no hyperparameters; the members of a list are other people's."""
LONGEST = 200
"""Characters of a setting that is a text or a list; the rest is cut."""
Result = TypeVar("Result")

# --- What is tracked ------------------------------------------------------------------------------

SWARM_STEP = "lowcomm_swarm_step"
TOKENS = "lowcomm_tokens_total"
TRAINING_LOSS = "lowcomm_loss_nats/training"
HELD_OUT = "lowcomm_loss_nats/held_out"
COMPUTING = "lowcomm_computing_seconds_total"
WAITED = "lowcomm_waited_seconds_total"
WAITING = "lowcomm_waiting_ratio"
WORST_BLOCK = "lowcomm_worst_block"
LOSSES = (TRAINING_LOSS, HELD_OUT)
"""Shown against tokens, too."""


@dataclass(frozen=True)
class TrackedSeries:
    """A column of samples, by the name of its metric; a label stands behind a slash."""

    name: str
    text: str
    column: str
    counts: bool = False
    """Whether it begins at 0 with each start of the node; trackers get the sum over all starts."""


SAMPLED: tuple[TrackedSeries, ...] = (
    TrackedSeries(SWARM_STEP, "Clock of the run.", "swarm_step"),
    TrackedSeries("lowcomm_steps_total", "Inner steps of this node.", "steps"),
    TrackedSeries(TOKENS, "Tokens that this node has trained on.", "tokens"),
    TrackedSeries("lowcomm_tokens_per_second", "Recent average.", "tokens_per_second"),
    TrackedSeries(TRAINING_LOSS, "Nats a token, of the last inner step.", "loss"),
    TrackedSeries("lowcomm_learning_rate", "Of the last inner step.", "learning_rate"),
    TrackedSeries(COMPUTING, "Seconds in inner steps.", "computing", True),
    TrackedSeries(WAITED, "Seconds between inner steps.", "waited", True),
    TrackedSeries("lowcomm_exchanges_total/applied", "Exchanges.", "completed", True),
    TrackedSeries("lowcomm_exchanges_total/failed", "Exchanges.", "failed", True),
    TrackedSeries(
        "lowcomm_exchanges_total/no_partner", "Exchanges without a peer.", "no_partner", True
    ),
    TrackedSeries(
        "lowcomm_exchanges_total/refused", "Offers refused by either end.", "refused", True
    ),
    TrackedSeries(
        "lowcomm_content_bytes_total/sent", "Of exchanges and states.", "bytes_sent", True
    ),
    TrackedSeries(
        "lowcomm_content_bytes_total/received", "Of exchanges and states.", "bytes_received", True
    ),
    TrackedSeries("lowcomm_peers/alive", "Other peers of the run.", "peers"),
    TrackedSeries("lowcomm_memory_bytes/taken", "Of trainer and daemon.", "memory"),
)
"""Of a sample, every ten seconds."""
OTHERS: dict[str, str] = {
    WAITING: "Share of the trainer's time since the previous point in which training waited; "
    "Prometheus divides the two counters instead.",
    HELD_OUT: "Nats a token, at each evaluation.",
    WORST_BLOCK: "Distance of the weights at a merge: spread of the contributions in the block of "
    "256 values where it was largest.",
}
_TELLING = ("swarm_step", "tokens", "loss", "completed", "failed", "bytes_sent", "bytes_received")
"""Columns that make a sample worth a point: a finished node that serves its state makes none."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run and the node that are followed."""

    run: str
    """Name of the run."""
    fingerprint: str
    peer_id: str
    node: str
    """Display name of the node."""
    settings: Mapping[str, str | int | float | bool]
    """Of the specification as it was signed, by names such as ``sync.method``."""
    step_tokens: int | None = None
    """Tokens of an inner step, where the specification is known."""


@dataclass(frozen=True, kw_only=True)
class TrackedPoint:
    """Figures of one moment."""

    time: float
    """Unix seconds."""
    number: int
    """Its place among all points of this node, from 0."""
    step: int
    """Swarm step."""
    tokens: int | None
    """Tokens that the node had trained on."""
    values: Mapping[str, float]
    """By name of the series."""


def tracked_of(home: Path, fingerprint: str, name: str = "") -> Tracked:
    """Describe the node and a run of a home; ``name``: display name of the node."""
    paths = Paths(home)
    signed, peer_id = None, ""
    try:
        if data := read_small(paths.signed_run(fingerprint), 2 * MAX_SPEC_BYTES):
            signed = read_signed_run(data, str(paths.signed_run(fingerprint)))
        if data := read_small(paths.identity, 4096):
            peer_id = identity_from_libp2p(data).peer_id
    except LowcommError:
        pass  # a home without them can be followed all the same
    return Tracked(
        run=signed.spec.run.name if signed else fingerprint,
        fingerprint=fingerprint,
        peer_id=peer_id or home.name,
        node=clean(name) or short_peer(peer_id) or home.name,
        settings=dict(settings_of(signed.spec.model_dump(mode="json"))) if signed else {},
        step_tokens=signed.spec.tokens_per_step if signed else None,
    )


def settings_of(
    settings: Mapping[str, Any], section: str = ""
) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield every setting by its full name, lists as texts."""
    for key, value in settings.items():
        name = f"{section}{key}"
        if name in LEFT_OUT or value is None:
            continue
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{name}.")
        else:
            plain = isinstance(value, bool | int | float)
            yield name, value if plain else clean(value)[:LONGEST]


# --- The position in a journal --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrackerPosition:
    """How far a sink is, and what the next point depends on."""

    notice: int = 0
    """Number of the last notice."""
    time: float = 0.0
    """Of the last sample (Unix seconds)."""
    newest: float = 0.0
    """Of the last notice (Unix seconds): a journal that began again counts from 1."""
    points: int = 0
    """Points so far."""
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each count the last value, and its sum over all starts."""
    seen: tuple[float | None, ...] = ()
    """Telling columns of the last sample, to leave out equal ones."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the sink needs to go on."""


class PositionFile:
    """File of the position of one sink and target, written whole after each delivery."""

    def __init__(self, folder: Path, sink: str, target: str) -> None:
        name = f"{sink}-{sha256(target.encode()).hexdigest()[:12]}"
        self._path = folder / f"{name}.json"
        self._lock = folder / f"{name}.lock"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which no other tracker writes to the same target. Raises RetryLater."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if not lock(descriptor, fcntl.LOCK_EX, wait=False):
                raise RetryLater(
                    f"Another `lowcomm-node track` writes from this home to the same place "
                    f"({self._lock} is held): end that one first, or name another place with --to."
                )
            yield
        finally:
            os.close(descriptor)

    def load(self) -> TrackerPosition:
        """Read it; the beginning if there is none. Raises ConfigError if it can't be read."""
        if not self._path.exists():
            return TrackerPosition()
        try:
            content = json.loads(read_small(self._path, MAX_POSITION_BYTES))
            counts = {
                name: (float(last), float(total))
                for name, (last, total) in content.pop("counts").items()
            }
            return TrackerPosition(counts=counts, seen=tuple(content.pop("seen")), **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} can't be read ({error}): remove it, and name a new place with --to, "
                "or what is there is written a second time."
            ) from None

    def save(self, position: TrackerPosition) -> None:
        """Keep it. Raises DiskFull."""
        write_atomic(self._path, json.dumps(asdict(position)).encode(), 0o600)


# --- From a journal to points ---------------------------------------------------------------------


def next_batch(
    journal: Journal, position: TrackerPosition, step_tokens: int | None = None
) -> tuple[list[TrackedPoint], TrackerPosition]:
    """Read what comes behind a position, and the position behind that.

    ``step_tokens``: tokens of an inner step, where that is known.
    """
    last = journal.last_notices(1)
    if position.notice <= (last[-1].number if last else 0):
        entries = journal.notices(position.notice, MOST)
    else:
        # The journal was damaged or removed, and the node has begun a new one, which counts from 1.
        entries = [one for one in journal.notices(0, MOST) if one.notice.time > position.newest]
        position = replace(position, notice=0) if last else position
    samples = journal.samples_after(position.time, MOST)
    entries, samples = _up_to_one_time(entries, samples)
    reading = _Reading(position, step_tokens)
    rows = [(one.notice.time, one) for one in entries] + [(one.time, one) for one in samples]
    for _, one in sorted(rows, key=lambda row: row[0]):
        if isinstance(one, Sample):
            reading.take_sample(one)
        else:
            reading.take_notice(one)
    return reading.points, reading.position


def _up_to_one_time(
    entries: Sequence[JournalEntry], samples: Sequence[Sample]
) -> tuple[Sequence[JournalEntry], Sequence[Sample]]:
    """Cut both at the same time if one is incomplete: its rest would come late in a later batch."""
    ends = [
        *([entries[-1].notice.time] if len(entries) == MOST else []),
        *([samples[-1].time] if len(samples) == MOST else []),
    ]
    if not ends:
        return entries, samples
    early = list(takewhile(lambda one: one.notice.time <= min(ends), entries))
    kept = [one for one in samples if one.time <= min(ends)]
    return (early, kept) if early or kept else (entries, samples)


class _Reading:
    """Makes points of rows of a journal."""

    def __init__(self, position: TrackerPosition, step_tokens: int | None) -> None:
        self.position = position
        self.points: list[TrackedPoint] = []
        self._step_tokens = step_tokens

    def take_notice(self, entry: JournalEntry) -> None:
        """Take in an evaluation or a merge."""
        time, event = entry.notice.time, entry.notice.event
        self.position = replace(self.position, notice=entry.number, newest=time)
        if isinstance(event, Evaluated) and event.loss is not None:
            tokens = event.steps * self._step_tokens if self._step_tokens else None
            self._add(time, event.swarm_step, tokens, {HELD_OUT: event.loss})
        elif isinstance(event, ExchangeEnded) and event.worst_block is not None:
            self._add(time, event.swarm_step, None, {WORST_BLOCK: event.worst_block})

    def take_sample(self, sample: Sample) -> None:
        """Take in figures; counts go on over all starts of the node."""
        before = self.position.counts
        counts, values = dict(before), dict[str, float]()
        for series in SAMPLED:
            value = getattr(sample, series.column)
            if value is not None and series.counts:
                last, total = counts.get(series.name, (0.0, 0.0))
                total += value - last if value >= last else value
                counts[series.name] = (float(value), total)
                value = total
            if value is not None:
                values[series.name] = float(value)
        waited, computing = (
            counts.get(name, (0.0, 0.0))[1] - before.get(name, (0.0, 0.0))[1]
            for name in (WAITED, COMPUTING)
        )
        if waited + computing > 0:
            values[WAITING] = waited / (waited + computing)
        seen = tuple(getattr(sample, column) for column in _TELLING)
        news = seen != self.position.seen
        self.position = replace(self.position, time=sample.time, counts=counts, seen=seen)
        if news and sample.swarm_step is not None:
            self._add(sample.time, sample.swarm_step, sample.tokens, values)

    def _add(self, time: float, step: int, tokens: int | None, values: Mapping[str, float]) -> None:
        number = self.position.points
        self.position = replace(self.position, points=number + 1)
        axes = {SWARM_STEP: float(step)} | ({} if tokens is None else {TOKENS: float(tokens)})
        point = TrackedPoint(
            time=time, number=number, step=step, tokens=tokens, values=axes | {**values}
        )
        self.points.append(point)


# --- Following ------------------------------------------------------------------------------------


class Sink(Protocol):
    """A program that takes points.

    Its class is made with the target that the owner names, or None, and raises ConfigError for an
    impossible target."""

    target: str
    """Where it writes, in words that hold no secret."""

    def open(self, tracked: Tracked, kept: Mapping[str, Any]) -> None:
        """Begin, or go on where ``kept`` was. Raises ConfigError, RetryLater."""
        ...

    def write(self, points: Sequence[TrackedPoint]) -> Mapping[str, Any]:
        """Deliver all; returns what to keep. Raises RetryLater if nothing may have arrived."""
        ...

    def close(self) -> None:
        """Wait until all is delivered."""
        ...


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How a tracker that stays waits, and warns."""

    sleep: Callable[[float], None]
    """Takes seconds."""
    warn: Callable[[str], None]
    """Tells the owner that something is late, or goes on again."""


class Tracker:
    """One journal and one sink."""

    def __init__(self, journal: Journal, sink: Sink, tracked: Tracked, file: PositionFile) -> None:
        self._journal = journal
        self._sink = sink
        self._tracked = tracked
        self._file = file
        self.points = 0
        """Points that the sink took."""

    def run(self, waits: Waits | None = None) -> None:
        """Deliver what the journal holds; with ``waits`` also what comes, until interrupted.

        Raises RetryLater if the sink takes nothing, and there is nothing to wait with; ConfigError,
        NodeError if the journal can't be read, DiskFull."""
        with self._file.held():
            position = self._file.load()
            self._patiently(lambda: self._sink.open(self._tracked, position.kept), waits)
            try:
                self._follow(position, waits)
            finally:
                self._sink.close()

    def _follow(self, position: TrackerPosition, waits: Waits | None) -> None:
        while True:
            points, behind = next_batch(self._journal, position, self._tracked.step_tokens)
            more = (behind.notice, behind.time) != (position.notice, position.time)
            if points:
                kept = self._patiently(lambda points=points: self._sink.write(points), waits)
                behind = replace(behind, kept=kept)
                self._file.save(behind)
                self.points += len(points)
            position = behind
            if not more and waits is None:
                return
            if not more and waits is not None:
                waits.sleep(LOOK_EVERY)

    def _patiently(self, work: Callable[[], Result], waits: Waits | None) -> Result:
        pause = LOOK_EVERY
        while True:
            try:
                done = work()
            except RetryLater as error:
                if waits is None:
                    raise
                if pause == LOOK_EVERY:
                    waits.warn(f"{error} It is tried again by itself.")
                waits.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if waits is not None and pause != LOOK_EVERY:
                waits.warn(f"{self._sink.target} answers again")
            return done


# --- Sinks ----------------------------------------------------------------------------------------


def _library(extra: str, module: str) -> Any:
    """Import a part of what an extra brings. Raises ConfigError, which names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"The library {extra} is needed here ({error}): {install(f'[{extra}]')}."
        ) from None


class TensorBoard:
    """Event file of TensorBoard, one for a node, which grows; its steps are swarm steps.

    A tracker that was killed in the midst of a batch has written more than its position says: the
    next one cuts that off, and writes the same again.
    """

    def __init__(self, target: str | None) -> None:
        """``target``: the folder that `tensorboard --logdir` reads."""
        self._root = absolute(target or "tensorboard")
        self.target = str(self._root)
        library = "tensorboard"
        self._record_writer: Any = _library(
            library, "tensorboard.summary.writer.record_writer"
        ).RecordWriter
        self._event: Any = _library(library, "tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = _library(library, "tensorboard.compat.proto.summary_pb2").Summary
        self._hparams: Any = _library(library, "tensorboard.plugins.hparams.summary_v2")
        self._tracked: Tracked | None = None
        self._path = Path()
        self._file: BinaryIO | None = None

    def open(self, tracked: Tracked, kept: Mapping[str, Any]) -> None:
        """Go on in the file; a new one begins with the first point."""
        self._tracked = tracked
        # An owner may choose any name for a node, so it is cleaned for the file system.
        name = "".join(one if one.isalnum() or one in "-_" else "_" for one in tracked.node)[:64]
        self._path = self._root / f"{tracked.run}-{tracked.fingerprint}" / (name or "node")
        if not kept:
            return
        path = self._path / str(kept["file"])
        if not path.exists() or path.stat().st_size < int(kept["bytes"]):
            raise ConfigError(
                f"{path} is missing or shorter than it was, so there is nothing to go on with: put "
                "it back, or name a new folder with --to."
            )
        os.truncate(path, int(kept["bytes"]))
        self._begin(path)

    def write(self, points: Sequence[TrackedPoint]) -> Mapping[str, Any]:
        """Append and sync. Raises DiskFull."""
        with disk_full_error(self._root, 0):
            if self._file is None:
                self._create(points[0])
            assert self._file is not None
            for point in points:
                self._add(point)
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"file": Path(self._file.name).name, "bytes": self._file.tell()}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _create(self, first: TrackedPoint) -> None:
        assert self._tracked is not None
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"events.out.tfevents.{int(first.time)}.{self._tracked.fingerprint}"
        path.unlink(missing_ok=True)  # of a tracker that was killed before it saved its position
        self._begin(path)
        self._record(self._event(wall_time=first.time, file_version="brain.Event:2"))
        if self._tracked.settings:
            settings = dict(self._tracked.settings)
            summary = self._hparams.hparams_pb(settings, start_time_secs=first.time)
            self._record(self._event(wall_time=first.time, summary=summary))

    def _begin(self, path: Path) -> None:
        self._file = path.open("ab")
        self._writer = self._record_writer(self._file)

    def _add(self, point: TrackedPoint) -> None:
        self._scalars(point.time, point.step, point.values)
        losses = {f"by_tokens/{name}": one for name, one in point.values.items() if name in LOSSES}
        if losses and point.tokens is not None:  # TensorBoard draws against steps and time only
            self._scalars(point.time, point.tokens, losses)

    def _scalars(self, time: float, step: int, values: Mapping[str, float]) -> None:
        tagged = [self._summary.Value(tag=name, simple_value=one) for name, one in values.items()]
        summary = self._summary(value=tagged)
        self._record(self._event(wall_time=time, step=step, summary=summary))

    def _record(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


class WeightsAndBiases:
    """Weights & Biases: the owner's own login and settings (``WANDB_*``) hold.

    Its own step is the number of the point. It takes none twice, so points that a killed tracker
    sent are not doubled. A run begins, or is resumed, with the first point.
    """

    def __init__(self, target: str | None) -> None:
        """``target``: ``PROJECT`` or ``ENTITY/PROJECT``."""
        self.target = target or "lowcomm"
        *entity, self._project = self.target.split("/")
        if len(entity) > 1 or not self._project:
            raise ConfigError(f"--to {self.target[:120]!r}: give PROJECT or ENTITY/PROJECT.")
        self._entity = entity[0] if entity else None
        self._wandb: Any = _library("wandb", "wandb")
        self._tracked: Tracked | None = None
        self._run: Any = None

    def open(self, tracked: Tracked, kept: Mapping[str, Any]) -> None:
        """Remember what is tracked."""
        self._tracked = tracked

    def write(self, points: Sequence[TrackedPoint]) -> Mapping[str, Any]:
        """Hand points to wandb's own process, which sends them when it can. Raises ConfigError."""
        if self._run is None:
            assert self._tracked is not None
            self._run = self._begin(self._tracked)
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.number)
        return {}

    def close(self) -> None:
        """Wait until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _begin(self, tracked: Tracked) -> Any:
        """Begin or resume the run, by an id made of run and node."""
        try:
            run = self._wandb.init(
                entity=self._entity,
                project=self._project,
                id=f"{tracked.fingerprint}-{tracked.peer_id[-12:]}",
                name=tracked.node,
                group=f"{tracked.run}-{tracked.fingerprint}",
                config=dict(tracked.settings),
                resume="allow",
                # Nothing else of this machine is sent: no console, no code, no figures of it.
                settings=self._wandb.Settings(
                    init_timeout=INIT_DEADLINE,
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_meta=True,
                    x_disable_stats=True,
                ),
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError(
                f"Weights & Biases does not take this: {error}. Log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from None
        except (self._wandb.Error, OSError) as error:
            raise RetryLater(
                f"Weights & Biases can't be reached ({error}). Nothing is lost; or set "
                "WANDB_MODE=offline."
            ) from None
        run.define_metric(SWARM_STEP)
        run.define_metric("*", step_metric=SWARM_STEP)
        return run


SINKS: Table[Callable[[str | None], Sink]] = Table(
    "sink", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
)
"""Programs that can take a journal, by name."""
