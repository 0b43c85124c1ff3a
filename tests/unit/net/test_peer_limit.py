"""What must hold for the peers that a node talks with: never more than its owner allows, and idle
ones make room."""

import asyncio
import socket

import grpc
import pytest
from grpc import aio

from helpers.tunnelling import DAN, EVE, chunk, pair, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost, PortInUse
from lowcomm_node.net.bandwidth import flow_options
from lowcomm_node.net.limits import PeerLimit
from lowcomm_protocol.messages import exchange_pb2 as pb


async def test_a_peer_counts_once_as_long_as_anything_is_held():
    peer_limit = PeerLimit(1)
    assert await peer_limit.has_room_for("a")
    peer_limit.join("a")
    with peer_limit.with_("a"):
        assert len(peer_limit) == 1
        assert await peer_limit.has_room_for("a")
        assert not await peer_limit.has_room_for("b")
    assert len(peer_limit) == 1
    peer_limit.leave("a")
    assert len(peer_limit) == 0
    assert await peer_limit.has_room_for("b")
    assert peer_limit.turned_away == 1


async def test_an_idle_channel_makes_room_for_another_peer():
    async with pair(EVE, DAN) as (ada, bob, eve, dan):
        ada.channels._peer_limit.allow(2)
        for other in (bob, eve, dan):
            assert await soon(ada.introduce(other.info())) == ada.peer_id
        assert set(ada.channels._peers) == {eve.peer_id, dan.peer_id}
        assert len(ada.channels._peer_limit) == 2


async def test_a_channel_that_carries_a_call_is_not_closed_for_another():
    async with pair(EVE) as (ada, bob, eve):
        ada.channels._peer_limit.allow(1)
        call = await soon(ada.call(bob.info()))
        await soon(call.send(chunk(0, 8)))
        with pytest.raises(LinkLost, match="1 peers already: raise --max-peers"):
            await soon(ada.call(eve.info()))
        assert (await soon(call.receive())).whole() == chunk(0, 8), "the call goes on"
        await soon(call.close())
        peer_limit = ada.channels._peer_limit
        await until_async(
            lambda: asyncio.sleep(0, peer_limit.turned_away == 1), 10, "it was counted"
        )
        assert await soon(ada.introduce(eve.info())) == ada.peer_id


async def test_calls_of_a_peer_too_many_are_turned_away_and_others_go_on():
    async with pair(EVE) as (ada, bob, eve):
        bob.service._peer_limit.allow(1)
        call = await soon(ada.call(bob.info()))
        await soon(call.send(chunk(0, 8)))
        assert (await soon(call.receive())).whole() == chunk(0, 8)
        late = await soon(eve.call(bob.info()))
        with pytest.raises(LinkLost, match="is busy"):
            await soon(late.receive())
        assert await soon(eve.introduce(bob.info())) == eve.peer_id, (
            "hello and goodbye are always heard"
        )
        await soon(call.close())
        await until_async(
            lambda: asyncio.sleep(0, not len(bob.service._peer_limit)), 10, "its call has ended"
        )
        other = await soon(eve.call(bob.info()))
        await soon(other.send(chunk(1, 8)))
        assert (await soon(other.receive())).whole() == chunk(1, 8)
        await soon(other.close())


async def test_fewer_peers_than_there_are_close_what_is_idle_at_once():
    async with pair(EVE, DAN) as (ada, bob, eve, dan):
        for other in (bob, eve, dan):
            await soon(ada.introduce(other.info()))
        ada.channels._peer_limit.allow(1)
        await soon(ada.channels.trim())
        assert set(ada.channels._peers) == {dan.peer_id}


@pytest.mark.slow
@pytest.mark.parametrize("route", ["tunnel", "direct"])
async def test_other_windows_hold_for_new_calls_while_those_under_way_go_on(route):
    async with pair() as (ada, bob):
        info = bob.info(**({"addresses": (f"127.0.0.1:{bob.port}",)} if route == "direct" else {}))
        before = await soon(ada.call(info))
        await soon(before.send(chunk(0, 8)))
        assert (await soon(before.receive())).whole() == chunk(0, 8)
        await soon(bob.server.renew(flow_options(1e6)))
        ada.channels.renew(flow_options(1e6))
        after = await soon(ada.call(info))
        for number, call in enumerate((before, after, before, after), 1):
            await soon(call.send(chunk(number, 8)))
            assert (await soon(call.receive())).whole() == chunk(number, 8)
        (old,) = bob.server._retiring
        await soon(old.stop(0))
        with pytest.raises(LinkLost):
            while True:
                await soon(before.receive())
        await soon(after.send(chunk(5, 8)))
        assert (await soon(after.receive())).whole() == chunk(5, 8), (
            "whoever comes later is taken in by the new one"
        )
        closing = asyncio.create_task(bob.server.close())
        with pytest.raises(LinkLost):
            while True:
                await soon(after.receive())
        await soon(closing)


async def test_a_server_that_can_not_be_renewed_stays_as_it_was():
    async with pair() as (ada, bob):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address, bob.server._address = (
                bob.server._address,
                f"127.0.0.1:{taken.getsockname()[1]}",
            )
            with pytest.raises(PortInUse):
                await soon(bob.server.renew(flow_options(1e6)))
        bob.server._address = address
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "through a tunnel"
        assert (
            await soon(ada.introduce(bob.info(addresses=(f"127.0.0.1:{bob.port}",)))) == ada.peer_id
        )
        await soon(
            asyncio.gather(*(bob.server.renew(flow_options(rate)) for rate in (1e6, 1e6, 2e5)))
        )
        assert len(bob.server._retiring) == 2, "one after the other, and none for nothing"
        ada.channels.renew(flow_options(1e6))
        assert await soon(ada.introduce(bob.info())) == ada.peer_id


@pytest.mark.slow
async def test_a_small_window_stops_a_sender_that_nobody_reads():
    """Without it gRPC takes in some 6 MB ahead of its reader."""
    async with pair() as (ada, bob):
        taken = asyncio.Event()

        async def hold(peer, stream):
            await stream.receive()
            await taken.wait()

        bob.swapping = hold
        await soon(bob.server.renew(flow_options(1e6)))
        info = bob.info(addresses=(f"127.0.0.1:{bob.port}",))
        call = await soon(ada.call(info))
        sent = 0
        try:
            while True:
                async with asyncio.timeout(2):
                    await call._call.write(pb.Frame(chunk=pb.Chunk(data=bytes(65536))))
                sent += 65536
                assert sent < 2_000_000, "nobody reads, and it is taken in all the same"
        except TimeoutError:
            pass
        finally:
            taken.set()
            call.cancel()


async def test_a_lost_call_frees_its_place():
    async with pair() as (ada, bob):
        call = await soon(ada.call(bob.info()))
        await soon(call.send(chunk(0, 8)))
        assert (await soon(call.receive())).whole() == chunk(0, 8)
        await bob.server._server.stop(None)
        with pytest.raises((LinkLost, aio.AioRpcError, grpc.RpcError)):
            while True:
                await soon(call.receive())
        peer_channel = ada.channels._peers[bob.peer_id]
        await until_async(lambda: asyncio.sleep(0, peer_channel.calls == 0), 10, "the call is over")
