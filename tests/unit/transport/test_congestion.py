"""What must hold for how connections send: found among this process's descriptors, told to keep
little that can't be sent yet, and those that lose to go on with BBR."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from lowcomm_node.transport import congestion
from lowcomm_node.transport.congestion import (
    ENOUGH,
    LOSSY,
    UNSENT_BYTES,
    CongestionWatch,
    Sending,
    is_allowed,
    read_sending,
)
from lowcomm_node.transport.guard.connections import connections
from lowcomm_node.transport.records import CongestionChanged

CALM = Sending("reno", 10 * ENOUGH, 0)
LOSES = replace(CALM, resent=int(2 * LOSSY * 10 * ENOUGH))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection that uses Reno, which every kernel has."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        caller = stack.enter_context(socket.create_connection(server.getsockname()))
        callee = stack.enter_context(server.accept()[0])
        for end in (caller, callee):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        yield caller, callee


def used(end: socket.socket) -> str:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_a_connection_loses_once_enough_was_sent_and_enough_of_it_again():
    assert LOSES.loses and not CALM.loses
    assert not replace(LOSES, segments=ENOUGH - 1, resent=ENOUGH - 1).loses
    assert not replace(CALM, resent=int(LOSSY * CALM.segments)).loses


def test_what_a_connection_has_sent_is_read_from_the_kernel(
    pair: tuple[socket.socket, socket.socket],
):
    caller, callee = pair
    before = read_sending(caller)
    assert before == Sending("reno", 0, 0)
    for _ in range(20):
        caller.sendall(b"x" * 10)
        assert callee.recv(10)
    after = read_sending(caller)
    assert after is not None and after.segments == 20 and after.resent == 0
    assert read_sending(callee) == before, "it has sent nothing"
    caller.shutdown(socket.SHUT_RDWR)
    callee.close()
    assert read_sending(caller) is None, "it is over"


def test_connections_of_this_process_are_found_and_left_as_they_are(
    pair: tuple[socket.socket, socket.socket],
):
    mine = {end.getsockname() for end in pair}
    left, right = socket.socketpair()
    with left, right:
        found = []
        for one in connections():
            with one:
                found.append((one.family, one.getsockname()))
    assert mine <= {name for family, name in found if family == socket.AF_INET}
    assert all(family in (socket.AF_INET, socket.AF_INET6) for family, _ in found)
    pair[0].sendall(b"still there")
    assert pair[1].recv(20) == b"still there"


@pytest.mark.parametrize("allowed", [True, False])
def test_the_kernel_keeps_little_of_any_connection_that_it_can_not_send_yet(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, allowed: bool
):
    monkeypatch.setattr(congestion, "is_allowed", lambda: allowed)
    CongestionWatch().look()
    for end in pair:
        kept = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert kept == UNSENT_BYTES


@pytest.mark.skipif(
    not is_allowed(), reason="this kernel has no BBR, or does not let users choose it"
)
@pytest.mark.parametrize(("sending", "wanted"), [(LOSES, "bbr"), (CALM, "reno"), (None, "reno")])
def test_what_loses_goes_on_with_bbr_and_nothing_else_does(
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    sending: Sending | None,
    wanted: str,
):
    caller, callee = pair
    told: list[dict[str, Any]] = []

    def read(connection: socket.socket) -> Sending | None:
        return sending if connection.getsockname() == caller.getsockname() else None

    monkeypatch.setattr(congestion, "read_sending", read)
    CongestionWatch(told.append).look()
    assert used(caller) == wanted and used(callee) == "reno"
    host, port = callee.getsockname()
    changed = CongestionChanged(address=f"{host}:{port}", before="reno", resent=2 * LOSSY)
    assert told == ([changed] if wanted == "bbr" else [])


@pytest.mark.parametrize(
    "allowed", [pytest.param("reno cubic\n", id="not allowed"), pytest.param(None, id="not Linux")]
)
async def test_where_nothing_can_be_changed_nothing_is_looked_at(
    tmp_path, monkeypatch: pytest.MonkeyPatch, allowed: str | None
):
    monkeypatch.delattr(socket, "TCP_NOTSENT_LOWAT")
    monkeypatch.setattr(congestion, "_ALLOWED", tmp_path / "allowed")
    monkeypatch.setattr(CongestionWatch, "look", lambda self: pytest.fail("looked"))
    if allowed is not None:
        (tmp_path / "allowed").write_text(allowed)
    await CongestionWatch().run()


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch):
    looks = []

    def look(watch: CongestionWatch) -> None:
        looks.append(watch)
        if len(looks) == 1:
            raise OSError(24, "Too many open files")
        raise asyncio.CancelledError

    monkeypatch.setattr(congestion, "is_allowed", lambda: True)
    monkeypatch.setattr(congestion, "EVERY", 0.0)
    monkeypatch.setattr(CongestionWatch, "look", look)
    with pytest.raises(asyncio.CancelledError):
        await CongestionWatch().run()
    assert len(looks) == 2
