"""What must hold for connections on which nobody shows who it is."""

import asyncio
import socket
import ssl
from contextlib import suppress
from time import monotonic

import grpc
import pytest

from helpers.http2 import FLOODS, connected
from helpers.waiting import until_async
from helpers.wire import (
    CALLEE,
    PATH,
    SERVER_NAME,
    calling,
    calling_raw,
    listening,
    soon,
)
from lowcomm_node.net import unauthenticated as unauthenticated_module
from lowcomm_node.net.limits import UNBOUND, RateLimits
from lowcomm_node.net.unauthenticated import MAX_KNOWN, PROVEN, Unauthenticated
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.messages import exchange_pb2 as pb


def test_the_oldest_of_an_address_that_has_too_many_are_ended_and_no_others():
    one = Unauthenticated(most_of_one=2, most=100)
    first, other = [("192.0.2.1", port) for port in range(3)], [("192.0.2.2", 1), ("192.0.2.2", 2)]
    assert one.surplus(first[:1], 0.0) == []
    assert one.surplus([*first, *other], 1.0) == first[:1]
    assert one.surplus([*first[1:], *other], 2.0) == []


def test_of_all_addresses_together_there_are_so_many():
    one = Unauthenticated(most_of_one=2, most=3)
    places = [(f"192.0.2.{number}", 1) for number in range(5)]
    for number in range(5):
        over = one.surplus(places[: number + 1], float(number))
        assert over == places[: max(0, number - 2)]


def test_a_household_of_ipv6_is_one_caller():
    places = [(f"2001:db8::{number}", 1) for number in range(5)]
    assert len(Unauthenticated(most_of_one=2).surplus(places, 0.0)) == 3


def test_whoever_has_shown_a_credential_is_left_alone():
    one = Unauthenticated(most_of_one=1)
    places = [("192.0.2.1", port) for port in range(5)]
    for place in places[:4]:
        one.vouch(place)
    assert one.surplus(places, 0.0) == []


def test_memory_does_not_grow_with_those_that_have_come():
    one = Unauthenticated()
    for port in range(MAX_KNOWN + 10):
        one.vouch(("192.0.2.1", port))
    assert len(one._known) == MAX_KNOWN
    for port in range(10):
        one.surplus([("192.0.2.2", port)], float(port))
    assert len(one._known) == 0 and len(one._since) == 1, "what is not there any more is forgotten"


def test_a_connection_has_ten_seconds_for_a_call_with_a_good_credential():
    one = Unauthenticated()
    places = [("192.0.2.1", 1), ("192.0.2.1", 2)]
    assert one.surplus(places, 100.0) == []
    one.vouch(places[0])
    assert one.surplus(places, 109.9) == []
    assert one.surplus(places, 110.0) == places[1:]
    one.forget(places[0])
    assert one.surplus(places[:1], 111.0) == one.surplus(places[:1], 199.0) == [], (
        "it may carry an exchange"
    )
    assert one.noisy(lambda _: 1 << 30) == one.noisy(lambda _: 1 << 30) == []


def test_of_connections_of_peers_an_address_has_so_many_and_those_that_call_least_go_first():
    one = Unauthenticated(proven_of_one=3)
    places = [("192.0.2.1", port) for port in range(5)]
    for place in (*places, ("192.0.2.2", 1), places[0]):
        one.vouch(place)
    assert one.surplus([*places, ("192.0.2.2", 1)], 0.0) == places[1:3]
    most = Unauthenticated(proven_of_one=PROVEN)
    there = [("192.0.2.1", port) for port in range(PROVEN)] + [
        ("192.0.2.2", port) for port in range(5)
    ]
    for place in there:
        most.vouch(place)
    assert most.surplus(there, 0.0) == there[:5]


def test_an_unauthenticated_caller_that_sends_much_is_ended_if_it_still_is_at_the_next_look():
    one = Unauthenticated()
    much, little, peer = places = [("192.0.2.1", port) for port in range(3)]
    received = {much: 65 * 1024, little: 64 * 1024, peer: 1 << 30}
    one.vouch(peer)
    one.surplus(places, 0.0)
    assert one.noisy(received.__getitem__) == []
    one.surplus(places, 1.0)
    assert one.noisy(received.__getitem__) == [much]
    one.vouch(much)
    one.surplus(places, 2.0)
    assert one.noisy(received.__getitem__) == [], "its first call had waited for our event loop"


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames_without_a_credential_loses_its_connection(kind: str, monkeypatch):
    monkeypatch.setattr(unauthenticated_module, "EVERY", 0.1)
    async with listening() as callee, calling() as channels, connected(callee.port) as flooding:
        stub = await channels.stub(callee.info())
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        looking = asyncio.create_task(callee.service.unauthenticated.run(callee.port))
        await soon(flooding.flood(FLOODS[kind], 20_000))
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", FLOODS)
async def test_slow_frames_without_a_credential_last_ten_seconds(kind: str):
    async with listening() as callee, connected(callee.port) as flooding:
        looking = asyncio.create_task(callee.service.unauthenticated.run(callee.port))
        await soon(flooding.flood(FLOODS[kind], 50))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_calls_of_methods_that_there_are_not_are_counted_and_end_a_peers_connection(
    monkeypatch,
):
    few = Allowed(each=3, all=UNBOUND, seconds=60.0)
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        callee.service._rate_limits = RateLimits(bad_calls=few, refused=few)
        metadata = channels.metadata(CALLEE.peer_id)
        held = channel.stream_stream(PATH + "Swap")(metadata=metadata)
        await soon(callee.streams.get())
        codes = [await soon(channel.stream_stream("/no/such")().code()) for _ in range(7)]
        assert codes[:3] == [grpc.StatusCode.UNIMPLEMENTED] * 3
        assert codes[3:6] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
        assert await soon(held.code()) is grpc.StatusCode.UNAVAILABLE, "its connection was ended"
        assert callee.service._refusals.counts() == {"call.malformed": 3, "call.too-many": 4}


@pytest.mark.parametrize("encrypted", [True, False])
async def test_half_open_connections_are_ended_and_a_peer_that_calls_is_not(encrypted: bool):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    tls = {"ssl": context, "server_hostname": SERVER_NAME} if encrypted else {}
    async with listening() as callee, calling() as channels:
        stub = await channels.stub(callee.info())
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        refusals = Refusals()
        unauthenticated = callee.service.unauthenticated = Unauthenticated(refusals, most_of_one=3)
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        held = [
            await soon(asyncio.open_connection("127.0.0.1", callee.port, **tls)) for _ in range(8)
        ]

        def enough() -> bool:
            unauthenticated.look(callee.port)
            return unauthenticated.ended >= 5

        await until_async(lambda: asyncio.sleep(0, enough()), 10, "five of eight are ended")
        unauthenticated.look(callee.port)
        assert unauthenticated.ended == 5 and refusals.counts() == {"connection.too-many": 5}
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        assert len(callee.introduced) == 3
        for _, writer in held:
            writer.transport.abort()


def test_all_unauthenticated_connections_of_a_blocked_address_are_too_many():
    one = Unauthenticated()
    places = [("192.0.2.1", port) for port in range(3)]
    one.vouch(places[0])
    assert one.surplus(places, monotonic()) == []
    one.block("192.0.2.1")
    assert set(one.surplus([*places, ("192.0.2.2", 1)], monotonic())) == set(places[1:])


@pytest.mark.slow
async def test_a_flood_of_connections_is_not_answered_and_a_peer_at_its_address_is_heard():
    few = Allowed(each=2, all=UNBOUND, seconds=60.0)
    async with listening() as callee, calling() as channels:
        unauthenticated = callee.service.unauthenticated = Unauthenticated(
            most_of_one=1, ended=few, blocked=2.0
        )
        stub = await channels.stub(callee.info())
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        held = [await soon(asyncio.open_connection("127.0.0.1", callee.port)) for _ in range(5)]

        def connects() -> bool:
            unauthenticated.look(callee.port)
            return comes_through(callee.port)

        await until_async(lambda: asyncio.to_thread(lambda: not connects()), 10, "it is blocked")
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        await until_async(lambda: asyncio.to_thread(connects), 20, "it is blocked no longer")
        for _, writer in held:
            writer.transport.abort()


async def test_who_goes_on_with_calls_beyond_its_limits_can_t_connect_any_more():
    none = Allowed(each=1, all=UNBOUND, seconds=60.0)
    async with listening() as callee, calling() as channels:
        callee.service._rate_limits = RateLimits(bad_calls=none, refused=none)
        unauthenticated = callee.service.unauthenticated
        stub = await channels.stub(callee.info())

        async def flood() -> bool:
            with suppress(grpc.RpcError):
                await stub.Describe(pb.Introduction(), timeout=5)
            unauthenticated.look(callee.port)
            return not await asyncio.to_thread(comes_through, callee.port)

        await until_async(flood, 20, "it is blocked")


def comes_through(port: int) -> bool:
    """Whether a new connection is answered; loopback takes a millisecond."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True
