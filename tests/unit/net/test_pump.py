"""What must hold for the pipes of tunnels: real sockets at both ends, and streams between them that
break off."""

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from helpers.tunnelling import soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import pump as pump_module
from lowcomm_node.net.frames import ANSWER, Signal, numbered, word
from lowcomm_node.net.pump import Pump
from lowcomm_node.net.session import Session, Sizes, Slabs
from lowcomm_protocol.errors import ProtocolViolation

SIZES = Sizes(slab=16 * 1024, window=256 * 1024, ack_every=32 * 1024)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected."""
    near, far = socket.socketpair()
    for one in (near, far):
        one.setblocking(False)
    return near, far


class Piped:
    """Two local sockets, and the pipes that join them over one stream after the other."""

    def __init__(self) -> None:
        (self.near, near_local), (self.far, far_local) = pair(), pair()
        self.slabs = Slabs(SIZES)
        self.caller = Pump(near_local, Session(self.slabs), calls=True)
        self.callee = Pump(far_local, Session(self.slabs), calls=False)
        self.lead()

    def lead(self) -> None:
        """Join them over a fresh stream, as Tunnels does."""
        stream, other = pair()
        number = self.callee.received
        with suppress(ProtocolViolation):
            self.callee.accept(other, self.caller.received)
        assert stream.recv(ANSWER, socket.MSG_WAITALL) == numbered(Signal.READY, number)
        self.caller.attach(stream, number)

    def cut(self) -> None:
        """Break the stream off, with whatever is on its way."""
        if not self.caller.carried:
            return
        assert self.caller._stream is not None
        self.caller._stream.socket.shutdown(socket.SHUT_RDWR)

    async def resume(self) -> None:
        """Give them streams for as long as they need any."""
        while await self.caller.wait_cut():
            # The callee's end may have seen nothing of the break.
            self.lead()


@asynccontextmanager
async def piped() -> AsyncIterator[Piped]:
    made = Piped()
    try:
        yield made
    finally:
        for one in (made.caller, made.callee, made.near, made.far):
            one.close()
        assert made.slabs.used == 0, "all memory is given back"


async def send(sink: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sink, data)
    sink.shutdown(socket.SHUT_WR)


async def read_all(source: socket.socket) -> bytes:
    data = bytearray()
    while part := await asyncio.get_running_loop().sock_recv(source, 2**20):
        data += part
    return bytes(data)


async def test_bytes_go_both_ways_at_once_and_each_way_ends_by_itself():
    async with piped() as ends:
        there, back = os.urandom(3_000_000), os.urandom(5_000_000)
        sending = asyncio.create_task(send(ends.near, there))
        assert await soon(read_all(ends.far)) == there
        assert ends.callee.carried, "the way back is still open"
        await soon(
            asyncio.gather(
                sending, send(ends.far, back), reading := asyncio.create_task(read_all(ends.near))
            )
        )
        assert reading.result() == back
        assert not await soon(ends.caller.wait_cut())
        assert not await soon(ends.callee.wait_cut())


@pytest.mark.parametrize("size", [1, 10_000, 1_000_000])
async def test_an_end_that_closes_at_once_takes_no_byte_with_it(size):
    async with piped() as ends:
        data = os.urandom(size)
        receiving = asyncio.create_task(read_all(ends.far))
        await asyncio.get_running_loop().sock_sendall(ends.near, data)
        ends.near.close()
        assert await soon(receiving) == data
        ends.far.close()
        assert not await soon(ends.caller.wait_cut())
        assert not await soon(ends.callee.wait_cut())


@pytest.mark.parametrize("seed", range(8))
async def test_streams_that_break_off_at_any_time_cost_nothing_but_a_repetition(seed):
    draw = random.Random(seed)
    async with piped() as ends:
        there, back = draw.randbytes(2_000_000), draw.randbytes(draw.randrange(2_000_000))
        resuming = asyncio.create_task(ends.resume())
        work = asyncio.gather(
            send(ends.near, there), send(ends.far, back), read_all(ends.near), read_all(ends.far)
        )
        for _ in range(20):
            for _ in range(draw.randrange(50)):
                await asyncio.sleep(0)
            ends.cut()
        _, _, come_back, come = await soon(work)
        assert come == there and come_back == back
        await soon(resuming)
        assert not await soon(ends.callee.wait_cut())
        assert ends.caller.resumed > 0


async def test_who_does_not_read_stops_who_writes():
    async with piped() as ends:
        loop, sent = asyncio.get_running_loop(), 0
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(1.0):
                    await loop.sock_sendall(ends.near, bytes(65536))
                sent += 65536
        assert sent < 4 * 2**20
        local, _ = ends.callee.blocked(loop.time())
        _, stream = ends.caller.blocked(loop.time())
        assert local > 0.5 and stream > 0.5
        assert ends.caller.idle(loop.time()) > 0.5
        reading = asyncio.create_task(read_all(ends.far))
        await soon(send(ends.near, b"and on"))
        data = await soon(reading)
        assert len(data) >= sent + 6 and data.endswith(b"and on"), "it goes on when it is read"
        assert ends.caller.blocked(loop.time()) == (0, 0)


async def test_both_ends_hold_their_sockets_while_there_is_no_stream():
    async with piped() as ends:
        loop = asyncio.get_running_loop()
        for one, other in ((ends.near, ends.far), (ends.far, ends.near)):
            await loop.sock_sendall(one, b"x")
            assert await soon(loop.sock_recv(other, 1)) == b"x"
        ends.cut()
        assert await soon(ends.caller.wait_cut()) and await soon(ends.callee.wait_cut())
        assert ends.caller.cut == "broke off"
        await loop.sock_sendall(ends.near, b"y")
        ends.lead()
        assert await soon(loop.sock_recv(ends.far, 1)) == b"y"
        assert ends.caller.cut == ends.callee.cut == ""


async def test_a_stream_that_takes_the_place_of_another_that_nobody_knows_to_be_dead():
    async with piped() as ends:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ends.near, b"x")
        assert await soon(loop.sock_recv(ends.far, 1)) == b"x"
        await loop.sock_sendall(ends.far, b"x")
        assert await soon(loop.sock_recv(ends.near, 1)) == b"x"
        ends.caller.cut_off("took nothing")
        ends.lead()
        await loop.sock_sendall(ends.far, b"y")
        assert await soon(loop.sock_recv(ends.near, 1)) == b"y"


async def test_a_session_in_which_nothing_has_come_is_not_kept():
    async with piped() as ends:
        ends.cut()
        for one in (ends.caller, ends.callee):
            with pytest.raises(LinkLost, match="broke off"):
                await soon(one.wait_cut())
        assert await soon(read_all(ends.near)) == b""


async def test_an_end_that_gives_up_ends_the_other_at_once():
    async with piped() as ends:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ends.near, b"x")
        assert await soon(loop.sock_recv(ends.far, 1)) == b"x"
        ends.caller.close()
        with pytest.raises(LinkLost, match="closed by the other end"):
            await soon(ends.callee.wait_cut())
        assert await soon(read_all(ends.far)) == b""


@asynccontextmanager
async def alone(*, calls: bool) -> AsyncIterator[tuple[Pump, socket.socket, socket.socket]]:
    """A pipe, its local end, and the other end of its stream, where a test plays the peer."""
    (near, far), (local, mine) = pair(), pair()
    pump = Pump(local, Session(Slabs(SIZES)), calls=calls)
    pump.attach(near, 0)
    with mine, far:
        try:
            yield pump, mine, far
        finally:
            pump.close()
        assert local.fileno() == near.fileno() == -1


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\0\0\0\0",
        b"\xff" * 4,
        numbered(Signal.READY, 0),
        word(Signal.END) + word(1) + b"x",
        numbered(Signal.ACK, 1),
        word(Signal.NEW),
    ],
)
async def test_a_peer_that_breaks_the_rules_loses_its_session(rubbish):
    async with alone(calls=False) as (pump, mine, far):
        await asyncio.get_running_loop().sock_sendall(far, rubbish)
        with pytest.raises(ProtocolViolation):
            await soon(pump.wait_cut())
        assert await soon(read_all(mine)) == b""


@pytest.mark.parametrize("number", [1, 2**64 - 1])
async def test_a_peer_that_claims_what_it_can_not_have_loses_its_session(number):
    async with alone(calls=False) as (pump, mine, far):
        await asyncio.get_running_loop().sock_sendall(far, word(1) + b"x")
        assert await soon(asyncio.get_running_loop().sock_recv(mine, 1)) == b"x"
        stream, other = pair()
        with other, pytest.raises(ProtocolViolation):
            pump.accept(stream, number)
        assert stream.fileno() == -1
        with pytest.raises(ProtocolViolation):
            await soon(pump.wait_cut())


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_stream_that_comes_late_takes_no_other_ones_place(is_cut):
    """Its caller has given it up, and said on another one that it has received more."""
    async with alone(calls=False) as (pump, mine, far):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(far, word(1) + b"x")
        assert await soon(loop.sock_recv(mine, 1)) == b"x"
        await loop.sock_sendall(mine, b"hello")
        assert await soon(loop.sock_recv(far, 100)) == word(5) + b"hello"
        await loop.sock_sendall(far, numbered(Signal.ACK, 5))
        await until_async(
            lambda: asyncio.sleep(0, pump._session.acked == 5), 30, "it is acknowledged"
        )
        if is_cut:
            pump.cut_off("broke off")
        late, other = pair()
        with other:
            assert not pump.accept(late, 0)
            assert late.fileno() == -1
        if is_cut:
            stream, far = pair()
            assert pump.accept(stream, 5)
            assert await soon(loop.sock_recv(far, ANSWER)) == numbered(Signal.READY, 1)
        with far:
            await loop.sock_sendall(mine, b"on")
            assert await soon(loop.sock_recv(far, 100)) == word(2) + b"on", (
                "the session has noticed nothing"
            )


async def test_thousands_of_tiny_pieces_are_passed_on_a_few_in_each_turn_of_the_loop():
    async with alone(calls=False) as (pump, mine, far):
        turn, taken, feed = 0, Counter[int](), pump._session.feed

        async def count() -> None:
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        def counted(parts):
            taken[turn] += len(parts)
            return feed(parts)

        pump._session.feed = counted
        counting = asyncio.create_task(count())
        sending = asyncio.create_task(send(far, (word(1) + b"x") * 20_000 + word(Signal.END)))
        assert await soon(read_all(mine)) == b"x" * 20_000
        await sending
        counting.cancel()
        assert taken.total() == 20_001
        assert max(taken.values()) <= 2 * pump_module.MOST_PARTS, "others get their turns meanwhile"


async def test_what_is_in_the_buffer_when_a_stream_is_cut_comes_again():
    async with alone(calls=False) as (pump, mine, far):
        loop, data = asyncio.get_running_loop(), os.urandom(1_000)
        begun, feed = asyncio.Event(), pump._session.feed

        def noticed(parts):
            begun.set()
            return feed(parts)

        pump._session.feed = noticed
        await loop.sock_sendall(
            far, b"".join(word(1) + data[place : place + 1] for place in range(1_000))
        )
        await soon(begun.wait())
        assert pump.received < len(data)
        pump.cut_off("broke off")
        stream, far = pair()
        received = pump.received
        pump.accept(stream, 0)
        assert await soon(loop.sock_recv(far, ANSWER)) == numbered(Signal.READY, received)
        with far:
            rest = data[received:]
            await loop.sock_sendall(
                far, (word(len(rest)) + rest if rest else b"") + word(Signal.END)
            )
            assert await soon(read_all(mine)) == data


@pytest.mark.parametrize("calls", [True, False])
async def test_a_peer_that_never_acknowledges_the_end_is_not_waited_for(monkeypatch, calls):
    monkeypatch.setattr(pump_module, "LINGER", 0.1)
    async with alone(calls=calls) as (pump, mine, _):
        mine.close()
        with pytest.raises(LinkLost, match="did not end"):
            await soon(pump.wait_cut())


async def test_a_caller_that_has_missed_only_the_last_word_is_done_when_it_is_told():
    async with alone(calls=True) as (pump, mine, far):
        loop = asyncio.get_running_loop()
        mine.close()
        assert await soon(loop.sock_recv(far, 100)) == word(Signal.END)
        await loop.sock_sendall(far, word(Signal.END))
        assert await soon(loop.sock_recv(far, 100)) == numbered(Signal.ACK, 1)
        far.close()
        assert await soon(pump.wait_cut())
        stream, other = pair()
        with other:
            pump.attach(stream, 1)
            assert not await soon(pump.wait_cut())
