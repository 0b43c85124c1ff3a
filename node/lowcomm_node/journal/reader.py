"""Reads a journal, also while its node writes, and after it was killed."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.errors import NodeError
from lowcomm_node.journal.file import VERSION, columns_of_samples
from lowcomm_node.journal.sample import COLUMNS, Sample
from lowcomm_node.status.events import Notice, read_notice
from lowcomm_node.sync.records import ExchangeEnded

MOST = 5000
"""Rows of one answer."""


@dataclass(frozen=True)
class Entry:
    """A notice, and its place in the journal."""

    number: int
    """Grows with every notice."""
    notice: Notice


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which exchanges are asked for."""

    outcome: str | None = None
    """As `outcome` of an exchange."""
    peer: str = ""
    """Part of the peer id of a partner."""
    since: float = 0.0
    """Unix seconds."""


class Journal:
    """A journal to read. Nothing of it is changed."""

    def __init__(self, path: Path) -> None:
        """Raises NodeError if there is none, or it can't be read."""
        self._path = path
        if not path.exists():
            raise NodeError(
                f"{path} is missing: this home has written nothing down of that run. A node keeps "
                "a journal from its first start with this release."
            )
        [[version]] = self._rows("PRAGMA user_version")
        if version > VERSION:
            raise NodeError(
                f"{path} is of a newer release of lowcomm (version {version}, this one reads "
                f"{VERSION}): install that release."
            )

    def exchanges(self, limit: int, wanted: Wanted | None = None) -> list[ExchangeEnded]:
        """The last exchanges, newest last."""
        wanted = wanted or Wanted()
        found: list[ExchangeEnded] = []
        with self._reading() as database:
            rows = database.execute(
                "SELECT time, content FROM notices WHERE name LIKE ? AND time >= ? ORDER BY id "
                "DESC",
                (f"exchange.{wanted.outcome or '%'}", wanted.since),
            )
            for time, content in rows:
                event = _notice(time, content).event
                if isinstance(event, ExchangeEnded) and _is_with(event, wanted.peer):
                    found.append(event)
                if len(found) >= min(limit, MOST):
                    break
        return found[::-1]

    def each_exchange(self) -> Iterator[ExchangeEnded]:
        """All exchanges that are kept, oldest first, one at a time."""
        with self._reading() as database:
            for time, content in database.execute(
                "SELECT time, content FROM notices WHERE name LIKE 'exchange.%' ORDER BY id"
            ):
                event = _notice(time, content).event
                if isinstance(event, ExchangeEnded):
                    yield event

    def notices(self, after: int = 0, limit: int = MOST) -> list[Entry]:
        """Up to ``limit`` notices behind a number, oldest first."""
        rows = self._rows(
            "SELECT id, time, content FROM notices WHERE id > ? ORDER BY id LIMIT ?",
            after,
            min(limit, MOST),
        )
        return [Entry(number, _notice(time, content)) for number, time, content in rows]

    def last_notices(self, limit: int) -> list[Entry]:
        """The last notices, newest last."""
        rows = self._rows(
            "SELECT id, time, content FROM notices ORDER BY id DESC LIMIT ?", min(limit, MOST)
        )
        return [Entry(number, _notice(time, content)) for number, time, content in rows[::-1]]

    def last_notices_named(self, name: str, limit: int) -> list[Entry]:
        """The last notices of one kind of event, newest last."""
        with self._reading() as database:
            rows = list(
                database.execute(
                    "SELECT id, time, content FROM notices WHERE name = ? ORDER BY id DESC LIMIT ?",
                    (name, min(limit, MOST)),
                )
            )
        return [Entry(number, _notice(time, content)) for number, time, content in rows[::-1]]

    def samples(self, since: float = 0.0, most: int = MOST) -> list[Sample]:
        """At most ``most`` samples since a time (Unix seconds), evenly thinned, oldest first."""
        [[count]] = self._rows("SELECT count(*) FROM samples WHERE time >= ?", since)
        return self._samples(
            "(SELECT *, row_number() OVER (ORDER BY time DESC) "
            "AS place FROM samples WHERE time >= ?) WHERE (place - 1) % ? = 0 ORDER BY time",
            since,
            max(1, -(-count // most)),
        )

    def samples_after(self, time: float, limit: int = MOST) -> list[Sample]:
        """Up to ``limit`` samples behind a time (Unix seconds), oldest first."""
        return self._samples("samples WHERE time > ? ORDER BY time LIMIT ?", time, min(limit, MOST))

    def _samples(self, chosen: str, *values: float) -> list[Sample]:
        """What an older release has not written down is None."""
        with self._reading() as database:
            known = columns_of_samples(database)
            wanted = ", ".join(one if one in known else f"NULL AS {one}" for one in COLUMNS)
            rows = list(database.execute(f"SELECT {wanted} FROM {chosen}", values))
        return [Sample(**dict(zip(COLUMNS, row, strict=True))) for row in rows]

    def _rows(self, query: str, *values: float) -> list[tuple[Any, ...]]:
        with self._reading() as database:
            return list(database.execute(query, values))

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


def _notice(time: float, content: str) -> Notice:
    return read_notice({"time": time, **json.loads(content)})


def _is_with(event: ExchangeEnded, peer: str) -> bool:
    return not peer or any(peer in partner for partner in event.partners)
