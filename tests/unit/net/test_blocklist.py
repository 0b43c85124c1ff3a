"""What must hold for addresses that flood us: nothing new of theirs gets through, everything of
everybody else's does."""

import socket
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from lowcomm_node.net.blocklist import BLOCKED, MOST, Blocklist

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux filters the packets of a socket"
)
PATIENCE = 0.5
"""Seconds until a connection that nobody answers is given up; loopback answers within a
millisecond."""
LOOPBACK = {"127.0.0.1": "127.0.0.1", "127.0.0.2": "127.0.0.1", "::1": "::1"}
"""From where one can connect without leaving the machine, and to where."""
OTHERS = [f"10.0.0.{number}" for number in range(MOST // 2)] + [
    f"2001:db8:{number:x}::1" for number in range(MOST // 2)
]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket for both families, as gRPC listens on all addresses."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        yield listening


def comes_through(source: str, listener: socket.socket) -> bool:
    """Whether a new connection from an address is answered."""
    with closing(socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)) as caller:
        caller.settimeout(PATIENCE)
        caller.bind((source, 0))
        try:
            caller.connect((LOOPBACK[source], listener.getsockname()[1]))
        except TimeoutError:
            return False
        listener.accept()[0].close()
        return True


@on_linux
@pytest.mark.parametrize("blocked", LOOPBACK)
def test_nothing_new_comes_through_from_whom_is_blocked_and_everything_from_others(
    listener: socket.socket, blocked: str
) -> None:
    one = Blocklist()
    for host in [*OTHERS[1:], blocked]:
        one.block(host, 0.0)
    one.enforce([listener], 0.0)
    assert {host: comes_through(host, listener) for host in LOOPBACK} == {
        host: host != blocked for host in LOOPBACK
    }


@on_linux
def test_who_is_blocked_comes_through_again_once_that_is_over(listener: socket.socket) -> None:
    one = Blocklist()
    one.block("127.0.0.2", 0.0)
    one.block("127.0.0.1", 1.0)
    one.enforce([listener], BLOCKED)
    assert comes_through("127.0.0.2", listener) and not comes_through("127.0.0.1", listener)
    one.enforce([listener], BLOCKED + 1)
    assert comes_through("127.0.0.1", listener)
    one.block("127.0.0.1", BLOCKED + 2)
    one.enforce([listener], BLOCKED + 2)
    assert not comes_through("127.0.0.1", listener)


@on_linux
def test_a_socket_that_is_newer_than_the_list_takes_no_harm(listener: socket.socket) -> None:
    one = Blocklist()
    one.block("127.0.0.1", 0.0)
    one.enforce([], 0.0)
    one.enforce([listener], BLOCKED)  # nothing is to be taken back from it
    assert comes_through("127.0.0.1", listener)
    one.block("127.0.0.1", BLOCKED)
    one.enforce([listener], BLOCKED)
    assert not comes_through("127.0.0.1", listener), "nor has the list"


@on_linux
def test_a_socket_that_takes_no_program_keeps_none_of_the_others_blocked(
    listener: socket.socket,
) -> None:
    one, closed = Blocklist(), socket.socket()
    closed.close()
    one.block("127.0.0.1", 0.0)
    one.enforce([listener, closed], 0.0)
    assert not comes_through("127.0.0.1", listener)
    one.enforce([closed, listener], BLOCKED)
    assert comes_through("127.0.0.1", listener)


@on_linux
def test_whoever_is_connected_stays_so(listener: socket.socket) -> None:
    with (
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as caller,
        listener.accept()[0] as callee,
    ):
        one = Blocklist()
        one.block("127.0.0.1", 0.0)
        one.enforce([listener], 0.0)
        caller.settimeout(20)
        for _ in range(2):
            caller.sendall(b"x")
            assert callee.recv(1) == b"x"


@on_linux
def test_the_longest_list_can_take_the_place_of_another(listener: socket.socket) -> None:
    for number in range(3):
        one = Blocklist()
        for place in range(MOST):
            one.block(f"2001:db8:{number:x}:{place:x}::1", 0.0)
        one.enforce([listener], 0.0)
    one.block("::1", 0.0)
    one.enforce([listener], 0.0)
    assert not comes_through("::1", listener)


def test_the_newest_are_blocked_a_household_is_one_and_who_goes_on_is_blocked_for_longer() -> None:
    one = Blocklist(seconds=10.0, most=2)
    for now, host in enumerate(["192.0.2.1", "2001:db8::1", "2001:db8::2", "192.0.2.1"]):
        one.block(host, float(now))
    assert one.networks(4.0) == {"192.0.2.1", "2001:db8::/64"}
    one.block("192.0.2.2", 5.0)
    assert one.networks(5.0) == {"192.0.2.1", "192.0.2.2"}
    assert one.networks(13.0) == {"192.0.2.2"} and not one.networks(15.0)
