"""When a checkpoint begins, when training waits for it, and the thread that writes it.

A checkpoint counts once it is on the disk. The next one therefore begins before the interval ends,
as early as the last write suggests. If the write takes longer all the same, training waits for it:
a kill costs one interval at most.

    steps   |------ every ------|
            ^ newest on disk    ^ no further while a checkpoint is being written
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
from lowcomm_node.node.ipc import A, TrainerEvent
from lowcomm_node.node.messages import Held, NotSaved, Save, Saved, WriteSnapshot, Written
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
SLOWEST_DISK = 25e6
"""Bytes a second. A state that is written from where it is may hold training up this long beside
``PATIENCE``; then training goes on, and what was written is thrown away."""
HANGS = f"the disk has not taken one within {PATIENCE:.0f} s."


class Saving:
    """Schedule of the saves of one trainer; ``now`` are monotonic seconds."""

    def __init__(self, every: int, steps: int = 0) -> None:
        """``every``: inner steps that may be lost; ``steps``: those in the newest checkpoint."""
        self._every = every
        self._written = steps
        self._most_ahead = (every + 1) // 2
        self._ahead = self._most_ahead
        """Steps before the end of an interval at which a checkpoint is begun."""
        self._writing = deque[int]()
        """Steps in the checkpoints that are being written, the first first."""
        self._held_since: float | None = None
        self._pause = 0.0
        self._not_before = 0.0
        self.trouble: str | None = None
        """Why the last save failed, or training waits for it no longer; None if all is well."""

    def is_due(self, steps: int, now: float) -> bool:
        """Whether to save after this many steps."""
        if self._writing:
            return False
        if self.trouble is not None:
            return now >= self._not_before
        return steps - self._written >= max(1, self._every - self._ahead)

    @property
    def is_holding(self) -> bool:
        """Whether training waited at the last call of ``holds``."""
        return self._held_since is not None

    def holds(self, steps: int, now: float) -> bool:
        """Whether training waits: with one more step a kill would lose more than an interval."""
        if not self._writing or self.trouble is not None or steps - self._written < self._every:
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        if now - self._held_since >= PATIENCE:
            self.trouble = HANGS
            self._held_since = None
        return self.is_holding

    def began(self, steps: int) -> None:
        """Note that a checkpoint of this many steps is being written."""
        self._writing += [steps]

    def failed(self, reason: str, now: float) -> bool:
        """Note that the one begun first could not be written; whether that is news."""
        self._writing.popleft()
        is_news, self.trouble = self.trouble in (None, HANGS), reason
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._not_before = now + self._pause
        return is_news

    def succeeded(self, steps: int) -> bool:
        """Note that the one begun first is written by now; whether that is news."""
        self._written = self._writing.popleft()
        meanwhile = self._every if self.is_holding else steps - self._written
        self._ahead = min(self._most_ahead, 2 * meanwhile + 1)
        is_news, self.trouble, self._pause = self.trouble is not None, None, 0.0
        return is_news


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
        self.handlers: Handlers = {Save: lambda _: self.save(), WriteSnapshot: self._snapshot}

    def holds_training(self) -> bool:
        """Whether training waits for a checkpoint; reports when that begins, and when it has lasted
        for too long."""
        was_held = self.saving.is_holding
        is_held = self.saving.holds(self._replica.steps, monotonic())
        if is_held and not was_held:
            self._tell(Held())
        if was_held and self.saving.trouble == HANGS:
            self._tell(NotSaved(reason=HANGS))
        return is_held

    def save(self) -> Future[Written]:
        """Begin a checkpoint."""
        reading, copied = self._begin_reading()
        parts, meta = state.snapshot(self._replica, copied)
        self.saving.began(meta["steps"])
        return self._submit(reading, partial(self._write, parts, meta))

    def _snapshot(self, request: WriteSnapshot) -> Future[Written]:
        reading, copied = self._begin_reading()
        snapshot = transfer.StateSnapshot(self._replica, copied)

        def write(taken: Callable[[], None]) -> Written:
            name = snapshot.write(Path(request.folder), taken)
            return Written(path=name, swarm_step=snapshot.swarm_step)

        return self._submit(reading, write)

    def _begin_reading(self) -> tuple[Reading, bool]:
        """Have training wait before it changes the state, unless that is copied; whether it is."""
        replica, copied = self._replica, state.is_copied(self._replica)
        seconds = 0.0 if copied else transfer.form_of(replica).size / SLOWEST_DISK
        reading = replica.readings.begin(PATIENCE + seconds)
        if copied:
            reading.end()
        return reading, copied

    def _submit(self, reading: Reading, write: Callable[[Callable[[], None]], A]) -> Future[A]:
        """Have the thread write, which calls its argument once all is read."""

        def work() -> A:
            try:
                return write(partial(_end, reading))
            finally:
                reading.end()
                self._at_boundary(lambda: None)  # wakes training, if it is held

        return self._thread.submit(work)

    def _write(self, parts: Parts, meta: dict[str, Any], taken: Callable[[], None]) -> Written:
        began, swarm_step = monotonic(), meta["swarm_step"]
        try:
            state.require_finite(parts)
            path = str(self._store.save(swarm_step, parts, meta, time(), taken=taken).path)
        except Exception as error:  # whatever it is, it is reported, and training goes on
            if self.saving.failed(str(error), monotonic()):
                self._tell(NotSaved(reason=str(error)))
            if isinstance(error, NotFinite):
                self._at_boundary(partial(self._give_up, error))
            raise
        news, seconds = self.saving.succeeded(self._replica.steps), monotonic() - began
        self._tell(Saved(swarm_step=swarm_step, path=path, seconds=seconds, after_trouble=news))
        counters = {name: meta[name] for name in ("swarm_step", "steps", "tokens")}
        return Written(path=path, **counters)

    def _give_up(self, error: NotFinite) -> None:
        reason, steps = str(error).rstrip("."), self._replica.steps
        raise Diverged(f"{reason}, by step {steps}: train.learning_rate is too high.")


def _end(reading: Reading) -> None:
    """Let training change the state. Raises CheckpointError if it already has."""
    reading.end()
    if reading.is_void:
        raise CheckpointError(
            "The state was not written in time, and training has gone on: the disk is too slow, or "
            "other programs take the processor. Choose another disk with --home, or save more "
            "rarely with --checkpoint-every."
        )
