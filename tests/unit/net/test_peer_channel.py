"""What must hold for the routes to one peer, carried out: no call waits for one route where another
one is open."""

import asyncio
from contextlib import suppress

import pytest

from helpers.memory_dht import MemoryNetwork
from helpers.tunnelling import End, cut, pair, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import peer_channel as peer_channel_module
from lowcomm_node.net.control import OpenStream
from lowcomm_node.net.peer_channel import PeerChannel
from lowcomm_node.net.routes import PeerRoute, Route
from lowcomm_protocol.peers.records import PeerInfo

DIRECT, TUNNEL = Route.DIRECT, Route.TUNNEL


def line_to(end: End, other: End) -> PeerChannel:
    return end.channels._peers[other.peer_id]


def alive(end: End) -> PeerInfo:
    """Its record, where it can be dialed."""
    return end.info(addresses=(f"127.0.0.1:{end.port}",))


def unreachable(end: End) -> None:
    """Nobody serves streams any more."""
    network: MemoryNetwork = end.streams._network  # pyright: ignore[reportAttributeAccessIssue]
    network.served.clear()


def silent(end: End, taken: list[OpenStream]) -> None:
    """Streams to all are taken, and never answered."""
    network: MemoryNetwork = end.streams._network  # pyright: ignore[reportAttributeAccessIssue]
    network.served.update(dict.fromkeys(network.served, taken.append))


async def lost(peer_channel: PeerChannel, route: Route) -> None:
    await until_async(
        lambda: asyncio.sleep(0, route not in peer_channel._open), 30, f"the {route} route is lost"
    )


async def opened(peer_channel: PeerChannel, route: Route) -> None:
    await until_async(
        lambda: asyncio.sleep(0, route in peer_channel._open), 30, f"the {route} route is open"
    )


async def test_where_a_faster_tunnel_is_cut_off_calls_take_the_direct_route_at_once(monkeypatch):
    monkeypatch.setattr(peer_channel_module, "PATIENCE", 1.0)
    async with pair() as (ada, bob):
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        peer_channel = line_to(ada, bob)
        peer_channel._choice.measured(DIRECT, peer_channel._clock(), 10**6, 2.0)
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        await opened(peer_channel, TUNNEL)
        peer_channel._choice.measured(TUNNEL, peer_channel._clock(), 10**7, 2.0)
        unreachable(ada)
        assert await soon(peer_channel.channel(alive(bob))) is peer_channel._open[TUNNEL].channel
        cut(ada)
        await lost(peer_channel, TUNNEL)
        assert await soon(peer_channel.channel(alive(bob))) is peer_channel._open[DIRECT].channel


async def test_a_call_that_waits_for_a_tunnel_takes_a_direct_route_that_opens_meanwhile(
    monkeypatch,
):
    monkeypatch.setattr(peer_channel_module, "PATIENCE", 5.0)
    async with pair() as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        unreachable(ada)
        cut(ada)
        await lost(line_to(ada, bob), TUNNEL)
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        assert line_to(ada, bob)._choice.route is DIRECT


async def test_a_tunnel_that_was_being_renewed_when_a_direct_route_opened_stays_open():
    taken = list[OpenStream]()
    async with pair() as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        peer_channel = line_to(ada, bob)
        silent(ada, taken)
        peer_channel._begin(peer_channel._choice.renewal(TUNNEL))
        peer_channel._hear(alive(bob))
        peer_channel._begin(peer_channel._choice.renewal(DIRECT))
        await opened(peer_channel, DIRECT)
        assert TUNNEL in peer_channel._open
        peer_channel._choice.lost(DIRECT, peer_channel._clock(), "broke off")
        assert peer_channel._choice.route is TUNNEL
        for stream in taken:
            stream.socket.close()


async def test_a_peer_channel_that_was_closed_opens_nothing_and_no_call_waits_for_it():
    taken = list[OpenStream]()
    async with pair() as (ada, bob):
        silent(ada, taken)
        waiting = asyncio.create_task(ada.introduce(bob.info()))
        await until_async(
            lambda: asyncio.sleep(0, ada.channels._peers and line_to(ada, bob)._attempts),
            30,
            "it opens",
        )
        peer_channel = line_to(ada, bob)
        await soon(peer_channel.close())
        with pytest.raises(LinkLost, match="was closed"):
            await soon(waiting, 5)
        with pytest.raises(LinkLost, match="was closed"):
            await soon(peer_channel.channel(bob.info()), 5)
        assert not peer_channel._attempts and not peer_channel._open
        for stream in taken:
            stream.socket.close()


async def test_no_reason_is_told_of_a_peer_that_was_only_idle():
    async with pair() as (ada, bob):
        with suppress(LinkLost):
            await soon(ada.introduce(alive(bob)))
        peer_channel = line_to(ada, bob)
        now = peer_channel._clock()
        peer_channel._choice.opened(DIRECT, now - 120.0)
        await peer_channel._open[DIRECT].channel.close()
        await until_async(
            lambda: asyncio.sleep(0, peer_channel._choice.route is None), 30, "it is lost"
        )
        assert peer_channel.describe() == PeerRoute()
