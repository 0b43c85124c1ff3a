"""The control API between a command and the daemon: the real client against the real server, with a
stand-in node."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from helpers.stand_in import StandIn, port_of, serving
from helpers.statuses import make_exchange, make_peer, make_status
from helpers.waiting import until, until_async
from lowcomm_node.cli.common import Here
from lowcomm_node.cli.running import web
from lowcomm_node.errors import NotRunning, Unhealthy
from lowcomm_node.status.events import Board, Notice, PhaseEntered, Warned, read_notice
from lowcomm_node.status.model import Status
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.logs import Event
from lowcomm_node.web import http as listening
from lowcomm_node.web.api import ROOT
from lowcomm_node.web.client import ControlClient, read_endpoint
from lowcomm_node.web.server import ControlServer

pytestmark = pytest.mark.slow

STATUS, PEER = make_status(peer_id="12D3KooWx"), make_peer()


class Node(StandIn):
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        super().__init__(STATUS)
        self.known = [PEER]
        self.past = [make_exchange(round=number) for number in range(3)]
        self.loop: asyncio.AbstractEventLoop | None = None

    def tell(self, event: Event) -> None:
        """Tell an event from another thread."""
        self.loop.call_soon_threadsafe(self.board.tell, event)

    def request_finish(self) -> None:
        self.calls.append("finish")

    def request_stop(self, now: bool) -> None:
        self.calls.append("stop now" if now else "stop")

    def resume(self) -> None:
        self.calls.append("resume")

    async def generate(self, prompt: str, chat: Sequence[str], before: bool, **draw: object) -> str:
        assert not before
        self.calls.append((prompt, *draw.values(), *chat))
        return prompt.upper()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with the home ``tmp_path``."""
    node = Node()
    with serving(node, tmp_path) as node.loop:
        until(lambda: listens(port_of(tmp_path)), 20, "the server listens")
        yield node
    assert not {"control.json", "control.sock", "open.html"} & {
        one.name for one in tmp_path.iterdir()
    }


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_control(home: Path, **changes: Any) -> None:
    content = {"port": 1, "token": "t", "pid": os.getpid(), "peer_id": "p"} | changes
    Paths(home).control.write_text(json.dumps(content))


@contextmanager
def answering(reply: bytes | None) -> Iterator[int]:
    """A port that takes every connection and answers ``reply``; None: never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                taken.append(connection)
                if reply is not None:
                    connection.recv(65536)
                    connection.sendall(reply)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in taken:
                connection.close()
            thread.join(10)
    assert not thread.is_alive()


def test_what_the_node_tells_arrives_unchanged(node: Node, tmp_path: Path) -> None:
    with ControlClient(tmp_path) as client:
        assert client.status() == STATUS
        assert client.peers() == [PEER]
        assert client.exchanges(3) == [make_exchange(round=number) for number in range(3)]
        assert client.generate("def ", 7, 0.25, 9) == "DEF "
        client.generate("", 7, 0.25, 9, ["hi", "hello", "and now?"])
    assert node.calls == [("def ", 7, 0.25, 9), ("", 7, 0.25, 9, "hi", "hello", "and now?")]


def test_events_come_one_by_one_while_the_node_runs(node: Node, tmp_path: Path) -> None:
    with ControlClient(tmp_path) as client:
        events = following(client, node)
        node.tell(PhaseEntered(phase="finished"))
        assert next(events).event == PhaseEntered(phase="finished")
    until(lambda: not listeners(node), 20, "the node forgets a listener that has gone")


def listeners(node: Node) -> int:
    """Those who follow events."""
    return len(node.board.queues)


def events_of(client: ControlClient) -> Iterator[Notice]:
    """Events as they happen, until the node ends, which may cut the stream short."""
    ask = client._http.stream("GET", f"{ROOT}/events", timeout=httpx.Timeout(10, read=None))
    with ask as told, suppress(httpx.RemoteProtocolError):
        yield from (read_notice(json.loads(line)) for line in told.iter_lines() if line)


def following(client: ControlClient, node: Node) -> Iterator[Notice]:
    """Events from here on, once the node has counted us in."""
    events, known = events_of(client), listeners(node)
    first: list[Notice] = []
    reading = threading.Thread(target=lambda: first.append(next(events)))
    reading.start()
    until(lambda: listeners(node) > known, 20, "the node has a listener")
    node.tell(Warned(text="first"))
    reading.join(20)
    assert first[0].event == Warned(text="first")
    return events


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda client: client.finish(), "finish"),
        (lambda client: client.stop(), "stop"),
        (lambda client: client.stop(now=True), "stop now"),
        (lambda client: client.pause(1800.0), ("pause", 1800.0)),
        (lambda client: client.pause(None), ("pause", None)),
        (lambda client: client.resume(), "resume"),
    ],
)
def test_only_stop_now_leaves_without_saving(
    node: Node, tmp_path: Path, ask: Callable[[ControlClient], None], told: str
) -> None:
    with ControlClient(tmp_path) as client:
        ask(client)
    assert node.calls == [told]


def test_without_the_token_nothing_is_told_and_nothing_done(node: Node, tmp_path: Path) -> None:
    content = json.loads(Paths(tmp_path).control.read_text())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_control(elsewhere, port=content["port"], token=content["token"][:-1])
    with ControlClient(elsewhere) as client:
        for ask in (client.status, client.peers, client.exchanges, client.finish, client.stop):
            with pytest.raises(Unhealthy, match="token"):
                ask()
        assert client._http.get(f"{ROOT}/events").status_code == 401
    assert node.calls == []
    assert not listeners(node)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("doctor", {"peers": 5}, "'peers' can't be 5"),
        ("generate", {"tokens": None}, "'tokens' can't be null"),
        ("generate", {"tokens": True}, "'tokens' can't be true"),
        ("generate", {"temperature": "hot"}, "'temperature' can't be"),
        ("ping", {"peer": ["x"]}, "'peer' can't be"),
        ("stop", {"now": 1}, "'now' can't be 1"),
        ("pause", {"seconds": "30m"}, "'seconds' can't be"),
        ("pause", {"seconds": -1}, "greater than 0"),
        ("pause", {"seconds": float("nan")}, "'seconds' can't be"),
        ("pause", {"seconds": 1e12}, "less than or equal"),
        ("stop", [], "Expected a JSON object"),
        ("stop", iter([b"[" * 30_000]), "Expected a JSON object"),
        ("stop", iter([b" " * 1000] * 100), "more than 65536 bytes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_reason(
    node: Node, tmp_path: Path, path: str, body: Any, words: str
) -> None:
    given = json.loads(Paths(tmp_path).control.read_text())
    connection = HTTPConnection("127.0.0.1", given["port"], timeout=20)
    with closing(connection):
        headers = {"Authorization": f"Bearer {given['token']}"}
        content = body if isinstance(body, Iterator) else json.dumps(body).encode()
        chunked = isinstance(body, Iterator)
        connection.request("POST", f"{ROOT}/{path}", content, headers, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 400
        assert words in json.loads(answer.read())["error"]
    assert not node.calls


def test_without_a_control_file_no_node_runs(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match=r"lowcomm-node join.*--home") as caught:
        ControlClient(tmp_path)
    assert caught.value.exit_code == 3


def test_a_process_that_nobody_has_reaped_counts_as_ended(tmp_path: Path) -> None:
    ending = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write_control(tmp_path, pid=ending.pid)
    try:
        with ControlClient(tmp_path) as client:
            assert not client.wait_ended(0.0)
            ending.stdin.close()
            assert client.wait_ended(20.0)
        with pytest.raises(NotRunning):
            read_endpoint(tmp_path)
    finally:
        ending.kill()
        ending.wait()


def test_a_node_that_does_not_answer_is_unhealthy(tmp_path: Path) -> None:
    with answering(None) as port:
        write_control(tmp_path, port=port)
        with (
            ControlClient(tmp_path, timeout=0.2) as client,
            pytest.raises(Unhealthy, match="does not answer") as caught,
        ):
            client.status()
    assert caught.value.exit_code == 4


ASKED = {
    "nothing": b"",
    "half a line": b"GET /page.css",
    "half a body": b"POST /api/v1/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "a stylesheet": b"GET /page.css HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n",
}


def is_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it, whatever it has said before."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("asked", ASKED)
def test_another_user_who_holds_all_connections_keeps_the_owner_out_of_nothing(
    asked: str, node: Node, tmp_path: Path
) -> None:
    port = read_endpoint(tmp_path).port
    with ControlClient(tmp_path) as client:
        events = following(client, node)
        held = [
            socket.create_connection(("127.0.0.1", port), 10)
            for _ in range(listening.MAX_CONNECTIONS + 20)
        ]
        try:
            for one in held:
                with suppress(ConnectionError):  # it was ended already
                    one.sendall(ASKED[asked].replace(b"PORT", str(port).encode()))
            until(lambda: sum(map(is_ended, held)) >= 20, 10, "those that are too many are ended")
            with ControlClient(tmp_path) as other:
                assert other.status() == STATUS
                other.finish()
            for _ in range(3):  # a browser
                with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as browser:
                    browser.request("GET", "/page.css")
                    assert browser.getresponse().status == 200
            node.tell(PhaseEntered(phase="finished"))
            assert next(events).event == PhaseEntered(phase="finished")
        finally:
            for one in held:
                one.close()
    assert node.calls == ["finish"]


def test_commands_go_through_a_socket_file_of_the_owner_alone(node: Node, tmp_path: Path) -> None:
    path = Paths(tmp_path).control_socket
    assert path.stat().st_mode & 0o777 == 0o600
    with ControlClient(tmp_path) as client:
        assert client.status() == STATUS
        used = {one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr}
        assert client.endpoint.port not in used


def test_the_key_of_a_link_stands_on_no_command_line(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    web(here=Here(home=tmp_path))
    link = capsys.readouterr().out.strip()
    assert opened == [Paths(tmp_path).page_link.as_uri()]
    assert Paths(tmp_path).page_link.stat().st_mode & 0o777 == 0o600
    assert f'url={link}"' in Paths(tmp_path).page_link.read_text()


async def test_a_home_whose_path_no_socket_can_have_has_it_in_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        home = tmp_path / ("long" * 40)
        home.mkdir()
        server = ControlServer(Node(), Board(), Paths(home))
        await server.start(0, "me")
        path = Path(read_endpoint(home).socket)
        assert path.is_relative_to(runtime) and path.stat().st_mode & 0o777 == 0o600

        def ask() -> Status:
            with ControlClient(home) as client:
                return client.status()

        assert await asyncio.to_thread(ask) == STATUS
        await server.close()
        assert not path.exists()


async def test_requests_under_way_when_the_node_ends_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "CLOSE_DEADLINE", 0.5)
    node, begun = Node(), asyncio.Event()

    async def generate(**asked: Any) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(node, "generate", generate)
    server = ControlServer(node, node.board, Paths(tmp_path))
    await server.start(0, "me")

    def follow() -> int:
        with ControlClient(tmp_path) as client:
            return len(list(events_of(client)))

    def write() -> None:
        with ControlClient(tmp_path) as client, pytest.raises(NotRunning):
            client.generate("x", 1, 0.0, 0)

    working = [asyncio.create_task(asyncio.to_thread(one)) for one in (follow, write)]
    async with asyncio.timeout(20):
        await begun.wait()
        await until_async(lambda: listeners(node), 20, "somebody follows")
        await server.close()
        assert await asyncio.gather(*working) == [0, None]
    assert not caplog.records, caplog.text
