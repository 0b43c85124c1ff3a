"""What must hold for where the word of a stranger may make a node dial."""

from collections import Counter

import pytest

from helpers.clock import Clock
from lowcomm_node.net.targets import (
    DIALS,
    OF_PROVED,
    PAUSE,
    Targets,
    host_in,
)

HOME = ("127.0.0.1", "::1", "192.168.7.5", "100.64.3.4", "fd00:1:2:3::5", "fe80::1", "44.1.1.1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def targets(clock: Clock) -> Targets:
    return Targets(
        ["/dns4/boot.example.org/tcp/1/p2p/x", "/ip4/10.9.8.7/tcp/1/p2p/x"],
        own=lambda: HOME,
        clock=clock,
    )


@pytest.mark.parametrize(
    "address",
    ["44.2.3.4:1", "[2a00:1450::1]:1", "192.168.7.9:1", "192.168.200.1:1", "100.100.0.1:1",
        "[fd00:1:2:9::1]:1",
     "/ip4/44.2.3.4/udp/1/quic-v1/p2p/x", "/ip4/10.9.8.7/tcp/9/p2p/x",
     "/dns4/boot.example.org/tcp/1/p2p/r/p2p-circuit/p2p/x"],
)  # fmt: skip
def test_what_may_be_dialed(targets: Targets, address: str) -> None:
    assert targets.reason(address) is None
    assert targets.admit([address]) == [address]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "localhost:1", "victim.example.org:443",
        "10.0.0.1:1", "172.17.0.1:1",
     "169.254.169.254:80", "[fe90::1]:1", "[fd99::1]:1", "224.0.0.1:1", "0.0.0.0:1",
     "255.255.255.255:1", "[ff02::1]:1",
     "198.51.100.1:1", "/dns4/victim.example.org/tcp/443/p2p/x",
     "/ip4/127.0.0.1/tcp/1/p2p/r/p2p-circuit/p2p/x", "nonsense"],
)  # fmt: skip
def test_what_is_never_dialed_and_why(targets: Targets, address: str) -> None:
    assert targets.admit([address]) == []
    assert targets.reason(address) and "is not dialed: " in targets.refusal([address])


def test_loopback_is_dialed_by_who_is_reached_over_loopback() -> None:
    local = Targets(local=True, own=lambda: HOME)
    assert all(local.admit([f"127.0.0.1:{number + 1}"]) for number in range(100))


@pytest.mark.slow
def test_a_third_party_is_tried_and_then_rarely(targets: Targets, clock: Clock) -> None:
    dials = Counter[int]()
    for second in range(0, 3600, 5):
        clock.now = float(second)
        for number in range(12):
            dials[second // 60] += len(
                targets.admit([f"44.2.3.4:{port + number}" for port in range(1, 9)])
            )
    assert dials[0] <= DIALS + 1 and dials.total() <= 10 * DIALS
    assert "it is tried again within" in targets.refusal(["44.2.3.4:1"])


def test_an_attempt_has_its_connections_and_the_next_comes_later(
    targets: Targets, clock: Clock
) -> None:
    asked = [f"44.2.3.4:{port}" for port in range(1, 9)]
    assert targets.admit(asked, most=9) == asked[:DIALS]
    clock.now = PAUSE / DIALS - 1
    assert not targets.admit(asked)
    clock.now += 2
    assert targets.admit(asked) == asked[:1]


def test_a_host_where_somebody_is_gets_a_rate(targets: Targets, clock: Clock) -> None:
    targets.reached("44.2.3.4:1")
    assert sum(bool(targets.admit(["44.2.3.4:9"])) for _ in range(100)) == OF_PROVED.each
    assert "in a moment" in targets.refusal(["44.2.3.4:9"])
    clock.now = 5.0
    assert sum(bool(targets.admit(["44.2.3.4:9"])) for _ in range(100)) == 5


def test_hosts_are_told_by_their_numbers_however_they_are_written() -> None:
    same = [
        "44.2.3.4:1",
        "[::ffff:44.2.3.4]:1",
        "[::ffff:2c02:304]:7",
        "/ip4/44.2.3.4/udp/1/quic-v1",
        "/ip6/::ffff:44.2.3.4/tcp/1",
    ]
    assert {host_in(text) for text in same} == {"44.2.3.4"}
    assert host_in("[2A00:0::1]:1") == host_in("/ip6/2a00::1/tcp/1") == "2a00::1"
    assert host_in("/p2p-circuit/p2p/x") is host_in("") is host_in("/unix/x") is None
