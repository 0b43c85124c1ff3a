"""What must hold for pipes and the choice of routes: real gRPC at both ends, the twin of libp2p
between them."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from helpers.memory_dht import MemoryNetwork
from helpers.tunnelling import ADA, BOB, EVE, RUN, chunk, cut, end, ends, pair, received, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import local, peer_channel, pipe
from lowcomm_node.net.control import OpenStream
from lowcomm_node.net.pipe import Pipes, carry, protocol_of
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

pytestmark = pytest.mark.slow


@pytest.fixture(params=["abstract names", "files"])
def names(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Sockets as on Linux, and as where no name is abstract: their files are gone afterwards."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(local, "ABSTRACT", request.param != "files")
    yield request.param
    assert not list(tmp_path.glob("lowcomm/*"))


# One pipe


async def test_every_byte_comes_in_order_however_slowly_it_is_taken():
    loop = asyncio.get_running_loop()
    (near, inner), (stream, far) = socket.socketpair(), socket.socketpair()
    for one in (near, inner, stream, far):
        one.setblocking(False)
    moved = asyncio.create_task(carry(inner, stream))
    await asyncio.sleep(0)
    for source, sink in ((near, far), (far, near)):
        sent = bytes(range(256)) * 2**13
        sending = asyncio.create_task(loop.sock_sendall(source, sent))
        got = b""
        while len(got) < len(sent):
            got += await soon(loop.sock_recv(sink, 50_000))
        await sending
        assert got == sent
    near.shutdown(socket.SHUT_WR)
    await soon(moved)
    near.close()
    far.close()


# Who calls


async def test_a_stream_that_our_grpc_never_dials_ends(names: str, monkeypatch: pytest.MonkeyPatch):
    async with pair() as (ada, bob):
        with monkeypatch.context() as patch:
            patch.setattr(pipe, "UNACCEPTED", 0.1)
            outgoing = await ada.pipes.dial(bob.peer_id, ())
            await until_async(lambda: not outgoing.is_open, 30, "the stream has ended")


async def test_a_call_without_a_credential_or_with_that_of_another_peer_is_refused(names: str):
    async with pair(EVE) as (ada, bob, eve):
        outgoing = await ada.pipes.dial(bob.peer_id, ())
        async with aio.insecure_channel(outgoing.target) as channel:
            for metadata in (
                None,
                eve.channels.metadata(bob.peer_id),
                (("lowcomm-credential-bin", b"rubbish"),),
            ):
                describe = ExchangeStub(channel).Describe
                with pytest.raises(aio.AioRpcError) as caught:
                    await soon(describe(pb.Introduction(), metadata=metadata, timeout=30))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not bob.callers


async def test_a_process_of_this_machine_that_calls_through_no_pipe_is_refused(names: str):
    async with pair() as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        async with aio.insecure_channel(local.target_of(bob.server.local)) as channel:
            metadata = ada.channels.metadata(bob.peer_id)
            describe = ExchangeStub(channel).Describe
            with pytest.raises(aio.AioRpcError, match="comes through no pipe"):
                await soon(describe(pb.Introduction(), metadata=metadata, timeout=30))


async def test_another_process_of_this_machine_can_not_use_our_pipe(names: str):
    async with pair() as (ada, bob):
        outgoing = await ada.pipes.dial(bob.peer_id, ())
        code = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(20)\n"
            "s.connect(sys.argv[1].replace('@', '\\0'))\nprint(len(s.recv(10)))"
        )
        name = outgoing.target.replace("unix-abstract:", "@").removeprefix("unix:")
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, name], capture_output=True, text=True
        )
        assert done.stdout.strip() == "0", done.stderr
        async with aio.insecure_channel(outgoing.target) as channel:
            metadata = ada.channels.metadata(bob.peer_id)
            describe = ExchangeStub(channel).Describe
            assert await soon(describe(pb.Introduction(), metadata=metadata, timeout=30))


# How much


async def test_streams_are_bounded_by_peer_and_by_place(monkeypatch):
    monkeypatch.setattr(pipe, "MAX_OF_PEER", 2)
    async with pair(EVE) as (ada, bob, eve):
        kept = [await ada.streams.open_stream(bob.peer_id, protocol_of(RUN), 1) for _ in range(9)]
        assert bob.pipes.statistics() == {"open": 2, "refused": 7}
        assert await soon(eve.introduce(bob.info())) == eve.peer_id, "others still get through"
        for stream in kept:
            stream.socket.close()


async def test_a_stream_without_an_accepted_call_ends_and_one_with_such_a_call_stays(monkeypatch):
    monkeypatch.setattr(pipe, "UNACCEPTED", 0.5)
    async with pair() as (ada, bob):
        call = await ada.call(bob.info())
        silent = await ada.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
        await until_async(
            lambda: bob.pipes.statistics()["open"] == 1, 30, "the silent stream is closed"
        )
        await asyncio.get_running_loop().sock_recv(silent.socket, 65536)
        assert await soon(asyncio.get_running_loop().sock_recv(silent.socket, 1)) == b""
        silent.socket.close()
        await call.send(chunk(0, 8))
        assert await received(call) == chunk(0, 8)


async def test_a_peer_that_takes_streams_and_never_answers_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(pipe, "ANSWER_DEADLINE", 0.1)
    network = MemoryNetwork(lambda: 0.0)
    silent, kept = end(BOB, network), list[OpenStream]()
    async with ends(end(ADA, network)) as (ada,):
        await silent.streams.serve_streams(protocol_of(RUN), kept.append)
        with pytest.raises(LinkLost, match="did not answer in time"):
            await soon(ada.pipes.dial(BOB.peer_id, ()))
        assert len(kept) == 2, "once more, over another connection"
        for stream in kept:
            stream.socket.close()


async def test_a_peer_of_another_run_does_not_get_through():
    async with pair() as (ada, bob):
        with pytest.raises(LinkLost):
            await Pipes(ada.streams, "cd" * 32).dial(bob.peer_id, ())
        assert not bob.pipes.statistics()["refused"]


# Streams that break off


async def test_a_stream_that_breaks_off_ends_its_calls_and_the_next_call_opens_another():
    async with pair() as (ada, bob):
        call = await ada.call(bob.info())
        await call.send(chunk(0, 8))
        assert await received(call) == chunk(0, 8)
        cut(ada)
        with pytest.raises(LinkLost):
            await soon(call.receive())
        await until_async(
            lambda: ada.channels.describe(bob.peer_id).route is None,
            30,
            "the route is lost",
        )
        again = await ada.call(bob.info())
        await again.send(chunk(1, 8))
        assert await received(again) == chunk(1, 8)


# The choice, carried out


async def test_a_relayed_tunnel_gives_way_to_a_direct_one_and_its_calls_go_on(monkeypatch):
    monkeypatch.setattr(peer_channel, "LOOK_EVERY", 0.0)
    async with pair() as (ada, bob):
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        punched, network.address = (
            network.address,
            f"{network.address}/p2p/{EVE.peer_id}/p2p-circuit",
        )
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await received(stream) == chunk(0, 8)
        assert ada.channels.describe(bob.peer_id).route == f"relay {EVE.peer_id[-6:]}"
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        assert ada.channels.describe(bob.peer_id).route.startswith("relay"), (
            "there is no better one"
        )
        network.address = punched

        async def better() -> bool:
            await ada.introduce(bob.info())
            return ada.channels.describe(bob.peer_id).route == "punched"

        await until_async(better, 30, "the direct connection is used")
        await stream.send(chunk(1, 8))
        assert await received(stream) == chunk(1, 8)
        await stream.close()
