"""What must hold when an address of ours is gone: what used it is given up, and nothing else."""

import socket

import pytest

from lowcomm_node.net.bound import OwnEnds, bound_to, own_ends
from lowcomm_node.net.control import Connection

OLD, NEW, FOUR = "2001:db8::1", "2001:db8::2", "192.0.2.1"
THERE6, THERE4 = "2a00:128::7", "198.51.100.7"


@pytest.mark.parametrize(
    ("address", "ends", "is_lost"),
    [
        (f"/ip6/{THERE6}/tcp/31330", {(THERE6, 31330): {OLD}}, True),
        (f"/ip6/{THERE6}/tcp/31330", {(THERE6, 31330): {NEW}}, False),
        (f"/ip6/{THERE6}/tcp/31330", {(THERE6, 31330): {OLD, NEW}}, True),
        (f"/ip6/{THERE6}/tcp/31330", {}, True),
        (f"/ip6/{THERE6}/udp/31330/quic-v1", {(THERE6, 31330): {NEW}}, True),
        (f"/ip4/{THERE4}/tcp/31330", {}, False),
        (f"/ip4/{THERE4}/udp/31330/quic-v1", {}, False),
        (f"/ip4/{THERE4}/tcp/31330/p2p/12D3KooWRelay/p2p-circuit", {}, False),
        (f"/ip6/{THERE6}/tcp/31330/p2p/12D3KooWRelay/p2p-circuit", {(THERE6, 31330): {OLD}}, True),
        ("", {}, True),
    ],
)
def test_an_address_of_ipv6_that_is_gone_takes_only_what_used_it(
    address: str, ends: OwnEnds, is_lost: bool
):
    assert bound_to({OLD}, [Connection("peer", address)], ends) == ({"peer"} if is_lost else set())


def test_an_address_of_ipv4_that_is_gone_leaves_ipv6_alone():
    both = [Connection("six", f"/ip6/{THERE6}/tcp/1"), Connection("four", f"/ip4/{THERE4}/tcp/1")]
    assert bound_to({FOUR}, both, {}) == {"four"}
    assert bound_to({FOUR, OLD}, both, {}) == {"six", "four"}


def test_the_system_tells_which_address_a_connection_uses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)):
            assert own_ends()["127.0.0.1", port] == {"127.0.0.2"}
