"""What must hold for connections on which nobody shows who it is."""

import asyncio
import ssl

import pytest
from wire import CALLEE, SERVER_NAME, calling, listening, soon

from lowcomm_node.exchange.strangers import MAX_KNOWN, Strangers
from lowcomm_protocol.messages import exchange_pb2 as pb
from waiting import until_async


def test_the_oldest_of_an_address_that_has_too_many_are_ended_and_no_others():
    one = Strangers(most_of_one=2, most=100)
    first, other = [("192.0.2.1", port) for port in range(3)], [("192.0.2.2", 1), ("192.0.2.2", 2)]
    assert one.surplus(first[:1], 0.0) == []
    assert one.surplus([*first, *other], 1.0) == first[:1]
    assert one.surplus([*first[1:], *other], 2.0) == []


def test_of_all_addresses_together_there_are_so_many():
    one = Strangers(most_of_one=2, most=3)
    places = [(f"192.0.2.{number}", 1) for number in range(5)]
    for number in range(5):
        over = one.surplus(places[: number + 1], float(number))
        assert over == places[: max(0, number - 2)]


def test_a_household_of_ipv6_is_one_stranger():
    places = [(f"2001:db8::{number}", 1) for number in range(5)]
    assert len(Strangers(most_of_one=2).surplus(places, 0.0)) == 3


def test_whoever_has_shown_a_credential_is_left_alone():
    one = Strangers(most_of_one=1)
    places = [("192.0.2.1", port) for port in range(5)]
    for place in places[:4]:
        one.vouch(place)
    assert one.surplus(places, 0.0) == []


def test_memory_does_not_grow_with_those_that_have_come():
    one = Strangers()
    for port in range(MAX_KNOWN + 10):
        one.vouch(("192.0.2.1", port))
        one.surplus([("192.0.2.2", port)], float(port))
    assert len(one._known) == MAX_KNOWN and len(one._since) == 1


@pytest.mark.parametrize("encrypted", [True, False])
async def test_half_open_connections_are_ended_and_a_peer_that_calls_is_not(encrypted: bool):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    tls = {"ssl": context, "server_hostname": SERVER_NAME} if encrypted else {}
    async with listening() as callee, calling() as channels:
        stub = await channels.stub(callee.info())
        await stub.Describe(pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20)
        strangers = callee.service.strangers = Strangers(most_of_one=3)
        await stub.Describe(pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20)
        held = [await soon(asyncio.open_connection("127.0.0.1", callee.port, **tls)) for _ in range(8)]

        def enough() -> bool:
            strangers.look(callee.port)
            return strangers.ended >= 5

        await until_async(lambda: asyncio.sleep(0, enough()), 10, "five of eight are ended")
        strangers.look(callee.port)
        assert strangers.ended == 5
        await stub.Describe(pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20)
        assert len(callee.introduced) == 3
        for _, writer in held:
            writer.transport.abort()
