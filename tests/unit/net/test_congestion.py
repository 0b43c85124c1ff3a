"""What must hold for how connections send: found among this process's descriptors, told to keep
little that can't be sent yet, and those that lose to go on with BBR."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from lowcomm_node.net import congestion
from lowcomm_node.net.congestion import (
    BBR,
    ENOUGH,
    LOSSY,
    QUEUED,
    WASTED,
    CongestionChanged,
    CongestionWatch,
    Sending,
    SendingHistory,
    allowed,
    read_sending,
)

CALM = Sending("reno", 10 * ENOUGH, 0, round_trips=1.0)
LOSES = replace(CALM, resent=int(2 * LOSSY * 10 * ENOUGH))
needs_bbr = pytest.mark.skipif(
    BBR not in allowed(), reason="this kernel has no BBR, or does not let users choose it"
)


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


NAMES = ("reno", "cubic", BBR)


def better(*told: Sending) -> list[str]:
    """What a connection changes to."""
    course = SendingHistory()
    found = [course.better(sending, NAMES) for sending in told]
    return [change[0] for change in found if change is not None]


def test_a_connection_changes_to_bbr_once_enough_was_sent_and_enough_of_it_again():
    assert better(LOSES) == [BBR] and better(CALM) == []
    assert better(replace(LOSES, segments=ENOUGH - 1, resent=ENOUGH - 1)) == []
    assert better(replace(CALM, resent=int(LOSSY * CALM.segments))) == []
    assert SendingHistory().better(LOSES, ("reno",)) is None


FULL = Sending(BBR, ENOUGH, int(2 * WASTED * ENOUGH), round_trips=QUEUED)


def test_a_connection_leaves_bbr_for_good_where_it_loses_much_to_a_full_queue():
    assert better(FULL) == ["cubic"]
    assert better(replace(FULL, resent=int(WASTED * ENOUGH))) == []
    assert better(replace(FULL, round_trips=0.99 * QUEUED)) == [], "a line that loses by chance"
    again = replace(LOSES, segments=100 * ENOUGH, resent=50 * ENOUGH)
    assert better(FULL, again) == ["cubic"]
    assert SendingHistory().better(FULL, (BBR,)) == ("reno", 2 * WASTED)


def test_what_a_connection_has_sent_is_read_from_the_kernel(
    pair: tuple[socket.socket, socket.socket],
):
    caller, callee = pair
    before = read_sending(caller)
    assert before == replace(CALM, segments=0, round_trips=before.round_trips)
    for _ in range(20):
        caller.sendall(b"x" * 10)
        assert callee.recv(10)
    after = read_sending(caller)
    assert after is not None and after.segments == 20 and after.resent == 0
    assert 1.0 <= after.round_trips < 1e6, "microseconds of microseconds"
    assert read_sending(callee) == before, "it has sent nothing"
    caller.shutdown(socket.SHUT_RDWR)
    callee.close()
    assert read_sending(caller) is None, "it is over"


@needs_bbr
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
    changed = CongestionChanged(address=f"{host}:{port}", before="reno", now=BBR, resent=2 * LOSSY)
    assert told == ([changed] if wanted == "bbr" else [])
