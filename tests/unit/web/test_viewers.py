"""What must hold for those who watch a node: events come in order, then its end, and those who do
not read cost nothing."""

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
from lowcomm_node.status.events import Board, Warned
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web import http, viewers
from lowcomm_node.web.api import ROOT
from lowcomm_node.web.server import ControlServer
from lowcomm_node.web.viewers import MAX_VIEWERS, MAX_WAITING, Viewers


class Node:
    """A node that counts looks at its status."""

    def __init__(self) -> None:
        self.board = Board()
        self.looked = 0

    def tell(self, *numbers: int) -> None:
        for number in numbers:
            self.board.tell(Warned(text=str(number)))

    def status(self) -> Any:
        self.looked += 1
        return make_status(warnings=["x" * 4000])

    def peers(self) -> Any:
        return [make_peer()]

    def viewers(self) -> Viewers:
        return Viewers(self.board, self.status, self.peers)


def read(chunk: bytes) -> list[tuple[str, Any]]:
    """Events of a stream: kind, data."""
    found = []
    for block in chunk.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def notices(stream: AsyncIterator[bytes], last: int) -> list[int]:
    """Numbers of the notices until a number has come."""
    found: list[int] = []
    while not found or found[-1] < last:
        chunk = await asyncio.wait_for(anext(stream), 20)
        found += [int(data["text"]) for kind, data in read(chunk) if kind == "notice"]
    return found


async def test_a_viewer_reads_history_first_and_gets_what_follows() -> None:
    node = Node()
    node.tell(1)
    stream = node.viewers().watch()
    assert [kind for kind, _ in read(await anext(stream))] == ["reset", "state"]
    node.tell(2, 3)
    assert await notices(stream, 3) == [2, 3]


async def test_the_end_comes_last_and_ends_the_stream() -> None:
    node = Node()
    watched = node.viewers()
    stream = watched.watch()
    await anext(stream)
    node.tell(1, 2)
    watched.end("the run is over")
    found = read(b"".join([one async for one in stream]))
    assert [int(data["text"]) for kind, data in found if kind == "notice"] == [1, 2]
    assert found[-1][0] == "end"
    assert found[-1][1]["text"] == "the run is over"
    assert not watched.queues


async def test_a_viewer_who_reads_too_slowly_begins_anew_and_still_sees_the_end() -> None:
    node = Node()
    watched = node.viewers()
    stream = watched.watch()
    await anext(stream)
    for number in range(MAX_WAITING + 50):
        node.tell(number)
        await asyncio.sleep(0)
    watched.end("over")
    found = read(b"".join([one async for one in stream]))
    assert len(found) < MAX_WAITING
    assert found[0][0] == "reset"
    assert found[-1][0] == "end"


# over HTTP


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Node, ControlServer, int, str]]:
    node = Node()
    server = ControlServer(node, node.board, Paths(tmp_path))
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


@pytest.mark.slow
async def test_viewers_who_never_read_are_turned_away_or_cut_off(
    served: tuple[Node, ControlServer, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "STATE_EVERY", 0.02)
    monkeypatch.setattr(http, "READ_DEADLINE", 0.5)
    _, server, port, token = served
    sleepers: list[socket.socket] = []
    try:
        for _ in range(6):
            sleepers += [await asyncio.to_thread(asking, port, token) for _ in range(50)]
            assert len(server._viewers.queues) <= MAX_VIEWERS
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False
        ) as client:
            answer = await client.get(f"{ROOT}/status", headers=headers)
            assert answer.status_code == 200, "the owner is answered all the same"
        await until_async(
            lambda: not server._viewers.queues, 60, "those who do not read are cut off"
        )
    finally:
        for one in sleepers:
            one.close()


async def test_who_finds_no_place_is_told_why(
    served: tuple[Node, ControlServer, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowcomm_node.web.server.MAX_VIEWERS", 0)
    _, _, port, token = served
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        answer = await client.get(f"{ROOT}/events", headers=headers)
    assert answer.status_code == 503
    assert "close some pages" in answer.json()["error"]
