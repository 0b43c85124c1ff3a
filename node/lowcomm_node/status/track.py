"""Follows a journal into TensorBoard or Weights & Biases.

A sink gets every point once, in the order of time, and the position is kept beside the journal. So
a tracker may be stopped, killed or without a network: the next start goes on where the last one
ended. The node knows nothing of it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.status import figures
from lowcomm_node.status.figures import PERSISTENT, SAMPLED
from lowcomm_node.status.journal import Journal
from lowcomm_node.storage.files import (
    disk_full_error,
    folder_lock,
    kept_run,
    read_small,
    write_atomic,
)
from lowcomm_node.storage.paths import Paths, absolute
from lowcomm_node.system.command import load_optional
from lowcomm_node.system.units import clean, short_peer
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import identity_from_libp2p
from lowcomm_protocol.spec.names import Table

MOST = 500
"""Rows of the journal in one batch."""
MAX_POSITION_BYTES = 64 * 1024
LOOK_SECONDS, RETRY_SECONDS = 2.0, 30.0
"""Pauses before the next look at a journal, and before a sink that takes nothing is tried again."""
LEFT_OUT = ("run.members", "run.creator", "version", "optional")
"""Settings that are no hyperparameters; the members of a list are other people's."""
LONGEST = 200
"""Characters kept of a setting that is a text or a list."""
AT_CHANGES = (figures.HELD_OUT, figures.WORST_BLOCK)
"""Figures of an evaluation and of merges: a point has them where they are new."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run and the node that are followed."""

    run: str
    fingerprint: str
    peer_id: str
    node: str
    """Display name."""
    settings: Mapping[str, str | int | float | bool]
    """Of the specification as it was signed, by names such as ``sync.method``."""


@dataclass(frozen=True)
class TrackedPoint:
    """Figures of one moment."""

    time: float
    """Unix seconds."""
    number: int
    """Its place among all points of this node, from 0."""
    step: int
    """Swarm step."""
    tokens: int | None
    values: Mapping[str, float]
    """By name of the figure."""


def tracked_of(home: Path, fingerprint: str, name: str = "") -> Tracked:
    """Describe the node and a run of a home; ``name``: display name of the node."""
    paths = Paths(home)
    signed, peer_id = kept_run(paths.signed_run(fingerprint)), ""
    with suppress(LowcommError):  # a home without an identity can be followed all the same
        peer_id = identity_from_libp2p(read_small(paths.identity, 4096)).peer_id
    return Tracked(
        run=signed.spec.run.name if signed else fingerprint,
        fingerprint=fingerprint,
        peer_id=peer_id or home.name,
        node=clean(name) or short_peer(peer_id) or home.name,
        settings=dict(settings_of(signed.spec.model_dump(mode="json"))) if signed else {},
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


# --- From a journal to points ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrackerPosition:
    """How far a sink is, and what the next point depends on."""

    time: float = 0.0
    """Of the last sample (Unix seconds)."""
    points: int = 0
    """Points so far."""
    step: int | None = None
    """Swarm step of the last sample: a node that does not train adds no points."""
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each count the last value, and its sum over all starts of the node."""
    changes: Mapping[str, float] = field(default_factory=dict)
    """Last values of ``AT_CHANGES``."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the sink needs to go on."""


def next_batch(
    journal: Journal, position: TrackerPosition
) -> tuple[list[TrackedPoint], TrackerPosition]:
    """Read what comes behind a position, and the position behind that."""
    points: list[TrackedPoint] = []
    for sample in journal.samples_after(position.time, MOST):
        counts, values = dict(position.counts), dict[str, float]()
        for column, figure in SAMPLED.items():
            value = getattr(sample, column)
            if value is None or figure == figures.CLAIMED_LOSS:
                continue
            if "_total" in figure and figure not in PERSISTENT:
                last, total = counts.get(figure, (0.0, 0.0))
                total += value - last if value >= last else value
                counts[figure] = (float(value), total)
                value = total
            values[figure] = float(value)
        changes = {name: values[name] for name in AT_CHANGES if name in values}
        old = [name for name, value in changes.items() if position.changes.get(name) == value]
        for name in old:
            del values[name]
        step, number = sample.swarm_step, position.points
        if step is not None and (step != position.step or len(old) < len(changes)):
            points.append(TrackedPoint(sample.time, number, step, sample.tokens, values))
            number += 1
        position = replace(
            position, time=sample.time, points=number, step=step, counts=counts, changes=changes
        )
    return points, position


# --- Sinks ----------------------------------------------------------------------------------------


_EXTRA = "`track tensorboard`", "tensorboard"


class TensorBoard:
    """Event file of TensorBoard, one for a node, which grows; its steps are swarm steps.

    A tracker that was killed in the midst of a batch has written more than its position says: the
    next one cuts that off, and writes the same again.
    """

    def __init__(self, target: str | None, tracked: Tracked) -> None:
        """``target``: the folder that `tensorboard --logdir` reads. Raises ConfigError."""
        self._root = absolute(target or "tensorboard")
        self.target = str(self._root)
        self._tracked = tracked
        # An owner may choose any name for a node, so it is cleaned for the file system.
        name = "".join(one if one.isalnum() or one in "-_" else "_" for one in tracked.node)[:64]
        self._path = self._root / f"{tracked.run}-{tracked.fingerprint}" / (name or "node")
        self._records: Any = load_optional("tensorboard.summary.writer.record_writer", *_EXTRA)
        self._event: Any = load_optional("tensorboard.compat.proto.event_pb2", *_EXTRA).Event
        self._summary: Any = load_optional("tensorboard.compat.proto.summary_pb2", *_EXTRA).Summary
        self._hparams: Any = load_optional("tensorboard.plugins.hparams.summary_v2", *_EXTRA)
        self._file: BinaryIO | None = None

    def open(self, kept: Mapping[str, Any]) -> None:
        """Go on in the file; a new one begins with the first point. Raises ConfigError."""
        if not kept:
            return
        path = self._path / str(kept["file"])
        if not path.exists() or path.stat().st_size < int(kept["bytes"]):
            raise ConfigError(
                f"{path} is missing or shorter than it was, so there is nothing to go on with: put "
                "it back, or name a new folder with --to."
            )
        os.truncate(path, int(kept["bytes"]))
        self._file = path.open("ab")

    def write(self, points: Sequence[TrackedPoint]) -> Mapping[str, Any]:
        """Append and sync. Raises DiskFull."""
        with disk_full_error(self._root, 0):
            file = self._file = self._file or self._create(points[0])
            for point in points:
                self._scalars(file, point.time, point.step, point.values)
                if point.tokens is not None:  # TensorBoard draws against steps and time only
                    names = point.values.keys() & {figures.TRAINING_LOSS, figures.HELD_OUT}
                    by_tokens = {f"by_tokens/{name}": point.values[name] for name in sorted(names)}
                    self._scalars(file, point.time, point.tokens, by_tokens)
            file.flush()
            os.fsync(file.fileno())
            return {"file": Path(file.name).name, "bytes": file.tell()}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _create(self, first: TrackedPoint) -> BinaryIO:
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"events.out.tfevents.{int(first.time)}.{self._tracked.fingerprint}"
        path.unlink(missing_ok=True)  # of a tracker that was killed before it saved its position
        file = path.open("ab")
        self._record(file, wall_time=first.time, file_version="brain.Event:2")
        if self._tracked.settings:
            settings = dict(self._tracked.settings)
            summary = self._hparams.hparams_pb(settings, start_time_secs=first.time)
            self._record(file, wall_time=first.time, summary=summary)
        return file

    def _scalars(self, file: BinaryIO, time: float, step: int, values: Mapping[str, float]) -> None:
        if values:
            tagged = [self._summary.Value(tag=tag, simple_value=one) for tag, one in values.items()]
            self._record(file, wall_time=time, step=step, summary=self._summary(value=tagged))

    def _record(self, file: BinaryIO, **fields: Any) -> None:
        event = self._event(**fields)
        self._records.RecordWriter(file).write(event.SerializeToString())


class WeightsAndBiases:
    """Weights & Biases: the owner's own login and settings (``WANDB_*``) hold.

    Its own step is the number of the point. It takes none twice, so points that a killed tracker
    sent are not doubled. A run begins, or is resumed, with the first point.
    """

    def __init__(self, target: str | None, tracked: Tracked) -> None:
        """``target``: ``PROJECT`` or ``ENTITY/PROJECT``. Raises ConfigError."""
        self.target = target or "lowcomm"
        *entity, self._project = self.target.split("/")
        if len(entity) > 1 or not self._project:
            raise ConfigError(f"--to {self.target[:120]!r}: give PROJECT or ENTITY/PROJECT.")
        self._entity = entity[0] if entity else None
        self._wandb: Any = load_optional("wandb", "`track wandb`", "wandb")
        self._tracked = tracked
        self._run: Any = None

    def open(self, kept: Mapping[str, Any]) -> None:
        """Do nothing before the first point."""

    def write(self, points: Sequence[TrackedPoint]) -> Mapping[str, Any]:
        """Hand points to wandb's own process, which sends them when it can.

        Raises ConfigError; RetryLater if nothing may have arrived.
        """
        self._run = self._run or self._begin()
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.number)
        return {}

    def close(self) -> None:
        """Wait until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> Any:
        """Begin or resume the run, by an id made of run and node."""
        tracked = self._tracked
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
                    init_timeout=60.0,
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_meta=True,
                    x_disable_stats=True,
                ),
            )
        except (self._wandb.Error, OSError) as error:
            offline = "or set WANDB_MODE=offline."
            if isinstance(error, self._wandb.errors.UsageError):
                raise ConfigError(
                    f"Weights & Biases does not take this: {error}. Log in with `wandb login`, "
                    f"{offline}"
                ) from None
            raise RetryLater(
                f"Weights & Biases can't be reached ({error}). Nothing is lost; {offline}"
            ) from None
        run.define_metric(figures.SWARM_STEP)
        run.define_metric("*", step_metric=figures.SWARM_STEP)
        return run


Sink = TensorBoard | WeightsAndBiases
SINKS: Table[Callable[[str | None, Tracked], Sink]] = Table(
    "sink", {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
)
"""Programs that can take a journal, made with the target that the owner names, or None."""

# --- Following ------------------------------------------------------------------------------------


class Tracker:
    """One journal and one sink, with a file of the position, written whole after each delivery."""

    def __init__(self, journal: Journal, sink: Sink, folder: Path, name: str) -> None:
        """``folder`` has the position; ``name``: of the sink."""
        self._journal = journal
        self._sink = sink
        self._folder = folder
        self._name = f"{name}-{sha256(sink.target.encode()).hexdigest()[:12]}"
        self._path = folder / f"{self._name}.json"
        self.points = 0
        """Points that the sink took."""

    def run(self, warn: Callable[[str], None] | None = None) -> None:
        """Deliver what the journal holds; with ``warn`` also what comes, until interrupted.

        ``warn`` takes what is late, or goes on again. Raises RetryLater if another tracker writes
        to the same target, and without ``warn`` if the sink takes nothing. Raises ConfigError,
        NodeError if the journal can't be read, DiskFull.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self._folder, wait=False, name=f"{self._name}.lock") as is_ours:
            if not is_ours:
                raise RetryLater(
                    "Another `lowcomm-node track` writes from this home to the same place: end "
                    "that one first, or name another place with --to."
                )
            position = self._load()
            self._sink.open(position.kept)
            with closing(self._sink):
                self._follow(position, warn)

    def _load(self) -> TrackerPosition:
        if not self._path.exists():
            return TrackerPosition()
        try:
            content = read_small(self._path, MAX_POSITION_BYTES)
            return TypeAdapter(TrackerPosition).validate_json(content)
        except ValueError as error:
            raise ConfigError(
                f"{self._path} can't be read ({error}): remove it, and name a new place with --to, "
                "or what is there is written a second time."
            ) from None

    def _follow(self, position: TrackerPosition, warn: Callable[[str], None] | None) -> None:
        while True:
            points, behind = next_batch(self._journal, position)
            try:
                kept = self._sink.write(points) if points else position.kept
            except RetryLater as error:
                if warn is None:
                    raise
                warn(f"{error} It is tried again by itself.")
                sleep(RETRY_SECONDS)
                continue
            if points:
                behind = replace(behind, kept=kept)
                write_atomic(self._path, json.dumps(asdict(behind)).encode(), 0o600)
                self.points += len(points)
            elif behind.time == position.time:
                if warn is None:
                    return
                sleep(LOOK_SECONDS)
            position = behind
