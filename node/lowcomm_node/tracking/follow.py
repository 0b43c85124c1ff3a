"""Follows a journal into a sink: whatever is delivered is noted down before more is read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lowcomm_node.errors import RetryLater
from lowcomm_node.journal.reader import Journal
from lowcomm_node.tracking.batches import next_batch
from lowcomm_node.tracking.position import Position, PositionFile
from lowcomm_node.tracking.sink import Batch, Sink, Tracked

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
