"""What must hold for the peers that a node talks with: never more than its owner allows, and idle
ones make room."""

import asyncio

import pytest

from helpers.tunnelling import EVE, chunk, pair, received, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.bandwidth import flow_options
from lowcomm_node.net.limits import PeerLimit


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


async def test_a_channel_that_carries_a_call_is_not_closed_for_another():
    async with pair(EVE) as (ada, bob, eve):
        ada.channels._peer_limit.allow(1)
        call = await soon(ada.call(bob.info()))
        await soon(call.send(chunk(0, 8)))
        with pytest.raises(LinkLost, match="1 peers already: raise --max-peers"):
            await soon(ada.call(eve.info()))
        assert await received(call) == chunk(0, 8), "the call goes on"
        await soon(call.close())
        peer_limit = ada.channels._peer_limit
        await until_async(lambda: peer_limit.turned_away == 1, 10, "it was counted")
        assert await soon(ada.introduce(eve.info())) == ada.peer_id


async def test_calls_of_a_peer_too_many_are_turned_away_and_others_go_on():
    async with pair(EVE) as (ada, bob, eve):
        bob.service.peer_limit.allow(1)
        call = await soon(ada.call(bob.info()))
        await soon(call.send(chunk(0, 8)))
        assert await received(call) == chunk(0, 8)
        late = await soon(eve.call(bob.info()))
        with pytest.raises(LinkLost, match="is busy"):
            await soon(late.receive())
        assert await soon(eve.introduce(bob.info())) == eve.peer_id, (
            "hello and goodbye are always heard"
        )
        await soon(call.close())
        await until_async(lambda: not len(bob.service.peer_limit), 10, "its call has ended")
        other = await soon(eve.call(bob.info()))
        await soon(other.send(chunk(1, 8)))
        assert await received(other) == chunk(1, 8)
        await soon(other.close())


@pytest.mark.slow
async def test_other_windows_hold_for_new_calls_while_those_under_way_go_on():
    async with pair() as (ada, bob):
        info = bob.info(addresses=(f"127.0.0.1:{bob.port}",))
        before = await soon(ada.call(info))
        await soon(before.send(chunk(0, 8)))
        assert await received(before) == chunk(0, 8)
        await soon(bob.server.renew(flow_options(1e6)))
        await ada.channels.renew(flow_options(1e6))
        after = await soon(ada.call(info))
        for number, call in enumerate((before, after, before, after), 1):
            await soon(call.send(chunk(number, 8)))
            assert await received(call) == chunk(number, 8)
        (old,) = bob.server._retiring
        await soon(old.stop(0))
        with pytest.raises(LinkLost):
            while True:
                await soon(before.receive())
        await soon(after.send(chunk(5, 8)))
        assert await received(after) == chunk(5, 8), (
            "whoever comes later is taken in by the new one"
        )
        closing = asyncio.create_task(bob.server.close())
        with pytest.raises(LinkLost):
            while True:
                await soon(after.receive())
        await soon(closing)
