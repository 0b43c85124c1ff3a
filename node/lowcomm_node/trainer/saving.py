"""When a checkpoint begins, when training waits for one, and the thread that writes it.

A checkpoint counts once it is on the disk. The next one therefore begins before the interval ends,
as early as the last write suggests. If the write takes longer all the same, training waits for it:
a kill costs one interval at most.

    steps   |------ every ------|
            ^ newest on disk    ^ no further while one is being written
                      ^ begun: twice the last write ahead of the end, half an interval at most

After a failed save the next one waits: five seconds, then twice as long each time. Training waits
for none of them.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any

from lowcomm_node.errors import CheckpointError, Diverged, NotFinite
from lowcomm_node.node.ipc import TrainerEvent
from lowcomm_node.node.messages import (
    CheckpointWritten,
    Held,
    NotSaved,
    Save,
    Saved,
    SnapshotWritten,
    WriteSnapshot,
)
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.system.tasks import Reading
from lowcomm_node.trainer import state, transfer
from lowcomm_node.trainer.exchanges import Handlers
from lowcomm_node.trainer.replica import Replica
from lowcomm_node.trainer.state import Parts

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
PATIENCE = 30.0
"""Seconds that training waits for one write; then it goes on: a disk that hangs ends no
training."""
HANGS = f"the disk has not taken one within {PATIENCE:.0f} s."


class Saving:
    """What is known of the saves of one trainer."""

    def __init__(self, every: int, steps: int = 0) -> None:
        """``every``: inner steps that may be lost; ``steps``: those in the newest checkpoint."""
        self._every = every
        self._written = steps
        self._ahead = most_ahead(every)
        self._writing = deque[int]()
        """Steps in those that are being written, in the order in which they are."""
        self._held_since: float | None = None
        self._pause = 0.0
        self._not_before = 0.0
        self.trouble: str | None = None
        """Why the last save failed, or training waits for it no longer; None if all is well."""

    def is_due(self, steps: int, now: float) -> bool:
        """Whether to save after so many steps."""
        if self._writing:
            return False
        if self.trouble is not None:
            return now >= self._not_before
        return steps - self._written >= max(1, self._every - self._ahead)

    @property
    def is_holding(self) -> bool:
        """Whether training waited when that was last asked."""
        return self._held_since is not None

    def holds(self, steps: int, now: float) -> bool:
        """Whether training waits: with one more step a kill would lose more than an interval."""
        if not self._writing or self.trouble is not None or steps - self._written < self._every:
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= PATIENCE:
            self.trouble = HANGS
            self._held_since = None
        return self.is_holding

    def began(self, steps: int) -> None:
        """A checkpoint of so many steps is being written."""
        self._writing.append(steps)

    def failed(self, reason: str, now: float) -> bool:
        """The one begun first could not be written; whether that is news."""
        self._writing.popleft()
        is_news, self.trouble = self.trouble in (None, HANGS), reason
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._not_before = now + self._pause
        return is_news

    def succeeded(self, steps: int) -> bool:
        """The one begun first is written; whether that is news, because the last one failed.

        ``steps`` are done by now.
        """
        self._written = self._writing.popleft()
        meanwhile = self._every if self.is_holding else steps - self._written
        self._ahead = min(most_ahead(self._every), 2 * meanwhile + 1)
        is_news, self.trouble = self.trouble is not None, None
        self._pause = 0.0
        return is_news


def most_ahead(every: int) -> int:
    """Steps before the end of an interval at which a checkpoint is begun at the earliest."""
    return (every + 1) // 2


SLOWEST_DISK = 25e6
"""Bytes a second. Training waits so long for a state that is written from where it is, beside
``PATIENCE``; then it goes on, and what was written is thrown away."""


class StateWriter:
    """The checkpoints and snapshots of one replica."""

    def __init__(
        self,
        replica: Replica,
        store: CheckpointStore,
        saving: Saving,
        thread: Executor,
        tell: Callable[[TrainerEvent], None],
        at_boundary: Callable[[Callable[[], None]], None],
    ) -> None:
        """``thread`` writes; ``at_boundary`` runs something between two steps."""
        self.saving = saving
        self._replica = replica
        self._store = store
        self._thread = thread
        self._tell = tell
        self._at_boundary = at_boundary

    @property
    def handlers(self) -> Handlers:
        """The requests that it carries out."""
        return {Save: lambda _: self._save(), WriteSnapshot: self._snapshot}

    def holds_training(self) -> bool:
        """Whether training waits for a checkpoint.

        It reports when the wait begins, and when it has lasted for too long.
        """
        was_held = self.saving.is_holding
        is_held = self.saving.holds(self._replica.steps, monotonic())
        if is_held and not was_held:
            self._tell(Held())
        if was_held and self.saving.trouble == HANGS:
            self._tell(NotSaved(reason=HANGS))
        return is_held

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.saving.is_due(self._replica.steps, monotonic())

    def save_if_due(self) -> None:
        """Begin a checkpoint, if it is time for one."""
        if self.is_due():
            self._save()

    def _save(self) -> Future[CheckpointWritten]:
        reading = self._begin_reading()
        parts, meta = state.snapshot(self._replica, copied=reading is None)
        self.saving.began(meta["steps"])

        def work() -> CheckpointWritten:
            try:
                return self._write(parts, meta, reading)
            finally:
                if reading is not None:
                    reading.end()
                self._at_boundary(lambda: None)  # wakes training, if it is held

        return self._thread.submit(work)

    def _begin_reading(self) -> Reading | None:
        """Have training wait before it changes the state; None where it is copied."""
        replica = self._replica
        if state.is_copied(replica):
            return None
        return replica.readings.begin(PATIENCE + transfer.form_of(replica).size / SLOWEST_DISK)

    def _write(
        self, parts: Parts, meta: dict[str, Any], reading: Reading | None
    ) -> CheckpointWritten:
        began = monotonic()
        try:
            state.require_finite(parts)
            path = self._store.save(
                meta["swarm_step"], parts, meta, created_at=time(), taken=lambda: _end(reading)
            ).path
        except Exception as error:  # whatever it is, it is reported, and training goes on
            if self.saving.failed(str(error), monotonic()):
                self._tell(NotSaved(reason=str(error)))
            if isinstance(error, NotFinite):
                self._at_boundary(partial(self._give_up, error))
            raise
        after_trouble = self.saving.succeeded(self._replica.steps)
        swarm_step, seconds = meta["swarm_step"], monotonic() - began
        self._tell(
            Saved(
                swarm_step=swarm_step, path=str(path), seconds=seconds, after_trouble=after_trouble
            )
        )
        return CheckpointWritten(
            path=str(path), swarm_step=swarm_step, steps=meta["steps"], tokens=meta["tokens"]
        )

    def _give_up(self, error: NotFinite) -> None:
        reason = str(error).rstrip(".")
        steps = self._replica.steps
        raise Diverged(f"{reason}, by step {steps}: train.learning_rate is too high.")

    def _snapshot(self, request: WriteSnapshot) -> Future[SnapshotWritten]:
        reading = self._begin_reading()
        snapshot = transfer.StateSnapshot(self._replica, copied=reading is None)

        def work() -> SnapshotWritten:
            try:
                name = snapshot.write(Path(request.folder), taken=lambda: _end(reading))
            finally:
                if reading is not None:
                    reading.end()
            return SnapshotWritten(name=name, swarm_step=snapshot.swarm_step)

        return self._thread.submit(work)


def _end(reading: Reading | None) -> None:
    """Let training change the state. Raises CheckpointError if it already has."""
    if reading is None:
        return
    reading.end()
    if reading.is_void:
        raise CheckpointError(
            "The state was not written in time, and training has gone on: the disk is too slow, or "
            "other programs take the processor. Choose another disk with --home, or save more "
            "rarely with --checkpoint-every."
        )
