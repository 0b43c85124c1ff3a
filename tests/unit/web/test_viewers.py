"""What must hold for those who watch a node: each notice comes once, in order, whatever breaks in
between, and nobody who does not read costs anything."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.statuses import make_peer, make_status
from helpers.waiting import until_async
from lowcomm_node.status.events import Notice, Warned
from lowcomm_node.status.journal import Entry, Feed, sample
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system import tasks
from lowcomm_node.web import http as listening
from lowcomm_node.web import viewers
from lowcomm_node.web.api import ROOT
from lowcomm_node.web.server import ControlServer
from lowcomm_node.web.viewers import MAX_VIEWERS, MISSED, Viewers, read_last


def entry(number: int) -> Entry:
    return Entry(number, Notice(float(number), Warned(text=f"number {number}")))


class Node:
    """A node whose journal holds a notice for each number that was told."""

    def __init__(self) -> None:
        self.feed = Feed()
        self.journal: list[Entry] = []
        self.looked = 0

    def tell(self, count: int) -> None:
        new = [entry(len(self.journal) + 1 + place) for place in range(count)]
        self.journal += new
        self.feed.publish(len(self.journal), new, None)

    def status(self) -> Any:
        self.looked += 1
        return make_status(warnings=["x" * 4000])

    def peers(self) -> Any:
        return [make_peer()]

    async def missed(self, number: int, most: int) -> list[Entry]:
        return [one for one in self.journal if one.number > number][:most]

    def watched(self) -> Viewers:
        return Viewers(self.feed, lambda: {"looked": self.looked}, self.missed)


def told(chunk: bytes) -> list[tuple[int | None, str, Any]]:
    """Events of a stream: number, kind, data."""
    found = []
    for block in chunk.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in lines:
            number = int(lines["id"]) if "id" in lines else None
            found.append((number, lines["event"], json.loads(lines["data"])))
    return found


async def notices(stream: AsyncIterator[bytes], last: int) -> list[int]:
    """Numbers of the notices until a number has come."""
    found: list[int] = []
    while not found or found[-1] < last:
        chunk = await asyncio.wait_for(anext(stream), 20)
        found += [number for number, kind, _ in told(chunk) if kind == "notice" and number]
    return found


async def test_a_new_viewer_begins_now_and_is_told_what_follows():
    node = Node()
    node.tell(5)
    stream = node.watched().watch(None)
    first = told(await anext(stream))
    assert first == [(5, "reset", {"newest": 5})]
    node.tell(2)
    assert await notices(stream, 7) == [6, 7]


@pytest.mark.parametrize("kept", [1000, 2])
async def test_after_a_break_each_notice_comes_once(kept: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowcomm_node.status.journal.KEPT", kept)
    node = Node()
    watched = node.watched()
    seen: list[int] = []
    node.tell(3)
    last = 0
    for _ in range(4):
        stream = watched.watch(last)
        node.tell(5)
        seen += await notices(stream, len(node.journal))
        last = seen[-1]
        await stream.aclose()  # type: ignore[attr-defined]
        node.tell(3)  # while nobody listens
    seen += await notices(watched.watch(last), len(node.journal))
    assert seen == list(range(1, len(node.journal) + 1))
    assert len(watched) == 0 or len(watched) == 1


@pytest.mark.parametrize("last", [10**6, -1])
async def test_who_knows_a_number_that_is_not_ours_or_missed_too_much_begins_anew(last: int):
    node = Node()
    node.tell(MISSED + 5)
    last = 1 if last < 0 else last
    assert told(await anext(node.watched().watch(last))) == [
        (MISSED + 5, "reset", {"newest": MISSED + 5})
    ]


async def test_before_the_journal_is_open_the_state_is_told_alone():
    node = Node()
    stream = node.watched().watch(7)
    assert [kind for _, kind, _ in told(await anext(stream))] in (["state"], [])
    node.journal = [entry(number) for number in range(1, 9)]
    node.feed.publish(9, [entry(9)], sample(9.0, make_status()))
    chunk = b""
    while b"event: sample" not in chunk:
        chunk += await asyncio.wait_for(anext(stream), 20)
    kinds = [(number, kind) for number, kind, _ in told(chunk) if kind != "state"]
    assert kinds == [(8, "notice"), (9, "notice"), (None, "sample")] or kinds == [
        (8, "notice"),
        (None, "sample"),
    ]


async def test_the_state_is_looked_up_once_for_all_and_not_at_all_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(viewers, "STATE_EVERY", 1e6)
    node, looks = Node(), []
    node.tell(1)
    watched = Viewers(node.feed, lambda: looks.append(1) or {"looks": len(looks)}, node.missed)
    streams = [watched.watch(None) for _ in range(20)]
    for stream in streams:
        chunk = b""
        while b"event: state" not in chunk:
            chunk += await asyncio.wait_for(anext(stream), 20)
    assert len(looks) == 1
    assert len(watched) == 20
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    assert len(watched) == 0
    node.tell(1)
    assert len(looks) == 1


async def test_the_end_comes_last_and_ends_the_stream():
    node = Node()
    watched = node.watched()
    stream = watched.watch(0)
    node.tell(2)
    assert await notices(stream, 2) == [1, 2]
    node.tell(1)
    watched.end({"text": "the run is over"})
    rest = [one async for one in stream]
    found = told(b"".join(rest))
    assert [number for number, kind, _ in found if kind == "notice"] == [3]
    assert found[-1] == (None, "end", {"text": "the run is over"})
    assert len(watched) == 0


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tasks, "DEFECT_PAUSE", 0.001)
    node, failures = Node(), [RuntimeError("no status")] * 2
    warnings: list[str] = []

    def look() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {}

    watched = Viewers(node.feed, look, node.missed, warnings.append)
    stream = watched.watch(None)
    assert told(await asyncio.wait_for(anext(stream), 20)) == [(None, "state", {})]
    assert len(warnings) == 1
    await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", None, "x", "-1", "1e3", "９", "1" * 30, "7;8"])
def test_numbers_that_no_stream_has_told_count_as_none(text: str | None):
    assert read_last(text) is None
    assert read_last(" 12 ") == 12


# over HTTP


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Node, ControlServer, int, str]]:
    node = Node()
    node.tell(1)
    server = ControlServer(node, Paths(tmp_path), node.feed)  # type: ignore[arg-type]
    await server.start(0, "me")
    content = json.loads(Paths(tmp_path).control.read_text())
    try:
        yield node, server, content["port"], content["token"]
    finally:
        await server.close()


def asking(port: int, token: str, size: int = 2048) -> socket.socket:
    """A client that asks for events and never reads."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    one.settimeout(20)
    one.connect(("127.0.0.1", port))
    one.sendall(
        f"GET {ROOT}/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n"
        f"Authorization: Bearer {token}\r\n\r\n".encode()
    )
    return one


async def test_events_over_http_go_on_where_the_last_stream_ended(
    served: tuple[Node, ControlServer, int, str],
):
    node, _, port, token = served
    node.tell(9)
    headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        client.stream("GET", f"{ROOT}/events", headers={**headers, "Last-Event-ID": "4"}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        assert await notices(answer.aiter_bytes(), 10) == list(range(5, 11))


@pytest.mark.slow
async def test_a_thousand_viewers_who_never_read_are_turned_away_or_cut_off(
    served: tuple[Node, ControlServer, int, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(viewers, "STATE_EVERY", 0.02)
    monkeypatch.setattr(listening, "READ_DEADLINE", 0.5)
    _, server, port, token = served
    sleepers: list[socket.socket] = []
    try:
        for _ in range(20):
            batch = [await asyncio.to_thread(asking, port, token) for _ in range(50)]
            sleepers += batch
            assert len(server._viewers) <= MAX_VIEWERS
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False
        ) as client:
            answer = await client.get(f"{ROOT}/status", headers=headers)
            assert answer.status_code == 200, "the owner is answered all the same"

        async def nobody() -> bool:
            return len(server._viewers) == 0

        await until_async(nobody, 60, "those who do not read are cut off")
    finally:
        for one in sleepers:
            one.close()


async def test_who_finds_no_place_is_told_why(
    served: tuple[Node, ControlServer, int, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lowcomm_node.web.server.MAX_VIEWERS", 2)
    _, server, port, token = served
    there = [await asyncio.to_thread(asking, port, token) for _ in range(2)]
    try:

        async def both() -> bool:
            return len(server._viewers) == 2

        await until_async(both, 20, "both watch")
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False
        ) as client:
            answer = await client.get(f"{ROOT}/events", headers=headers)
        assert answer.status_code == 503
        assert "close some pages" in answer.json()["error"]
    finally:
        for one in there:
            one.close()

    async def gone() -> bool:
        return len(server._viewers) == 0

    await until_async(gone, 20, "their places are free")
