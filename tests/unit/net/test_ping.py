"""``ping``: figures come from the peer itself, on each route, and no peer gets more of it than is
given."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.tunnelling import End, ends, soon
from helpers.wire import new_certificate
from lowcomm_node.errors import ConfigError, LinkLost, NoPeers
from lowcomm_node.net import ping
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.ping import MAX_AT_ONCE, Echo, match_peer, measure
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb

ADA, BOB = (Identity(bytes([number]) * 32) for number in (11, 12))
CERTIFICATE = new_certificate()


@asynccontextmanager
async def pair(echo: Echo | None = None) -> AsyncIterator[tuple[End, End]]:
    network = MemoryNetwork(time)
    made = [
        End(identity, MemoryDiscovery(identity.peer_id, network), CERTIFICATE, echo)
        for identity in (ADA, BOB)
    ]
    async with ends(*made) as (ada, bob):
        yield ada, bob


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping, "MAX_BYTES", 1_000_000)


def reachable(end: End) -> Any:
    return end.info(addresses=(f"127.0.0.1:{end.port}",))


async def test_each_route_is_measured_by_itself():
    here, there = Bandwidth(), Bandwidth()
    async with pair(Echo(there)) as (ada, bob):
        direct, tunnel = await soon(ada.channels.ping(reachable(bob), here))
        assert direct.route == f"direct 127.0.0.1:{bob.port}" and tunnel.route == "punched"
        for route in (direct, tunnel):
            assert route.up > 0 and route.down > 0 and route.round_trip > 0 and not route.reason
        assert here.up.total == there.down.total >= 2 * 2 * ping.PIECE, (
            "each route has carried contents"
        )
        assert here.down.total == there.up.total >= 2 * 2 * ping.PIECE
        assert ada.channels.describe(bob.peer_id).route is None, (
            "a ping leaves the routes of exchanges alone"
        )


async def test_a_proxy_of_the_environment_carries_no_route(monkeypatch: pytest.MonkeyPatch):
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with pair() as (ada, bob):
        routes = await soon(ada.channels.ping(reachable(bob), Bandwidth()))
        assert [route.reason for route in routes] == ["", ""]


async def test_a_route_that_is_not_there_says_why():
    async with pair() as (ada, bob):
        direct, tunnel = await soon(ada.channels.ping(bob.info(), Bandwidth()))
        assert (direct.route, direct.up) == ("direct", None) and "can't be reached" in direct.reason
        assert tunnel.up > 0 and not tunnel.reason


class Endless:
    """A caller that pings without an end."""

    place = ""

    def __init__(self, asked: pb.Ping, count: int = 10**6) -> None:
        self.ping, self.left, self.answered = asked, count, 0
        self.refused = ""

    async def receive(self) -> pb.Ping | None:
        self.left -= 1
        return self.ping if self.left >= 0 else None

    async def send(self, pong: pb.Pong) -> None:
        self.refused = pong.refused
        self.answered += len(pong.content) == self.ping.wanted

    async def close(self) -> None:
        self.left = 0


async def test_a_peer_gets_its_bytes_a_day_and_no_more(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ping, "GIVEN", Allowed(each=100_000, all=10**9, seconds=86_400.0))
    monkeypatch.setattr(ping, "monotonic", lambda: now[0])
    echo = Echo()
    caller = Endless(pb.Ping(wanted=1000))
    await echo.answer("a", caller)
    assert "tomorrow" in caller.refused
    assert caller.answered == 100_000 // (1000 + ping.OVERHEAD)
    for peer, later in (("b", 0.0), ("a", 86_400.0)):
        now[0] += later
        again = Endless(pb.Ping(wanted=1000), 5)
        await echo.answer(peer, again)
        assert again.answered == 5


@pytest.mark.parametrize("large", [pb.Ping(wanted=2**31), pb.Ping(content=bytes(70_000))])
async def test_a_ping_that_is_too_large_is_a_violation(large: pb.Ping):
    with pytest.raises(ProtocolViolation, match="sent a ping of"):
        await Echo().answer("a", Endless(large))


async def test_few_pings_are_answered_at_once_and_one_of_a_peer():
    echo = Echo()
    for number in range(MAX_AT_ONCE):
        echo._calls[str(number)] += 1
    for peer in ("0", "another"):
        caller = Endless(pb.Ping(wanted=9), 1)
        await echo.answer(peer, caller)
        assert "another ping is being answered" in caller.refused and not caller.answered
    del echo._calls["0"]
    await echo.answer("another", Endless(pb.Ping(), 1))
    assert "another" not in echo._calls


async def test_who_answers_with_less_than_was_asked_for_is_not_measured(monkeypatch):
    class Liar:
        def cancel(self) -> None: ...

        async def write(self, message: pb.Ping) -> None: ...

        async def read(self) -> pb.Pong:
            return pb.Pong(content=b"x")

    monkeypatch.setattr(ping, "ExchangeStub", lambda channel: Mock(Ping=lambda **_: Liar()))
    with pytest.raises(LinkLost, match="1 bytes where 0"):
        await measure(Mock(), (), Bandwidth(), "direct")


def test_a_peer_is_named_by_its_id_its_beginning_or_its_end():
    peers = [End.info(make) for make in (Stub(ADA), Stub(BOB))]
    for text in (ADA.peer_id, ADA.peer_id[-6:], ADA.peer_id[:20]):
        assert match_peer(text, peers).peer_id == ADA.peer_id
    with pytest.raises(ConfigError, match="can mean 2 peers"):
        match_peer("12D3KooW", peers)
    with pytest.raises(NoPeers, match="`lowcomm-node peers` lists them"):
        match_peer("nobody", peers)


class Stub:
    """As much of an End as a record needs."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.certificate = CERTIFICATE
