"""What must hold for a journal: what was told is there after a kill, and it stays small."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.statuses import make_exchange, make_status
from helpers.waiting import until_async
from lowcomm_node.errors import NodeError
from lowcomm_node.status import journal as files
from lowcomm_node.status import journal as recorders
from lowcomm_node.status.events import Board, Notice, Resumed, Warned
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.journal import (
    COLUMNS,
    NOT_WRITTEN,
    Journal,
    JournalFile,
    Recorder,
)
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.logs import Event
from lowcomm_protocol.exchange.events import Outcome

pytestmark = pytest.mark.slow

NOW = 1_800_000_000.0
SAMPLE = Sample(
    time=NOW,
    phase="training",
    waiting=None,
    swarm_step=5,
    steps=4,
    tokens=400,
    loss=2.5,
    val_loss=None,
    tokens_per_second=80.0,
    peers=3,
    completed=2,
    failed=1,
    bytes_sent=1000,
    bytes_received=900,
    memory=10**9,
)


def exchange(number: int, outcome: Outcome = Outcome.APPLIED, peer: str = "12D3A") -> ExchangeEnded:
    return make_exchange(time=NOW + number, round=number, outcome=outcome, partners=[peer])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.db"


def rows(path: Path, table: str) -> int:
    with sqlite3.connect(path) as database:
        return database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


async def recorded(path: Path, *events: Event) -> None:
    board = Board()
    recorder = Recorder(board, make_status)
    for event in events:
        board.tell(event)
    recorder.open(path)
    await recorder.close()


def row(event: Event, time: float = NOW) -> Notice:
    return Notice(time, event)


async def test_what_a_node_told_is_read_as_it_was_told(path: Path):
    events = [Resumed(), exchange(1), Warned(text="the disk is nearly full")]
    await recorded(path, *events)
    journal = Journal(path)
    assert [entry.event for entry in journal.notices()] == events
    assert journal.exchanges(10) == [events[1]]
    assert [entry.event for entry in journal.last_notices(1)] == events[-1:]
    assert len(journal.samples()) == 1


def test_a_killed_writer_loses_nothing_that_it_added(path: Path):
    script = (
        "import sys, time, pathlib\n"
        "from lowcomm_node.status.journal import JournalFile\n"
        "from lowcomm_node.status.events import Notice, Resumed\n"
        "JournalFile(pathlib.Path(sys.argv[1])).add([Notice(1.0, Resumed())], [])\n"
        "print('added', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen(
        (sys.executable, "-c", script, str(path)), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout
        assert child.stdout.readline() == "added\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    assert [entry.event for entry in Journal(path).notices()] == [Resumed()]


def test_it_stays_bounded_the_newest_exchanges_stay_and_old_samples_thin_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "MAX_EXCHANGES", 20)
    monkeypatch.setattr(files, "MAX_OTHERS", 5)
    file = JournalFile(path)
    others = [row(Resumed(), NOW - number) for number in range(30)]
    exchanges = [row(exchange(number)) for number in range(50)]
    day = [replace(SAMPLE, time=NOW - 10.0 * number) for number in range(8640)]
    older = [replace(SAMPLE, time=NOW - 86410 - 10.0 * number) for number in range(360)]
    ancient = [replace(SAMPLE, time=NOW - files.KEPT_SECONDS - 1)]
    file.add([*others, *exchanges], [*day, *older, *ancient])
    file.prune(NOW)
    file.close()
    journal = Journal(path)
    assert [one.round for one in journal.exchanges(100)] == list(range(30, 50))
    assert rows(path, "notices") == 25
    kept = journal.samples(most=100_000)
    assert sum(one.time >= NOW - 86400 for one in kept) == 8640
    assert 60 <= sum(one.time < NOW - 86400 for one in kept) <= 61
    assert all(one.time > NOW - files.KEPT_SECONDS for one in kept)


def test_a_damaged_journal_is_set_aside_and_a_newer_one_is_refused(path: Path):
    path.parent.mkdir()
    path.write_bytes(b"no database " * 1000)
    JournalFile(path).close()
    assert path.with_name("journal.db.damaged").exists()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 9")
    for opening in (JournalFile, Journal):
        with pytest.raises(NodeError, match="of a newer release"):
            opening(path)


async def test_a_disk_that_takes_nothing_is_warned_of_once_and_nothing_is_lost_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorders, "WRITE_EVERY", 0.01)
    loop, written, refusals = asyncio.get_running_loop(), asyncio.Event(), [1] * 5
    add = JournalFile.add

    def refuse(*given: Any) -> int:
        if refusals:
            refusals.pop()
            raise sqlite3.OperationalError("database or disk is full")
        newest = add(*given)
        loop.call_soon_threadsafe(written.set)
        return newest

    monkeypatch.setattr(JournalFile, "add", refuse)
    board = Board()
    recorder = Recorder(board, make_status)
    recorder.open(path)
    board.tell(exchange(1))
    async with asyncio.timeout(30):
        await written.wait()
    await recorder.close()
    events = [entry.event for entry in Journal(path).notices()]
    assert events[0] == exchange(1)
    assert [NOT_WRITTEN in str(event) for event in events[1:]] == [True]
    assert board.warnings == []


async def test_a_disk_that_hangs_does_not_hold_up_a_node_that_leaves(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorders, "CLOSE_DEADLINE", 0.05)
    works = threading.Event()
    monkeypatch.setattr(JournalFile, "add", lambda *given: works.wait(60))
    recorder = Recorder(Board(), make_status)
    recorder.open(path)
    try:
        async with asyncio.timeout(30):
            await recorder.close()
        assert not works.is_set()
    finally:
        works.set()


async def test_a_journal_stays_small_whatever_is_noted_and_however_fast(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Must be seen. Only the number of notices was bounded, and looked at once an hour."""
    monkeypatch.setattr(files, "MAX_BYTES", 300_000)
    monkeypatch.setattr(recorders, "PRUNE_BYTES", 100_000)
    monkeypatch.setattr(recorders, "WRITE_EVERY", 0.01)
    board = Board()
    recorder = Recorder(board, make_status)
    recorder.open(path)
    for number in range(20):
        board.tell(Warned(text=f"{number} " + "x" * 100_000))
        await until_async(lambda: recorder._queue.empty(), 30, "it is written")
    await recorder.close()
    kept = Journal(path).notices()
    assert sum(len(json.dumps(one.to_json())) for one in kept) < 400_000
    assert [one.number for one in kept] == [19, 20], "the newest stay"


def of_the_first_version(path: Path) -> Sample:
    """A journal as release 0.1.0 began it, with one sample."""
    first = replace(SAMPLE, refused=None, no_partner=None, computing=None, waited=None)
    old = COLUMNS[: COLUMNS.index("refused")]
    path.parent.mkdir(exist_ok=True)
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE notices (id INTEGER PRIMARY KEY, time REAL NOT NULL, name TEXT NOT NULL,"
            f" content TEXT NOT NULL); CREATE TABLE samples (time REAL PRIMARY KEY,"
            f" {', '.join(old[1:])}); PRAGMA user_version = 1"
        )
        places = ", ".join("?" * len(old))
        database.execute(f"INSERT INTO samples VALUES ({places})", astuple(first)[: len(old)])
    return first


def test_a_journal_of_an_older_release_is_read_as_it_is_and_goes_on_in_todays_form(path: Path):
    first = of_the_first_version(path)
    assert Journal(path).samples() == Journal(path).samples_after(0.0) == [first]
    assert "refused" not in path.read_bytes().decode(errors="replace"), "reading changes nothing"
    second = replace(SAMPLE, time=NOW + 10, refused=3, computing=7.5, waited=0.5)
    for _ in range(2):
        file = JournalFile(path)
        file.add([], [second])
        file.close()
    assert Journal(path).samples() == [first, second]
    assert Journal(path).samples_after(NOW) == [second]
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (files.VERSION,)
