"""What must hold for places that are counted by peer, where one address has as many peers as it
likes."""

import asyncio
from contextlib import AsyncExitStack
from time import time

import grpc

from helpers.waiting import until_async
from helpers.wire import CALLEE, RUN, cabled, calling, calling_raw, listening, soon
from lowcomm_node.net import limits
from lowcomm_node.net.limits import MAX_CALLS, UNBOUND, RateLimits
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.system.quota import Allowed, Shares
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

OTHER = "127.9.0.1"


def fill(shares: Shares, places: list[str], most: int) -> int:
    """How many places these addresses get together, asking in turns."""
    taken, more = 0, True
    while more:
        more = False
        for place in places:
            if most > taken and shares.has_room(place, most - taken):
                shares.take(place)
                taken, more = taken + 1, True
    return taken


def test_an_address_gets_half_its_network_two_thirds_and_others_always_find_some():
    assert fill(Shares(), ["192.0.2.1"], 128) == 64
    assert fill(Shares(), [f"192.0.2.{number}" for number in range(50)], 128) == 86
    assert fill(Shares(), ["192.0.2.1", "198.51.100.1"], 128) == 86
    assert fill(Shares(), ["2001:db8::1", "2001:db8::2"], 128) == 64, (
        "a household of IPv6 is one address"
    )
    assert fill(Shares(), ["relay 12D3"], 128) == 86, (
        "as a network: nobody sees how many are behind it"
    )


def test_an_address_calls_so_often_whatever_its_peers_are_called(monkeypatch):
    monkeypatch.setattr(limits, "OF_ADDRESS", Allowed(each=3, all=UNBOUND, seconds=60.0))
    one = RateLimits()
    assert [one.refuses(f"peer {number}", 0.0, "192.0.2.1") for number in range(3)] == [None] * 3
    assert "peers of your address called more than 3 times" in (
        one.refuses("peer 3", 0.0, "192.0.2.1") or ""
    )
    assert one.refuses("peer 3", 0.0, "192.0.2.2") is None
    assert one.refuses("peer 3", 20.0, "192.0.2.1") is None


async def test_seventy_identities_that_hold_calls_leave_room_for_a_peer_from_elsewhere():
    async with AsyncExitStack() as stack:
        callee = await stack.enter_async_context(listening())
        stubs = [
            ExchangeStub(await stack.enter_async_context(calling_raw(callee.info())))
            for _ in range(7)
        ]
        held = []
        for number, stub in enumerate(10 * stubs):
            keeper = Gatekeeper(Identity(bytes([7, number]) * 16), RUN, time)
            held += [stub.Fetch(metadata=keeper.credential_for(CALLEE.peer_id)) for _ in range(2)]
        await asyncio.gather(
            *(one.write(pb.FetchRequest(enter=pb.Enter())) for one in held), return_exceptions=True
        )
        refused = lambda: sum(one.done() for one in held)  # noqa: E731
        await until_async(
            lambda: refused() + callee.service.open_calls >= len(held),
            20,
            "all came",
        )
        assert callee.service.open_calls <= MAX_CALLS // 2 and len(callee.service.peer_limit) <= 32
        cable = await stack.enter_async_context(cabled(callee.port, OTHER))
        channels = await stack.enter_async_context(calling())
        peer = callee.info(addresses=(f"127.0.0.1:{cable.port}",))
        before = callee.service.open_calls
        late = (await channels.stub(peer)).Fetch(metadata=channels.metadata(CALLEE.peer_id))
        await late.write(pb.FetchRequest(enter=pb.Enter()))
        await until_async(
            lambda: callee.service.open_calls > before or late.done(),
            20,
            "it came",
        )
        assert not late.done(), await soon(late.code()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for one in (*held, late):
            one.cancel()
