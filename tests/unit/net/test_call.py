"""What must hold for callers that do not read: nothing that their calls hold is held for ever, here
or in gRPC."""

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager

import grpc
import pytest
from grpc import aio

from helpers.tunnelling import EVE, End, chunk, pair, piece, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import call, ping
from lowcomm_node.net import server as server_module
from lowcomm_node.net.bandwidth import FREE_WINDOW
from lowcomm_node.net.connections import Endings
from lowcomm_node.sync.driver import answer_in_time
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

CALLS = 3


async def flood(peer, stream) -> None:
    """Send until the caller's window is full, then end with a reason."""
    try:
        async with asyncio.timeout(0.5):
            while True:
                await stream.send(chunk(0, 2**16))
    except TimeoutError:
        raise LinkLost("takes nothing") from None


async def endless(peer, stream):
    while True:
        await stream.send(piece(2**16))


@asynccontextmanager
async def dialed(caller: End, callee: End, route: str):
    """A channel that nothing else uses."""
    if route == "direct":
        channel = await caller.channels._dialers.direct(
            callee.info(addresses=(f"127.0.0.1:{callee.port}",))
        )
    else:
        channel = caller.channels._dialers.local(caller.tunnels.dialer(callee.peer_id).target)
    async with channel:
        yield channel


async def begin(stub: ExchangeStub, kind: str, metadata):
    """A call that asks for much; nobody reads what comes."""
    if kind == "fetch":
        return stub.Fetch(metadata=metadata)
    begun = (stub.Swap if kind == "swap" else stub.Ping)(metadata=metadata)
    try:
        async with asyncio.timeout(0.3):
            while True:
                await begun.write(chunk(0, 8) if kind == "swap" else pb.Ping(wanted=2**16))
                if kind == "swap":
                    break
    except TimeoutError:
        pass
    return begun


@pytest.mark.slow
@pytest.mark.parametrize("route", ["direct", "tunnel"])
@pytest.mark.parametrize("kind", ["swap", "fetch", "ping"])
async def test_calls_whose_caller_does_not_read_end_and_leave_room_for_others(
    tmp_path, monkeypatch, kind, route
):
    calls = 1 if kind == "ping" else CALLS
    monkeypatch.setattr(server_module, "MAX_CALLS", calls)
    monkeypatch.setattr(call, "TAKE_DEADLINE", 1.0)
    monkeypatch.setattr(ping, "CALL_SECONDS", 1.0)
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        bob.swapping, bob.fetch = flood, endless
        async with dialed(eve, bob, route) as channel, dialed(ada, bob, "tunnel") as other:
            begun = [
                await begin(ExchangeStub(channel), kind, eve.channels.metadata(bob.peer_id))
                for _ in range(calls)
            ]

            async def served() -> bool:
                try:
                    answer = await ExchangeStub(other).Describe(pb.Introduction(), timeout=10)
                except aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    return False
                return answer.release == ada.peer_id

            try:
                await until_async(
                    lambda: asyncio.sleep(0, bob.service.open_calls == calls),
                    10,
                    "the calls have begun",
                )
                await until_async(
                    lambda: asyncio.sleep(0, len(bob.service._peer_limit) == 0),
                    20,
                    "no peer holds a place",
                )
                await until_async(served, 20, "gRPC has places again")
                assert not bob.service.open_calls
            finally:
                for one in begun:
                    one.cancel()


async def test_a_caller_that_nobody_reads_fills_no_more_than_its_window(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        bob.swapping = lambda peer, stream: stream.wait_dropped()
        async with dialed(ada, bob, "direct") as channel:
            swap, size, written = (
                ExchangeStub(channel).Swap(metadata=ada.channels.metadata(bob.peer_id)),
                2**18,
                0,
            )
            try:
                while written < 20 * FREE_WINDOW:
                    async with asyncio.timeout(1.0):
                        await swap.write(chunk(0, size))
                    written += size
            except TimeoutError:
                pass
            swap.cancel()
    assert written <= 2 * FREE_WINDOW, "gRPC's own window grows for as long as somebody fills it"


@pytest.mark.slow
async def test_a_caller_that_reads_slowly_keeps_its_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(call, "TAKE_DEADLINE", 1.0)

    async def much(peer, stream):
        for _ in range(200):
            await stream.send(piece(2**16))

    async with pair(tmp_path) as (ada, bob):
        bob.fetch = much
        async with dialed(ada, bob, "direct") as channel:
            fetched = ExchangeStub(channel).Fetch(metadata=ada.channels.metadata(bob.peer_id))
            for number in range(200):
                assert len((await soon(fetched.read())).chunk.data) == 2**16
                if number % 40 == 0:
                    await asyncio.sleep(
                        0.3
                    )  # more than the deadline in all: slow is not the same as not at all
            assert await soon(fetched.read()) is aio.EOF


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_the_connection_of_one_peer_is_ended_and_no_other(family):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server((host, 0), family=family))
        except OSError:
            pytest.skip("this machine has no IPv6")
        callers, callees = [], []
        for _ in range(2):
            callers.append(stack.enter_context(socket.create_connection(server.getsockname()[:2])))
            callees.append(stack.enter_context(server.accept()[0]))
        port = callers[0].getsockname()[1]
        endings, peer = (
            Endings(),
            f"ipv4:127.0.0.1:{port}" if family == socket.AF_INET else f"ipv6:%5B::1%5D:{port}",
        )
        assert endings.end(peer)
        assert not endings.end(peer), "one look is enough, however many calls came by it"
        callers[0].setblocking(False)
        assert await soon(asyncio.get_running_loop().sock_recv(callers[0], 1)) == b""
        assert endings.end(peer), "later it may be another one"
        callees[1].sendall(b"x")
        assert callers[1].recv(1) == b"x"


async def test_a_caller_that_does_not_take_our_answer_is_not_waited_for():
    class Full:
        async def send(self, frame: pb.Frame) -> None:
            await asyncio.Event().wait()

    with pytest.raises(LinkLost, match="did not take our answer"):
        await soon(answer_in_time(Full(), pb.Frame(), 0.1), 5)


async def test_a_caller_that_does_not_take_a_refusal_of_its_pings_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ping, "REFUSE_DEADLINE", 0.1)

    class Full:
        async def send(self, pong: pb.Pong) -> None:
            await asyncio.Event().wait()

    echo = ping.Echo()
    echo._calls["a"] += 1
    with pytest.raises(LinkLost, match="does not read"):
        await soon(echo.answer("a", Full()), 5)
