"""Writes down what a node does, while it runs."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, time

from lowcomm_node.catalogue.warnings import WarningCode
from lowcomm_node.errors import NodeError
from lowcomm_node.journal.feed import Feed
from lowcomm_node.journal.file import JournalFile, Row
from lowcomm_node.journal.reader import Entry
from lowcomm_node.journal.sample import Sample, sample
from lowcomm_node.status.board import Board
from lowcomm_node.status.events import Notice
from lowcomm_node.status.model import Status
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Enduring, start

WRITE_EVERY, SAMPLE_EVERY, PRUNE_EVERY = 1.0, 10.0, 3600.0
"""Seconds."""
PRUNE_BYTES = 4 * 1024 * 1024
"""Bytes of notices after which it is pruned earlier."""
CLOSE_DEADLINE = 10.0
"""Seconds that a node which leaves waits for its disk."""
MAX_SAMPLES = 360
"""Samples that wait while the disk does not take them: an hour of them."""
NOT_WRITTEN = "what this node does is not written down"


class Recorder:
    """The journal of one node. It never holds the node up: what fails is warned of once."""

    def __init__(self, board: Board, look: Callable[[], Status], feed: Feed | None = None) -> None:
        """Notices wait from now on, until ``open`` names the file. ``feed``: is told what was
        written."""
        self._board = board
        self._look = look
        self._feed = feed or Feed()
        self._queue = board.subscribe(every_step=False)
        self._notices: list[Notice] = []
        self._samples: list[Sample] = []
        self._path: Path | None = None
        self._file: JournalFile | None = None
        self._sampled = self._pruned = float("-inf")
        self._failing = False
        self._closing = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def open(self, path: Path) -> None:
        """Write to this file from now on."""
        self._path = path
        self._running = start(self._run())

    async def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        if self._running is not None:
            _, late = await asyncio.wait({self._running}, timeout=CLOSE_DEADLINE)
            if late:  # the rest of the goodbye goes on
                self._running.cancel()
                log.warning("journal.not_written", path=str(self._path), reason="the disk hangs")
        self._board.unsubscribe(self._queue)

    async def _run(self) -> None:
        enduring = Enduring(NOT_WRITTEN, self._board.warning(WarningCode.DEFECT))
        last = False
        while not last:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_EVERY):
                    await self._closing.wait()
            last = self._closing.is_set()
            if last or monotonic() - self._sampled >= SAMPLE_EVERY:
                self._sampled = monotonic()
                with enduring:
                    self._samples = [*self._samples, sample(time(), self._look())][-MAX_SAMPLES:]
            if self._samples or not self._queue.empty():
                with enduring:
                    await self._write()
        if self._file is not None:
            self._file.close()

    async def _write(self) -> None:
        """Write what has come since the last time; keep it for the next if that fails."""
        self._take_notices()
        try:
            newest = await asyncio.to_thread(self._store)
        except (sqlite3.Error, OSError, NodeError) as error:
            self._complain(error)
            return
        first = newest + 1 - len(self._notices)
        entries = [Entry(first + place, notice) for place, notice in enumerate(self._notices)]
        self._feed.publish(newest, entries, self._samples[-1] if self._samples else None)
        self._notices = []
        self._samples = []
        if self._failing:
            self._failing = False
            self._board.withdraw(WarningCode.JOURNAL)

    def _take_notices(self) -> None:
        with suppress(asyncio.QueueEmpty):
            while True:
                self._notices.append(self._queue.get_nowait())
        del self._notices[: -self._queue.maxsize]

    def _store(self) -> int:
        """In a thread of its own: a disk may take seconds."""
        assert self._path
        self._file = self._file or JournalFile(self._path)
        newest = self._file.add([_row(notice) for notice in self._notices], self._samples)
        if monotonic() - self._pruned >= PRUNE_EVERY or self._file.grown_bytes >= PRUNE_BYTES:
            self._file.prune(time())
            self._pruned = monotonic()
        return newest

    def _complain(self, error: Exception) -> None:
        if self._failing:
            return
        self._failing = True
        log.warning("journal.not_written", path=str(self._path), reason=str(error))
        self._board.warn(
            WarningCode.JOURNAL, f"{NOT_WRITTEN} ({self._path}: {error}): training goes on"
        )


def _row(notice: Notice) -> Row:
    return notice.time, notice.event.name, json.dumps(notice.event.to_json())
