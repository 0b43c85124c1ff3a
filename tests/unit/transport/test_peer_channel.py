"""What must hold for the routes to one peer, carried out: no call waits for one route where another one is open."""

import asyncio
import secrets
from contextlib import suppress

import pytest
from test_tunnel import cut, pair

from helpers.tunnelling import End, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.libp2p.interface import OpenStream
from lowcomm_node.testing.memory_dht import MemoryNetwork
from lowcomm_node.transport import peer_channel as lines
from lowcomm_node.transport.peer_channel import Line, name_tunnel
from lowcomm_node.transport.routes import Route
from lowcomm_protocol.peers.records import PeerInfo

DIRECT, TUNNEL = Route.DIRECT, Route.TUNNEL


def line_to(end: End, other: End) -> Line:
    return end.channels._lines[other.peer_id]


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


async def opened(line: Line, route: Route) -> None:
    await until_async(lambda: asyncio.sleep(0, route in line._open), 30, f"the {route} route is open")


async def test_where_a_faster_tunnel_is_cut_off_calls_take_the_direct_route_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "PATIENCE", 1.0)
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        line = line_to(ada, bob)
        line._choice.measured(DIRECT, line._clock(), 10**6, 2.0)
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        await opened(line, TUNNEL)
        line._choice.measured(TUNNEL, line._clock(), 10**7, 2.0)
        unreachable(ada)
        assert await soon(line.channel(alive(bob))) is line._open[TUNNEL].channel
        cut(ada)
        assert await soon(line.channel(alive(bob))) is line._open[DIRECT].channel


async def test_a_call_that_waits_for_a_tunnel_takes_a_direct_route_that_opens_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "PATIENCE", 5.0)
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        unreachable(ada)
        cut(ada)
        assert await soon(ada.introduce(alive(bob))) == ada.peer_id
        assert line_to(ada, bob)._choice.route is DIRECT


async def test_a_tunnel_that_is_lost_while_it_is_renewed_is_not_opened_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "PATIENCE", 1.0)
    taken = list[OpenStream]()
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        line = line_to(ada, bob)
        silent(ada, taken)
        line._begin(line._choice.renewal(TUNNEL))
        renewal = line._attempts[TUNNEL]
        for pipe in list(ada.tunnels._pipes):
            pipe.fail(LinkLost("was lost"))
        await until_async(lambda: asyncio.sleep(0, TUNNEL not in line._open), 30, "it is lost")
        with pytest.raises(LinkLost, match="within 1 s"):
            await soon(ada.introduce(bob.info()))
        assert line._attempts[TUNNEL] is renewal and not renewal.done()
        await soon(line.close())
        assert renewal.done(), "there is none that nobody could end"
        for stream in taken:
            stream.socket.close()


async def test_a_tunnel_that_was_being_renewed_when_a_direct_route_opened_stays_open(tmp_path):
    taken = list[OpenStream]()
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        line = line_to(ada, bob)
        silent(ada, taken)
        line._begin(line._choice.renewal(TUNNEL))
        line._hear(alive(bob))
        line._begin(line._choice.renewal(DIRECT))
        await opened(line, DIRECT)
        assert TUNNEL in line._open
        line._choice.lost(DIRECT, line._clock(), "broke off")
        assert line._choice.route is TUNNEL
        for stream in taken:
            stream.socket.close()


async def test_a_line_that_was_closed_opens_nothing_and_no_call_waits_for_it(tmp_path):
    taken = list[OpenStream]()
    async with pair(tmp_path) as (ada, bob):
        silent(ada, taken)
        waiting = asyncio.create_task(ada.introduce(bob.info()))
        await until_async(lambda: asyncio.sleep(0, ada.channels._lines and line_to(ada, bob)._attempts), 30, "it opens")
        line = line_to(ada, bob)
        await soon(line.close())
        with pytest.raises(LinkLost, match="was closed"):
            await soon(waiting, 5)
        with pytest.raises(LinkLost, match="was closed"):
            await soon(line.channel(bob.info()), 5)
        assert not line._attempts and not line._open
        for stream in taken:
            stream.socket.close()


async def test_no_reason_is_told_of_a_peer_that_was_only_idle(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        with suppress(LinkLost):
            await soon(ada.introduce(alive(bob)))
        line = line_to(ada, bob)
        now = line._clock()
        line._choice.opened(DIRECT, now - 120.0, 0.1)
        await line._open[DIRECT].channel.close()
        await until_async(lambda: asyncio.sleep(0, line._choice.route is None), 30, "it is lost")
        assert line.describe() == {"route": None, "route_reason": None, "round_trip": None}


def test_a_tunnel_is_named_by_where_it_leads():
    relay = "12D3KooW" + secrets.token_hex(10)
    assert name_tunnel("/ip4/192.0.2.1/udp/5/quic-v1") == "punched"
    assert name_tunnel(f"/ip4/192.0.2.1/tcp/5/p2p/{relay}/p2p-circuit") == f"relay {relay[-6:]}"
    assert name_tunnel("") == "tunnel", "before there was a stream"
