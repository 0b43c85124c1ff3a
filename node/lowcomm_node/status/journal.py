"""The journal of a run: what a node did, in a SQLite file of its home, for later.

Two tables. ``notices``: events as JSON, but for inner steps. ``samples``: the node's figures every
ten seconds. Both are bounded: of exchanges the newest stay, and samples thin out with age. Freed
pages are used again, so the file stays below 50 MB however long the node runs. It is written with a
write-ahead log, so a killed node loses a second at most, and it can be read meanwhile.
"""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, fields
from itertools import islice
from pathlib import Path
from time import monotonic, time
from typing import Any

from lowcomm_node.errors import NodeError
from lowcomm_node.status.events import Board, Notice, read_notice
from lowcomm_node.status.figures import Sample, sample
from lowcomm_node.status.model import Status
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Enduring, start

VERSION = 2
"""1 had fewer columns of samples: they are added when a node opens such a file."""
COLUMNS = tuple(one.name for one in fields(Sample))
MAX_EXCHANGES, MAX_OTHERS = 30_000, 10_000
"""Notices that are kept: of exchanges, of some 700 bytes each, and of anything else."""
MAX_BYTES = 32 * 1024 * 1024
"""Bytes of all notices that are kept."""
KEPT_SECONDS = 90 * 86400.0
THINNED = ((86400.0, 60.0), (7 * 86400.0, 600.0))
"""Seconds of age from which on one sample in the second number of seconds stays."""
MOST = 5000
"""Rows of one answer."""
WRITE_EVERY, SAMPLE_EVERY, PRUNE_EVERY = 1.0, 10.0, 3600.0
"""Seconds."""
PRUNE_BYTES = 4 * 1024 * 1024
"""Bytes of notices after which it is pruned earlier."""
CLOSE_DEADLINE = 10.0
"""Seconds that a node which leaves waits for its disk."""
MAX_SAMPLES = 360
"""Samples of an hour, which wait while the disk does not take them."""
NOT_WRITTEN = "what this node does is not written down"

# --- Writing --------------------------------------------------------------------------------------

_EXCHANGES = "name LIKE 'exchange.%'"
_TABLES = f"""
CREATE TABLE IF NOT EXISTS notices
    (id INTEGER PRIMARY KEY, time REAL NOT NULL, name TEXT NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (time REAL PRIMARY KEY, {", ".join(COLUMNS[1:])});
"""


class JournalFile:
    """A journal to write. Not for two threads at a time.

    Methods raise sqlite3.Error, as where the disk is full.
    """

    def __init__(self, path: Path) -> None:
        """Open or create it; a damaged one is set aside as ``.damaged``. Raises NodeError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.grown_bytes = 0
        """Bytes of the notices that were added since it was pruned."""
        try:
            self._database = _open(path)
        except sqlite3.OperationalError:  # the disk, not the file
            raise
        except sqlite3.DatabaseError:
            path.replace(path.with_name(f"{path.name}.damaged"))
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._database = _open(path)

    def add(self, notices: Sequence[Notice], samples: Sequence[Sample]) -> None:
        """Write both in one transaction."""
        rows = [(one.time, one.event.name, json.dumps(one.event.to_json())) for one in notices]
        into = f"samples ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
        with self._database as database:
            database.executemany("INSERT INTO notices (time, name, content) VALUES (?, ?, ?)", rows)
            database.executemany(
                f"INSERT OR REPLACE INTO {into}", [astuple(one) for one in samples]
            )
        self.grown_bytes += sum(len(content) for _, _, content in rows)

    def prune(self, now: float) -> None:
        """Drop what is too old or too much. ``now``: Unix seconds."""
        with self._database as database:
            for table in ("notices", "samples"):
                database.execute(f"DELETE FROM {table} WHERE time < ?", (now - KEPT_SECONDS,))
            for which, most in ((_EXCHANGES, MAX_EXCHANGES), (f"NOT {_EXCHANGES}", MAX_OTHERS)):
                newest = f"SELECT id FROM notices WHERE {which} ORDER BY id DESC LIMIT 1 OFFSET ?"
                older = f"DELETE FROM notices WHERE {which} AND id <= ({newest})"
                database.execute(older, (most,))
            database.execute(
                "DELETE FROM notices WHERE id IN (SELECT id FROM (SELECT id, sum(length(content)) "
                "OVER (ORDER BY id DESC) AS newer FROM notices) WHERE newer > ?)",
                (MAX_BYTES,),
            )
            for age, every in THINNED:
                database.execute(
                    "DELETE FROM samples WHERE time < ? AND time NOT IN (SELECT min(time) FROM "
                    "samples WHERE time < ? GROUP BY CAST(time / ? AS INTEGER))",
                    (now - age, now - age, every),
                )
        self.grown_bytes = 0

    def close(self) -> None:
        """Close it; what was added is on the disk."""
        self._database.close()


def _open(path: Path) -> sqlite3.Connection:
    # Any thread may write, one after the other.
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        _check_version(path, database, "writes")
        database.execute("PRAGMA journal_mode = WAL")
        # A power failure may take the last seconds, never the file.
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_TABLES)
        with database:
            database.execute("BEGIN IMMEDIATE")
            for column in set(COLUMNS) - _columns(database):
                database.execute(f"ALTER TABLE samples ADD COLUMN {column}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        path.chmod(0o600)
    except BaseException:
        database.close()
        raise
    return database


def _check_version(path: Path, database: sqlite3.Connection, does: str) -> None:
    with closing(database.execute("PRAGMA user_version")) as rows:
        [version] = rows.fetchone()
    if version > VERSION:
        raise NodeError(
            f"{path} is of a newer release of lowcomm (version {version}, this one {does} "
            f"{VERSION}): install that release, or move the file away."
        )


def _columns(database: sqlite3.Connection) -> set[str]:
    """Columns of samples: a journal of an older release has fewer."""
    with closing(database.execute("SELECT name FROM pragma_table_info('samples')")) as rows:
        return {name for [name] in rows}


class Recorder:
    """Writes the journal of one node. It never holds the node up: failures are warned of once."""

    def __init__(self, board: Board, look: Callable[[], Status]) -> None:
        """Notices wait from now on, until ``open`` names the file."""
        self._board = board
        self._look = look
        self._queue = board.subscribe()
        self._closing = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def open(self, path: Path) -> None:
        """Write to this file from now on."""
        self._running = start(self._run(path))

    async def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        if self._running is not None:
            _, late = await asyncio.wait({self._running}, timeout=CLOSE_DEADLINE)
            if late:  # the rest of the goodbye goes on
                self._running.cancel()
                log.warning("journal.not_written", reason="the disk hangs")
        self._board.queues.discard(self._queue)

    async def _run(self, path: Path) -> None:
        board, enduring = self._board, Enduring(NOT_WRITTEN, self._board.warning("defect"))
        notices, samples, file = list[Notice](), list[Sample](), None
        sampled = pruned = float("-inf")
        is_failing = is_last = False

        def store() -> None:
            nonlocal file, pruned
            file = file or JournalFile(path)
            file.add(notices, samples)
            if monotonic() - pruned >= PRUNE_EVERY or file.grown_bytes >= PRUNE_BYTES:
                file.prune(time())
                pruned = monotonic()

        while not is_last:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_EVERY):
                    await self._closing.wait()
            is_last = self._closing.is_set()
            if is_last or monotonic() - sampled >= SAMPLE_EVERY:
                sampled = monotonic()
                with enduring:
                    samples = [*samples, sample(time(), self._look())][-MAX_SAMPLES:]
            while not self._queue.empty():
                notices.append(self._queue.get_nowait())
            del notices[: -self._queue.maxsize]
            with enduring:
                try:
                    if notices or samples:
                        await asyncio.to_thread(store)  # a disk may take seconds
                        notices, samples = [], []
                    if is_failing:
                        is_failing = False
                        board.withdraw("journal")
                except (sqlite3.Error, OSError, NodeError) as error:  # it is tried again
                    if not is_failing:
                        is_failing = True
                        log.warning("journal.not_written", path=str(path), reason=str(error))
                        text = f"{NOT_WRITTEN} ({path}: {error}): training goes on"
                        board.warn("journal", text)
        if file is not None:
            file.close()


# --- Reading --------------------------------------------------------------------------------------


class Journal:
    """A journal to read, also while its node writes, and after it was killed.

    Methods raise NodeError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        """Raises NodeError if there is none, or it can't be read."""
        self._path = path
        if not path.exists():
            raise NodeError(
                f"{path} is missing: this home has written nothing down of that run. A node keeps "
                "a journal from its first start with this release."
            )
        with self._reading() as database:
            _check_version(path, database, "reads")

    def exchanges(
        self, limit: int, since: float = 0.0, outcome: str | None = None, peer: str = ""
    ) -> list[ExchangeEnded]:
        """The last exchanges since a time (Unix seconds), newest last.

        ``peer``: part of the peer id of a partner.
        """
        chosen = (
            event
            for event in self.each_exchange(outcome or "%", since, "DESC")
            if not peer or any(peer in partner for partner in event.partners)
        )
        return list(islice(chosen, min(limit, MOST)))[::-1]

    def each_exchange(
        self, outcome: str = "%", since: float = 0.0, order: str = "ASC"
    ) -> Iterator[ExchangeEnded]:
        """Yield all exchanges that are kept, one at a time."""
        which = f"name LIKE ? AND time >= ? ORDER BY id {order}"
        for notice in self._notices(which, f"exchange.{outcome}", since):
            if isinstance(notice.event, ExchangeEnded):
                yield notice.event

    def notices(self, after: int = 0, limit: int = MOST) -> list[Notice]:
        """Up to ``limit`` notices behind a number, oldest first."""
        return list(self._notices("id > ? ORDER BY id LIMIT ?", after, min(limit, MOST)))

    def last_notices(self, limit: int, name: str = "%") -> list[Notice]:
        """The last notices, newest last; ``name``: of one kind of event."""
        which = "name LIKE ? ORDER BY id DESC LIMIT ?"
        return list(self._notices(which, name, min(limit, MOST)))[::-1]

    def samples_after(self, time: float, limit: int = MOST) -> list[Sample]:
        """Up to ``limit`` samples behind a time (Unix seconds), oldest first."""
        return self._samples("samples WHERE time > ? ORDER BY time LIMIT ?", time, limit)

    def samples(self, since: float = 0.0, most: int = MOST) -> list[Sample]:
        """At most ``most`` samples since a time (Unix seconds), evenly thinned, oldest first."""
        return self._samples(
            "(SELECT *, row_number() OVER (ORDER BY time DESC) AS place, count(*) OVER () AS total "
            "FROM samples WHERE time >= ?) WHERE (place - 1) % max(1, (total + ? - 1) / ?) = 0 "
            "ORDER BY time",
            since,
            most,
            most,
        )

    def _notices(self, which: str, *values: Any) -> Iterator[Notice]:
        with self._reading() as database:
            query = f"SELECT id, time, content FROM notices WHERE {which}"
            for number, time, content in database.execute(query, values):
                yield read_notice({"time": time, **json.loads(content)}, number)

    def _samples(self, chosen: str, *values: float) -> list[Sample]:
        """Columns that an older release has not written are None."""
        with self._reading() as database:
            known = _columns(database)
            columns = ", ".join(one if one in known else f"NULL AS {one}" for one in COLUMNS)
            rows = list(database.execute(f"SELECT {columns} FROM {chosen}", values))
        return [Sample(**dict(zip(COLUMNS, row, strict=True))) for row in rows]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True)) as database:
                yield database
        except sqlite3.Error as error:
            raise NodeError(
                f"{self._path} can't be read: {error}. Move it away: the node begins a new one."
            ) from None
