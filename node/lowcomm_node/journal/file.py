"""The file of a journal: SQLite with a write-ahead log, so that a killed node loses nothing told.

Two tables. ``notices``: events as JSON, but for inner steps. ``samples``: the node's figures every
few seconds. Both are bounded: of exchanges the newest stay, and samples thin out with age. Freed
pages are used again, so the file stays below 50 MB however long the node runs, and whatever it
notes."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lowcomm_node.errors import NodeError
from lowcomm_node.journal.sample import COLUMNS, Sample

VERSION = 2
"""1 had fewer columns of samples: they are added when a node opens such a file."""
MAX_EXCHANGES = 30_000
"""Notices of exchanges that are kept, of some 700 bytes each."""
MAX_OTHERS = 10_000
"""Notices of anything else that are kept."""
MAX_BYTES = 32 * 1024 * 1024
"""Bytes of all notices that are kept."""
LASTS = 90 * 86400.0
"""Seconds that anything is kept."""
THINNED = ((86400.0, 60.0), (7 * 86400.0, 600.0))
"""From such an age on, in seconds, one sample in so many seconds stays."""
_EXCHANGES = "name LIKE 'exchange.%'"
_TABLES = f"""
CREATE TABLE IF NOT EXISTS notices
    (id INTEGER PRIMARY KEY, time REAL NOT NULL, name TEXT NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (time REAL PRIMARY KEY, {", ".join(COLUMNS[1:])});
"""

Row = tuple[float, str, str]
"""Time, name and content of a notice."""


class JournalFile:
    """An open journal that is written. Not for two threads at a time.

    Methods raise sqlite3.Error, as where the disk is full.
    """

    def __init__(self, path: Path) -> None:
        """Open or create it; a damaged one is set aside as ``.damaged``. Raises NodeError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.grown_bytes = 0
        """Bytes of the notices that were added since it was pruned."""
        try:
            self._database = _open(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # the disk, not the file
                raise
            _set_aside(path)
            self._database = _open(path)

    def add(self, notices: Sequence[Row], samples: Sequence[Sample]) -> int:
        """Write both in one transaction; the number of the last notice, 0 if there is none.

        Notices of one call have consecutive numbers."""
        places = ", ".join("?" * len(COLUMNS))
        with self._database:
            self._database.executemany(
                "INSERT INTO notices (time, name, content) VALUES (?, ?, ?)", notices
            )
            self.grown_bytes += sum(len(content) for _, _, content in notices)
            self._database.executemany(
                f"INSERT OR REPLACE INTO samples ({', '.join(COLUMNS)}) VALUES ({places})",
                [one.row() for one in samples],
            )
            with closing(self._database.execute("SELECT max(id) FROM notices")) as told:
                return told.fetchone()[0] or 0

    def prune(self, now: float) -> None:
        """Drop what is too old or too much. ``now``: Unix seconds."""
        with self._database as database:
            for table in ("notices", "samples"):
                database.execute(f"DELETE FROM {table} WHERE time < ?", (now - LASTS,))
            for which, most in ((_EXCHANGES, MAX_EXCHANGES), (f"NOT {_EXCHANGES}", MAX_OTHERS)):
                newest = f"SELECT id FROM notices WHERE {which} ORDER BY id DESC LIMIT 1 OFFSET ?"
                database.execute(
                    f"DELETE FROM notices WHERE {which} AND id <= ({newest})",
                    (most,),
                )
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
        with closing(database.execute("PRAGMA user_version")) as told:
            [version] = told.fetchone()
        if version > VERSION:
            raise NodeError(
                f"{path} is of a newer release of lowcomm (version {version}, this one writes "
                f"{VERSION}): install that release, or move the file away."
            )
        database.execute("PRAGMA journal_mode = WAL")
        # A power failure may take the last seconds, never the file.
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_TABLES)
        with database:
            database.execute("BEGIN IMMEDIATE")
            known = columns_of_samples(database)
            for column in COLUMNS:
                if column not in known:
                    database.execute(f"ALTER TABLE samples ADD COLUMN {column}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        path.chmod(0o600)
    except BaseException:
        database.close()
        raise
    return database


def columns_of_samples(database: sqlite3.Connection) -> frozenset[str]:
    """The columns of samples in an open journal: one of an older release has fewer."""
    with closing(database.execute("SELECT name FROM pragma_table_info('samples')")) as told:
        return frozenset(name for [name] in told)


def _set_aside(path: Path) -> None:
    path.replace(path.with_name(f"{path.name}.damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
