"""What must hold for the routes to one peer: a dialer in memory, and a clock of its own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from lowcomm_node.errors import LinkLost
from lowcomm_node.net import peer_channel
from lowcomm_node.net.peer_channel import Connected, PeerChannel
from lowcomm_node.net.routes import (
    ALONE_PAUSE,
    FIRST_PAUSE,
    FLAP,
    LONGEST_PAUSE,
    Route,
    RouteHistory,
)
from lowcomm_node.net.targets import Targets
from lowcomm_protocol.peers.records import PeerInfo, Phase

DIRECT, TUNNEL = Route.DIRECT, Route.TUNNEL
INFO = PeerInfo(
    peer_id="callee",
    run_id="0" * 64,
    phase=Phase.TRAINING,
    issued=0.0,
    expires=1.0,
    addresses=("10.0.0.1:1",),
)


class Line:
    """A gRPC channel over one route, until it breaks."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.broken = asyncio.Event()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        states = grpc.ChannelConnectivity
        return states.IDLE if self.broken.is_set() else states.READY

    async def wait_for_state_change(self, state: object) -> None:
        await self.broken.wait()

    async def close(self, grace: float | None = None) -> None:
        self.broken.set()


class Peer:
    """A peer with two routes, either of which may answer, be dead, or keep us waiting."""

    routes = tuple(Route)

    def __init__(self) -> None:
        self.now = 1000.0
        self.targets = Targets(["10.0.0.1:1"])
        self.answers: dict[Route, bool | None] = {DIRECT: True, TUNNEL: True}
        """None: not until that changes."""
        self.tried: list[Route] = []
        self.channel: Any = PeerChannel(INFO, self, lambda: self.now)

    def direct(self, address: str, public_key: bytes) -> Connected:
        return self._connect(DIRECT)

    async def through_pipe(self, info: PeerInfo) -> Connected:
        return self._connect(TUNNEL)

    def _connect(self, route: Route) -> Connected:
        self.tried.append(route)
        peer, line = self, Line(route)

        class Answering(Connected):
            async def is_ready(self) -> bool:
                while (answer := peer.answers[route]) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                return answer

        return Answering(line)

    async def why(self, channel: object, peer_id: str) -> str:
        return "is dead"

    async def ping(self, channel: object, peer_id: str) -> None: ...

    async def call(self) -> Line:
        """The channel of a call; what that has begun to open comes to its end if it can."""
        line = await self.channel.channel(INFO)
        await settle()
        return line


async def settle() -> None:
    """Let tasks go on that wait for nothing else."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def peer(monkeypatch) -> AsyncIterator[Peer]:
    monkeypatch.setattr(peer_channel, "HEAD_START", 0.01)
    peer = Peer()
    yield peer
    await peer.channel.close()


async def test_direct_is_tried_first_and_the_tunnel_where_it_fails(peer):
    assert (await peer.call()).route is DIRECT
    assert peer.tried == [DIRECT]


@pytest.mark.parametrize("direct", [False, None])
async def test_else_the_tunnel_is_used_and_no_call_waits_for_direct_any_more(peer, direct):
    peer.answers[DIRECT] = direct
    assert (await peer.call()).route is TUNNEL
    assert (await peer.call()).route is TUNNEL
    assert peer.tried == [DIRECT, TUNNEL]


async def test_direct_takes_over_as_soon_as_it_answers(peer):
    peer.answers[DIRECT] = None
    assert (await peer.call()).route is TUNNEL
    peer.answers[DIRECT] = True
    await peer.call()
    assert (await peer.call()).route is DIRECT


async def test_a_dead_direct_address_is_tried_again_beside_the_tunnel_and_less_often_each_time(
    peer,
):
    peer.answers[DIRECT] = False
    await peer.call()
    pauses = []
    for _ in range(12):
        began, tries = peer.now, peer.tried.count(DIRECT)
        while peer.tried.count(DIRECT) == tries:
            peer.now += FIRST_PAUSE / 2
            assert (await peer.call()).route is TUNNEL
        pauses.append(peer.now - began)
    assert pauses[0] == FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == LONGEST_PAUSE
    assert peer.channel.describe().route_reason == "is dead"


async def test_a_route_that_breaks_is_opened_again_before_it_is_used(peer):
    line = await peer.call()
    peer.now += 100.0
    line.broken.set()
    await settle()
    another = await peer.call()
    assert another.route is DIRECT and another is not line
    assert peer.tried == [DIRECT, DIRECT]


async def test_a_route_that_opens_but_does_not_hold_gives_way_to_the_other(peer):
    peer.answers[DIRECT] = False
    await peer.call()
    peer.answers[DIRECT] = True
    peer.now += FIRST_PAUSE
    for round_ in range(4):
        await peer.call()
        line = await peer.call()
        assert line.route is DIRECT
        peer.now += FLAP / 2
        line.broken.set()
        await settle()
        assert (await peer.call()).route is TUNNEL
        peer.now += FIRST_PAUSE * 2 ** (round_ + 1)


async def test_when_nothing_works_each_route_is_tried_again_soon_and_the_reasons_are_told(peer):
    peer.answers = dict.fromkeys(Route, False)
    for tries in range(1, 20):
        with pytest.raises(LinkLost, match=r"\(direct: is dead; tunnel: is dead\)"):
            await peer.call()
        assert peer.tried == [DIRECT, TUNNEL] * tries
        with pytest.raises(LinkLost, match=r"can't be reached \(direct"):
            await peer.call()
        assert peer.tried == [DIRECT, TUNNEL] * tries, "not at once"
        peer.now += ALONE_PAUSE


def test_a_route_may_fail_for_hours():
    history = RouteHistory(failures=5000)
    history.fail(1.0, "is dead")
    assert history.due == 1.0 + LONGEST_PAUSE


async def test_a_peer_with_another_address_is_called_there_at_once(peer):
    peer.answers = dict.fromkeys(Route, False)
    with pytest.raises(LinkLost):
        await peer.call()
    peer.answers[DIRECT] = True
    peer.channel.renew(DIRECT)
    assert (await peer.call()).route is DIRECT
