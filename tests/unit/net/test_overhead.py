"""What must hold for frames of peers that belong to no message: they end a connection, messages
never do."""

import asyncio
from time import time

import pytest

from helpers.http2 import FLOODS, Connection, call, connected
from helpers.waiting import until_async
from helpers.wire import CALLEE, RUN, Callee, calling, listening, soon
from lowcomm_node.net import unauthenticated as unauthenticated_module
from lowcomm_node.net.overhead import (
    BURST,
    OF_MESSAGE,
    RATE,
    SHARE,
    Explaining,
    Overhead,
)
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.net.traffic import Meter
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb

HERE, THERE = ("192.0.2.1", 1), ("198.51.100.1", 1)
MIB = 1024**2


def test_what_belongs_to_messages_is_no_excess():
    one, received = Overhead(), 0
    counts = Explaining(Meter(), one, HERE)
    for second in range(100):
        counts.received(MIB)
        received += MIB + int(SHARE * MIB) + OF_MESSAGE
        assert one.excess({HERE: received}, float(second)) == []


def test_a_message_may_come_long_before_it_is_read():
    one = Overhead()
    assert one.excess({HERE: BURST}, 0.0) == []
    one.explain(HERE, BURST)
    assert one.excess({HERE: 2 * BURST}, 1.0) == []


def test_the_noisiest_connection_of_an_address_ends_and_no_others():
    one, quiet = Overhead(), ("192.0.2.1", 2)
    assert one.excess({HERE: 0, quiet: 0, THERE: 0}, 0.0) == []
    assert one.excess({HERE: BURST, quiet: 2 * RATE, THERE: BURST}, 1.0) == [HERE]
    assert one.excess({quiet: 2 * RATE, THERE: BURST}, 1000.0) == [], "it has leaked away"


def test_many_connections_of_an_address_have_as_much_as_one():
    one, places = Overhead(), [("192.0.2.1", port) for port in range(100)]
    assert one.excess(dict.fromkeys(places, 0), 0.0) == []
    assert len(one.excess(dict.fromkeys(places, BURST // 50), 1.0)) == 1


def test_what_is_not_there_any_more_is_forgotten():
    one = Overhead()
    for port in range(10):
        one.explain(("192.0.2.1", port), 1.0)
        one.excess({(f"192.0.2.{port}", port): 0}, 0.0)
    assert len(one._seen) == len(one._levels) == 1


async def test_contents_and_many_small_messages_over_a_real_connection_are_explained():
    """Both ways: what a peer sends to acknowledge our bytes is explained, too."""
    large, small = pb.Frame(chunk=pb.Chunk(data=bytes(MIB))), pb.Frame(chunk=pb.Chunk(data=b"x"))
    frames = [*[large] * 24, *[small] * 1500]

    async def echo(peer: str, stream: CalleeStream) -> None:
        for frame in frames:
            await stream.receive()
            await stream.send(frame)

    async with listening() as callee, calling() as channels:
        callee.swapping = echo
        unauthenticated = callee.service.unauthenticated
        stub = await channels.stub(callee.info())
        stream = CallerStream(stub.Swap(metadata=channels.metadata(CALLEE.peer_id)))
        for frame in frames:
            await soon(stream.send(frame))
            await soon(stream.receive())
        unauthenticated.look(callee.port)
        (level,) = unauthenticated.overhead._levels.values()
        stream.cancel()
        assert level < MIB, "of 48 in both directions"


async def authenticated(callee: Callee, flooding: Connection) -> None:
    """Have it make a call as a peer does."""
    keeper = Gatekeeper(Identity(b"f" * 32), RUN, time)
    path = b"/lowcomm.v1.Exchange/Describe"
    flooding.writer.write(call(1, path, keeper.credential_for(CALLEE.peer_id)))
    await until_async(lambda: asyncio.sleep(0, bool(callee.introduced)), 20, "its call was good")


@pytest.mark.parametrize("kind", sorted(FLOODS))
async def test_a_peer_that_floods_with_frames_loses_its_connection_and_no_other_peer_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unauthenticated_module, "EVERY", 0.1)
    async with listening() as callee, calling() as channels, connected(callee.port) as flooding:
        callee.service.unauthenticated.overhead = Overhead(burst=MIB // 8, rate=16 * 1024)
        await authenticated(callee, flooding)
        stub = await channels.stub(callee.info())
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        looking = asyncio.create_task(callee.service.unauthenticated.run(callee.port))
        await soon(flooding.flood(lambda number: FLOODS[kind](number + 1), 50_000))
        await stub.Describe(
            pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=20
        )
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
