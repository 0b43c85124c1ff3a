"""Follows a journal into TensorBoard or Weights & Biases.

A sink is told everything once, in the order of time, and the position is kept beside the journal.
So a tracker may be stopped, killed or without a network: the next start goes on where the last one
ended. The node knows nothing of it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.status.journal import Entry, Journal, Sample
from lowcomm_node.storage.files import disk_full_error, lock, read_small, write_atomic
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.command import install
from lowcomm_node.system.units import clean, short_peer
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import identity_from_libp2p
from lowcomm_protocol.spec.names import Table
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    text: str
    read: Callable[[Sample], float | None]
    counts: bool = False
    """Whether it begins anew with each start."""


SWARM_STEP = "lowcomm_swarm_step"
TOKENS = "lowcomm_tokens_total"
TRAINING_LOSS = "lowcomm_loss_nats/training"
COMPUTING = "lowcomm_computing_seconds_total"
WAITED = "lowcomm_waited_seconds_total"

SAMPLED: tuple[Series, ...] = (
    Series(SWARM_STEP, "Clock of the run.", lambda one: one.swarm_step),
    Series("lowcomm_steps_total", "Inner steps of this node.", lambda one: one.steps),
    Series(TOKENS, "Tokens that this node has trained on.", lambda one: one.tokens),
    Series("lowcomm_tokens_per_second", "Of late.", lambda one: one.tokens_per_second),
    Series(TRAINING_LOSS, "Nats a token, of the last inner step.", lambda one: one.loss),
    Series("lowcomm_learning_rate", "Of the last inner step.", lambda one: one.learning_rate),
    Series(COMPUTING, "Seconds in inner steps.", lambda one: one.computing, counts=True),
    Series(WAITED, "Seconds between inner steps.", lambda one: one.waited, counts=True),
    Series("lowcomm_exchanges_total/applied", "Exchanges.", lambda one: one.completed, counts=True),
    Series("lowcomm_exchanges_total/failed", "Exchanges.", lambda one: one.failed, counts=True),
    Series(
        "lowcomm_exchanges_total/no_partner",
        "Exchanges for which no peer was found.",
        lambda one: one.no_partner,
        counts=True,
    ),
    Series(
        "lowcomm_exchanges_total/refused",
        "Offers that were refused, by others and by this node.",
        lambda one: one.refused,
        counts=True,
    ),
    Series(
        "lowcomm_content_bytes_total/sent",
        "Of exchanges and states.",
        lambda one: one.bytes_sent,
        counts=True,
    ),
    Series(
        "lowcomm_content_bytes_total/received",
        "Of exchanges and states.",
        lambda one: one.bytes_received,
        counts=True,
    ),
    Series("lowcomm_peers/alive", "Other peers of the run.", lambda one: one.peers),
    Series("lowcomm_memory_bytes/taken", "Of trainer and daemon.", lambda one: one.memory),
)
"""Of a sample, every ten seconds."""

WAITING = "lowcomm_waiting_ratio"
HELD_OUT = "lowcomm_loss_nats/held_out"
WORST_BLOCK = "lowcomm_worst_block"
OTHERS: dict[str, str] = {
    WAITING: "Share of the trainer's time since the point before in which training waited; of no "
    "metric, Prometheus divides the two counters.",
    HELD_OUT: "Nats a token, at each evaluation.",
    WORST_BLOCK: "Distance of the weights at a merge: spread of the contributions in the block of "
    "256 values where it was largest.",
}
LOSSES = (TRAINING_LOSS, HELD_OUT)
"""What is shown against tokens, too."""


Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run and the node that are followed."""

    run: str
    """Name of the run."""
    run_id: str
    fingerprint: str
    peer_id: str
    node: str
    """What the node is called."""
    settings: Mapping[str, Setting]
    """Of the specification as it was signed, by names such as ``sync.method``."""
    step_tokens: int | None = None
    """Tokens of an inner step, where the specification is known."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Figures of one moment."""

    time: float
    """Unix seconds."""
    number: int
    """Its place among all points of this node, from 0."""
    step: int
    """Swarm step."""
    tokens: int | None
    """That the node had trained on."""
    values: Mapping[str, float]
    """By the names of ``names.py``."""


@dataclass(frozen=True)
class Batch:
    """What comes next of a journal, in the order of time."""

    points: Sequence[Point] = ()
    exchanges: Sequence[ExchangeEnded] = ()

    def __bool__(self) -> bool:
        return bool(self.points or self.exchanges)


Kept = Mapping[str, Any]
"""What a sink wants to know at its next start; JSON."""


class Sink(Protocol):
    """Where a journal is followed to.

    Its class is made with the target that the owner names, or None, and raises ConfigError for one
    that can't be."""

    target: str
    """Where it writes, in words that hold no secret."""
    takes: str
    """What it takes of a batch: ``points`` or ``exchanges``."""

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """Begin, or go on where ``kept`` was. Raises ConfigError, RetryLater."""
        ...

    def write(self, batch: Batch) -> Kept:
        """Deliver all of it; what to keep. Raises RetryLater if nothing may have arrived."""
        ...

    def close(self) -> None:
        """Nothing more comes; what was written is delivered."""
        ...


@dataclass
class Library:
    """A library that an extra brings."""

    extra: str
    name: str
    modules: dict[str, Any] = field(default_factory=dict[str, Any])

    def module(self, name: str) -> Any:
        """Import a part of it. Raises ConfigError, which names the extra."""
        try:
            return import_module(name)
        except ImportError as error:
            if (error.name or "").partition(".")[0].startswith("lowcomm"):
                raise
            raise ConfigError(
                f"The library {self.name} is needed here ({error}): {install(f'[{self.extra}]')}."
            ) from None


LEFT_OUT = ("run.members", "run.creator", "version", "optional")
"""Settings that are no hyperparameters; the members of a list are other people's."""
LONGEST = 200
"""Characters of a setting that is a text or a list; the rest is cut."""


def tracked_of(home: Path, fingerprint: str, name: str = "") -> Tracked:
    """The node and a run of a home; ``name``: what the owner calls the node."""
    paths = Paths(home)
    signed = _run(paths.signed_run(fingerprint))
    peer_id = _peer_id(paths.identity)
    return Tracked(
        run=signed.spec.run.name if signed else fingerprint,
        run_id=signed.run_id if signed else fingerprint,
        fingerprint=fingerprint,
        peer_id=peer_id or home.name,
        node=clean(name) or short_peer(peer_id) or home.name,
        settings=dict(settings_of(signed.spec.model_dump(mode="json"))) if signed else {},
        step_tokens=signed.spec.tokens_per_step if signed else None,
    )


def settings_of(told: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting by its full name, lists as texts."""
    for key, value in told.items():
        name = f"{section}{key}"
        if name in LEFT_OUT or value is None:
            continue
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{name}.")
        elif isinstance(value, bool | int | float):
            yield name, value
        else:
            yield name, clean(value)[:LONGEST]


def _run(path: Path) -> SignedRun | None:
    data = read_small(path, 2 * MAX_SPEC_BYTES)
    try:
        return read_signed_run(data, str(path)) if data else None
    except LowcommError:
        return None


def _peer_id(path: Path) -> str:
    """Of the home's key, which stays where it is; empty where there is none."""
    data = read_small(path, 4096)
    try:
        return identity_from_libp2p(data).peer_id if data else ""
    except LowcommError:
        return ""


MAX_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Position:
    """What the next point depends on."""

    notice: int = 0
    """Number of the last notice."""
    time: float = 0.0
    """Of the last sample (Unix seconds)."""
    newest: float = 0.0
    """When the last notice was told (Unix seconds): a journal that began anew counts from 1."""
    points: int = 0
    """How many there were."""
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each count the last value, and its sum over all starts."""
    seen: tuple[float | None, ...] = ()
    """What the last sample told, to leave out those that tell the same."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The sink's own."""


class PositionFile:
    """Where the position of one sink and target is kept."""

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

    def load(self) -> Position:
        """The position; the beginning if there is none. Raises ConfigError if it can't be read."""
        if not self._path.exists():
            return Position()
        try:
            told = json.loads(read_small(self._path, MAX_BYTES))
            counts = {
                name: (float(last), float(total))
                for name, (last, total) in told.pop("counts").items()
            }
            return Position(counts=counts, seen=tuple(told.pop("seen")), **told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} can't be read ({error}): remove it, and name a new place with --to, "
                "or what is there is written a second time."
            ) from None

    def save(self, position: Position) -> None:
        """Keep it. Raises DiskFull."""
        write_atomic(self._path, json.dumps(asdict(position)).encode(), 0o600)


MOST = 500
"""Notices, and samples, of one batch."""


def next_batch(
    journal: Journal, position: Position, step_tokens: int | None = None
) -> tuple[Batch, Position]:
    """What comes behind a position, and the position behind that.

    ``step_tokens``: tokens of an inner step, where that is known.
    """
    entries, position = _notices(journal, position)
    samples = journal.samples_after(position.time, MOST)
    entries, samples = _up_to_one_time(entries, samples)
    reading = _Reading(position, step_tokens)
    told = [(one.notice.time, one) for one in entries] + [(one.time, one) for one in samples]
    for _, one in sorted(told, key=lambda item: item[0]):
        reading.take(one)
    return Batch(reading.points, reading.exchanges), reading.position


def _notices(journal: Journal, position: Position) -> tuple[list[Entry], Position]:
    last = journal.last_notices(1)
    if position.notice <= (last[-1].number if last else 0):
        return journal.notices(position.notice, MOST), position
    # The journal was damaged or removed, and the node has begun a new one, which counts from 1.
    entries = [one for one in journal.notices(0, MOST) if one.notice.time > position.newest]
    return entries, replace(position, notice=0) if last else position


def _up_to_one_time(
    entries: Sequence[Entry], samples: Sequence[Sample]
) -> tuple[Sequence[Entry], Sequence[Sample]]:
    """Both up to the same time, where one of them was cut off: in a later batch the rest of it
    would come too late."""
    ends = [
        *([entries[-1].notice.time] if len(entries) == MOST else []),
        *([samples[-1].time] if len(samples) == MOST else []),
    ]
    if not ends:
        return entries, samples
    end = min(ends)
    early = list(takewhile(lambda one: one.notice.time <= end, entries))
    kept = [one for one in samples if one.time <= end]
    return (early, kept) if early or kept else (entries, samples)


@dataclass
class _Reading:
    """Makes points of what a journal tells."""

    position: Position
    step_tokens: int | None

    def __post_init__(self) -> None:
        self.points: list[Point] = []
        self.exchanges: list[ExchangeEnded] = []

    def take(self, one: Entry | Sample) -> None:
        """Take in what comes next."""
        if isinstance(one, Sample):
            self._take_sample(one)
            return
        time, event = one.notice.time, one.notice.event
        self.position = replace(self.position, notice=one.number, newest=time)
        if isinstance(event, Evaluated) and event.loss is not None:
            tokens = event.steps * self.step_tokens if self.step_tokens else None
            self._add(time, event.swarm_step, tokens, {HELD_OUT: event.loss})
        elif isinstance(event, ExchangeEnded):
            self.exchanges.append(event)
            if event.worst_block is not None:
                self._add(time, event.swarm_step, None, {WORST_BLOCK: event.worst_block})

    def _take_sample(self, one: Sample) -> None:
        counts = dict(self.position.counts)
        values = {name: value for name, value in _figures(one, counts) if value is not None}
        ratio = _waiting(self.position.counts, counts)
        if ratio is not None:
            values[WAITING] = ratio
        seen = _telling(one)
        news = one.swarm_step is not None and seen != self.position.seen
        self.position = replace(self.position, time=one.time, counts=counts, seen=seen)
        if news and one.swarm_step is not None:
            self._add(one.time, one.swarm_step, one.tokens, values)

    def _add(self, time: float, step: int, tokens: int | None, values: Mapping[str, float]) -> None:
        number = self.position.points
        self.position = replace(self.position, points=number + 1)
        axes = {SWARM_STEP: float(step)}
        if tokens is not None:
            axes[TOKENS] = float(tokens)
        self.points.append(
            Point(
                time=time,
                number=number,
                step=step,
                tokens=tokens,
                values={**axes, **values},
            )
        )


def _figures(one: Sample, counts: dict[str, tuple[float, float]]) -> list[tuple[str, float | None]]:
    """By name; what is counted goes on from ``counts``, which are brought up to date."""
    told: list[tuple[str, float | None]] = []
    for series in SAMPLED:
        value = series.read(one)
        if value is not None and series.counts:
            last, total = counts.get(series.name, (0.0, 0.0))
            total += value - last if value >= last else value
            counts[series.name] = (float(value), total)
            value = total
        told.append((series.name, None if value is None else float(value)))
    return told


def _waiting(
    before: Mapping[str, tuple[float, float]], now: Mapping[str, tuple[float, float]]
) -> float | None:
    waited, computing = (
        now.get(name, (0.0, 0.0))[1] - before.get(name, (0.0, 0.0))[1]
        for name in (WAITED, COMPUTING)
    )
    return waited / (waited + computing) if waited + computing > 0 else None


def _telling(one: Sample) -> tuple[float | None, ...]:
    """What makes a sample worth a point: not that a finished node still serves its state."""
    return (
        one.swarm_step,
        one.tokens,
        one.loss,
        one.completed,
        one.failed,
        one.bytes_sent,
        one.bytes_received,
    )


Result = TypeVar("Result")
LOOK_EVERY = 2.0
"""Seconds between two looks at a journal."""
LONGEST_PAUSE = 60.0
"""Seconds until a sink that does not take anything is tried again, at most."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How a tracker that stays waits, and whom it tells."""

    sleep: Callable[[float], None]
    """For so many seconds."""
    warn: Callable[[str], None]
    """The owner: something is late, or goes on again."""


@dataclass
class Delivered:
    """How much a sink took."""

    points: int = 0
    exchanges: int = 0


class Tracker:
    """One journal and one sink."""

    def __init__(self, journal: Journal, sink: Sink, tracked: Tracked, file: PositionFile) -> None:
        self._journal = journal
        self._sink = sink
        self._tracked = tracked
        self._file = file
        self.delivered = Delivered()

    def run(self, waits: Waits | None = None) -> None:
        """Deliver what the journal holds; with ``waits`` also what it will hold, until interrupted.

        Raises RetryLater if the sink takes nothing, and there is nothing to wait with; ConfigError,
        NodeError if the journal can't be read, DiskFull."""
        with self._file.held():
            position = self._file.load()
            self._patiently(partial(self._sink.open, self._tracked, position.kept), waits)
            try:
                self._follow(position, waits)
            finally:
                self._sink.close()

    def _follow(self, position: Position, waits: Waits | None) -> None:
        while True:
            batch, behind = next_batch(self._journal, position, self._tracked.step_tokens)
            more = behind.notice != position.notice or behind.time != position.time
            position = self._patiently(partial(self._deliver, batch, behind), waits)
            if more:
                continue
            if waits is None:
                return
            waits.sleep(LOOK_EVERY)

    def _wanted(self, batch: Batch) -> Batch:
        """Of a batch, what the sink takes."""
        if self._sink.takes == "points":
            return replace(batch, exchanges=())
        return replace(batch, points=())

    def _deliver(self, batch: Batch, behind: Position) -> Position:
        """Where the next batch begins."""
        wanted = self._wanted(batch)
        if not wanted:
            return behind
        position = replace(behind, kept=self._sink.write(wanted))
        self._file.save(position)
        self.delivered.points += len(wanted.points)
        self.delivered.exchanges += len(wanted.exchanges)
        return position

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


DEFAULT_FOLDER = "tensorboard"
BY_TOKENS = "by_tokens"
"""TensorBoard draws against steps and time; these have tokens in place of steps."""


class TensorBoard:
    """See Sink. Steps are swarm steps."""

    takes = "points"

    def __init__(self, target: str | None) -> None:
        """``target``: the folder that `tensorboard --logdir` reads."""
        self._root = absolute(target or DEFAULT_FOLDER)
        self.target = str(self._root)
        library = Library("tensorboard", "tensorboard")
        records = "tensorboard.summary.writer.record_writer"
        self._record_writer: Any = library.module(records).RecordWriter
        self._event: Any = library.module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = library.module("tensorboard.compat.proto.summary_pb2").Summary
        self._hparams: Any = library.module("tensorboard.plugins.hparams.summary_v2")
        self._tracked: Tracked | None = None
        self._path = Path()
        self._file: BinaryIO | None = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink. The file itself begins with the first point."""
        self._tracked = tracked
        self._path = self._root / f"{tracked.run}-{tracked.fingerprint}" / _folder(tracked.node)
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

    def write(self, batch: Batch) -> Kept:
        """See Sink. Raises DiskFull."""
        with disk_full_error(self._root, 0):
            if self._file is None:
                self._create(batch.points[0])
            assert self._file is not None
            for point in batch.points:
                self._add(point)
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"file": Path(self._file.name).name, "bytes": self._file.tell()}

    def close(self) -> None:
        """See Sink."""
        if self._file is not None:
            self._file.close()

    def _create(self, first: Point) -> None:
        assert self._tracked is not None
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"events.out.tfevents.{int(first.time)}.{self._tracked.fingerprint}"
        path.unlink(missing_ok=True)  # of a tracker that was killed before it noted anything down
        self._begin(path)
        self._record(self._event(wall_time=first.time, file_version="brain.Event:2"))
        if self._tracked.settings:
            summary = self._hparams.hparams_pb(
                dict(self._tracked.settings), start_time_secs=first.time
            )
            self._record(self._event(wall_time=first.time, summary=summary))

    def _begin(self, path: Path) -> None:
        self._file = path.open("ab")
        self._writer = self._record_writer(self._file)

    def _add(self, point: Point) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=one) for name, one in point.values.items()
        ]
        summary = self._summary(value=values)
        self._record(self._event(wall_time=point.time, step=point.step, summary=summary))
        losses = [
            self._summary.Value(tag=f"{BY_TOKENS}/{name}", simple_value=point.values[name])
            for name in LOSSES
            if name in point.values
        ]
        if losses and point.tokens is not None:
            summary = self._summary(value=losses)
            self._record(self._event(wall_time=point.time, step=point.tokens, summary=summary))

    def _record(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _folder(name: str) -> str:
    """A name of a node as that of a folder: an owner may choose any text."""
    kept = "".join(one if one.isalnum() or one in "-_" else "_" for one in name)
    return kept[:64] or "node"


DEFAULT_PROJECT = "lowcomm"
DEADLINE = 60.0
"""Seconds to begin a run."""


class WeightsAndBiases:
    """See Sink."""

    takes = "points"

    def __init__(self, target: str | None) -> None:
        """``target``: ``PROJECT`` or ``ENTITY/PROJECT``."""
        self.target = target or DEFAULT_PROJECT
        *entity, self._project = self.target.split("/")
        if len(entity) > 1 or not self._project:
            raise ConfigError(f"--to {self.target[:120]!r}: give PROJECT or ENTITY/PROJECT.")
        self._entity = entity[0] if entity else None
        self._wandb: Any = Library("wandb", "wandb").module("wandb")
        self._tracked: Tracked | None = None
        self._run: Any = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink."""
        self._tracked = tracked

    def write(self, batch: Batch) -> Kept:
        """See Sink. A process of its own takes it, and sends it when it can. Raises ConfigError."""
        if self._run is None:
            assert self._tracked is not None
            self._run = self._begin(self._tracked)
        for point in batch.points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.number)
        return {}

    def close(self) -> None:
        """See Sink. Waits until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _begin(self, tracked: Tracked) -> Any:
        """The run has an id of its own, by which it is resumed."""
        try:
            run = self._wandb.init(
                entity=self._entity,
                project=self._project,
                id=f"{tracked.fingerprint}-{tracked.peer_id[-12:]}",
                name=tracked.node,
                group=f"{tracked.run}-{tracked.fingerprint}",
                config=dict(tracked.settings),
                resume="allow",
                settings=self._settings(),
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

    def _settings(self) -> Any:
        # Nothing of this machine is told but what we tell: no console, no code, no figures of it.
        return self._wandb.Settings(
            init_timeout=DEADLINE,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )


SINKS: Table[Callable[[str | None], Sink]] = Table(
    "sink", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
)
"""Where a journal can be followed to, by name."""
