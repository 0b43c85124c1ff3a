"""What must hold for tunnels, whatever carries their streams: real gRPC at both ends, the twin of libp2p between them."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import time

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from wire import new_certificate

from lowcomm_node.discovery.interface import OpenStream
from lowcomm_node.discovery.memory import MemoryDiscovery, MemoryNetwork
from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange import pipe as pipes
from lowcomm_node.exchange import tunnel
from lowcomm_node.exchange.pipe import Pipe
from lowcomm_node.exchange.tunnel import Tunnels, protocol_of
from lowcomm_node.exchange.tunnel_frames import MAX_LENGTH, Decoder, Signal, word
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from tunnelling import RUN, End, chunk, ends, soon
from waiting import until_async

ADA, BOB, EVE = (Identity(bytes([number]) * 32) for number in (11, 12, 13))
CERTIFICATE = new_certificate()
Status = grpc.StatusCode


def end(identity: Identity, network: MemoryNetwork) -> End:
    return End(identity, MemoryDiscovery(identity.peer_id, network), CERTIFICATE)


@asynccontextmanager
async def pair(tmp_path: Path, *others: Identity) -> AsyncIterator[tuple[End, ...]]:
    network = MemoryNetwork(time)
    made = [end(identity, network) for identity in (ADA, BOB, *others)]
    async with ends(*made, folder=tmp_path) as (*all_,):
        yield tuple(all_)


# Words


def test_pieces_and_signals_come_out_as_they_went_in():
    data = word(3) + b"abc" + word(Signal.END) + word(Signal.ACK)
    parts = list(Decoder().feed(memoryview(data)))
    assert [part if isinstance(part, Signal) else bytes(part) for part in parts] == [b"abc", Signal.END, Signal.ACK]


PARTS = st.lists(st.binary(min_size=1, max_size=300) | st.sampled_from(Signal), max_size=20)


@given(PARTS, st.lists(st.integers(1, 50)))
def test_it_does_not_matter_how_the_bytes_are_cut(parts, cuts):
    data = b"".join(word(part) if isinstance(part, Signal) else word(len(part)) + part for part in parts)
    decoder, found, signals = Decoder(), b"", list[tuple[int, Signal]]()
    while data:
        size = cuts.pop() if cuts else len(data)
        for part in decoder.feed(memoryview(data[:size])):
            if isinstance(part, Signal):
                signals.append((len(found), part))
            else:
                found += part
        data = data[size:]
    assert found == b"".join(part for part in parts if isinstance(part, bytes))
    expected, place = [], 0
    for part in parts:
        if isinstance(part, Signal):
            expected.append((place, part))
        else:
            place += len(part)
    assert signals == expected


@pytest.mark.parametrize("number", [0, MAX_LENGTH + 1, Signal.END - 1, max(Signal) + 1, 2**32 - 1])
def test_a_word_that_is_neither_length_nor_signal_is_refused(number):
    with pytest.raises(ProtocolViolation):
        list(Decoder().feed(memoryview(word(number))))


# Pipes


@asynccontextmanager
async def piped() -> AsyncIterator[tuple[socket.socket, socket.socket, list[Pipe], list[asyncio.Task[None]]]]:
    """Two local sockets, and the pipes and their tasks that join them over a stream."""
    sockets = [socket.socketpair() for _ in range(3)]
    for one in (one for both in sockets for one in both):
        one.setblocking(False)
    (near, near_local), (far, far_local), (stream, other) = sockets
    made = [Pipe(near_local, stream, lambda sent, received: None), Pipe(far_local, other, lambda sent, received: None)]
    tasks = [asyncio.create_task(one.run()) for one in made]
    try:
        yield near, far, made, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in (one for both in sockets for one in both):
            one.close()


async def read_all(source: socket.socket) -> bytes:
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(source, 2**20):
        data += part
    return data


async def test_bytes_go_both_ways_at_once_and_each_way_ends_by_itself():
    async with piped() as (near, far, _, tasks):
        loop = asyncio.get_running_loop()
        there, back = os.urandom(3_000_000), os.urandom(5_000_000)

        async def send(sink: socket.socket, data: bytes) -> None:
            await loop.sock_sendall(sink, data)
            sink.shutdown(socket.SHUT_WR)

        sending = asyncio.create_task(send(near, there))
        assert await soon(read_all(far)) == there
        assert not tasks[0].done(), "the way back is still open"
        await asyncio.gather(
            sending, send_back := asyncio.create_task(send(far, back)), one := asyncio.create_task(read_all(near))
        )
        assert one.result() == back and send_back.done()
        await soon(asyncio.gather(*tasks))


async def test_an_end_that_closes_at_once_takes_no_byte_with_it():
    async with piped() as (near, far, _, tasks):
        data = os.urandom(1_000_000)
        receiving = asyncio.create_task(read_all(far))
        await asyncio.get_running_loop().sock_sendall(near, data)
        near.close()
        assert await soon(receiving) == data
        far.close()
        await soon(asyncio.gather(*tasks))


async def test_who_does_not_read_stops_who_writes():
    async with piped() as (near, _, made, _):
        sent, loop = 0, asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(1.0):
                    await loop.sock_sendall(near, bytes(65536))
                sent += 65536
        except TimeoutError:
            pass
        assert sent < 8 * 2**20
        assert made[1].blocked(loop.time()) > 0.5
        assert made[0].idle(loop.time()) > 0.5


async def test_a_stream_that_breaks_off_closes_the_local_end():
    async with piped() as (near, far, _, tasks):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(near, b"x")
        assert await soon(loop.sock_recv(far, 1)) == b"x"
        tasks[1].cancel()
        assert await soon(read_all(near)) == b""
        with pytest.raises(LinkLost, match="broke off"):
            await soon(tasks[0])


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", b"\xff" * 4, word(Signal.READY), word(Signal.END) + word(1) + b"x"])
async def test_a_peer_that_breaks_the_rules_loses_its_tunnel(rubbish):
    near, far = socket.socketpair()
    local, mine = socket.socketpair()
    for one in (near, far, local):
        one.setblocking(False)
    with mine, far:
        running = asyncio.create_task(Pipe(local, near, lambda sent, received: None).run())
        await asyncio.get_running_loop().sock_sendall(far, rubbish)
        with pytest.raises((LinkLost, ProtocolViolation)):
            await soon(running)
        assert local.fileno() == near.fileno() == -1


async def test_a_peer_that_never_acknowledges_the_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pipes, "LINGER", 0.1)
    near, far = socket.socketpair()
    local, mine = socket.socketpair()
    for one in (near, far, local):
        one.setblocking(False)
    with far:
        running = asyncio.create_task(Pipe(local, near, lambda sent, received: None).run())
        mine.close()
        with pytest.raises(LinkLost, match="did not end"):
            await soon(running)


# Tunnels


async def test_the_callee_knows_who_calls_without_any_credential(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        way = ada.tunnels.way(bob.peer_id)
        async with aio.insecure_channel(way.target) as channel:
            answer = await soon(ExchangeStub(channel).Describe(pb.Introduction(), timeout=30))
            assert answer.release == ada.peer_id
            stream = ExchangeStub(channel).Swap(timeout=30)
            await stream.write(chunk(0, 8))
            assert await soon(stream.read()) == chunk(0, 8)


async def test_a_credential_of_somebody_else_is_refused(tmp_path):
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        way = ada.tunnels.way(bob.peer_id)
        async with aio.insecure_channel(way.target) as channel:
            for metadata in (eve.channels.metadata(bob.peer_id), (("lowcomm-credential-bin", b"rubbish"),)):
                with pytest.raises(aio.AioRpcError) as caught:
                    await soon(ExchangeStub(channel).Describe(pb.Introduction(), metadata=metadata, timeout=30))
                assert caught.value.code() is Status.UNAUTHENTICATED
    assert not bob.callers


@pytest.mark.parametrize("name", ["", "in.{ada}.1", "lowcomm.{token}.in.{ada}.99", "lowcomm.{token}.in.{ada}.1.x"])
async def test_a_unix_socket_that_is_none_of_our_tunnels_is_refused(tmp_path, name):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "so that a sound name is known"
        forged = name.format(ada=ada.peer_id, token=bob.tunnels._token)
        assert forged not in bob.tunnels._names
        async with forwarded(forged, bob.server.local) as target, aio.insecure_channel(target) as channel:
            metadata = ada.channels.metadata(bob.peer_id)
            with pytest.raises(aio.AioRpcError) as caught:
                await soon(ExchangeStub(channel).Describe(pb.Introduction(), metadata=metadata, timeout=30))
        assert caught.value.code() is Status.UNAUTHENTICATED
        assert "none of our tunnels" in (caught.value.details() or "")


@asynccontextmanager
async def forwarded(name: str, server: str) -> AsyncIterator[str]:
    """A target for gRPC whose connection arrives at ``server`` under the name of a unix socket."""
    listener, loop = socket.socket(socket.AF_UNIX), asyncio.get_running_loop()
    listener.bind("\0forwarded")
    listener.listen()
    listener.setblocking(False)

    async def forward() -> None:
        local, _ = await loop.sock_accept(listener)
        remote = socket.socket(socket.AF_UNIX)
        for one in (local, remote):
            one.setblocking(False)
        if name:
            remote.bind(f"\0{name}")
        await loop.sock_connect(remote, server)

        async def pump(source: socket.socket, sink: socket.socket) -> None:
            while data := await loop.sock_recv(source, 65536):
                await loop.sock_sendall(sink, data)

        with local, remote:
            await asyncio.gather(pump(local, remote), pump(remote, local))

    task = asyncio.create_task(forward())
    try:
        yield "unix-abstract:forwarded"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def test_the_servers_socket_has_no_name_that_others_could_dial(tmp_path):
    async with pair(tmp_path) as (_, bob):
        assert list(tmp_path.iterdir()) == []
        async with aio.insecure_channel(f"unix:{bob.server.local}") as channel:
            with pytest.raises(aio.AioRpcError, match="none of our tunnels"):
                await soon(ExchangeStub(channel).Describe(pb.Introduction(), timeout=30))


async def test_a_caller_over_tls_still_needs_a_credential(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        straight = bob.info(addresses=(f"127.0.0.1:{bob.port}",))
        stub = await ada.channels.stub(straight)
        assert ada.channels.describe(bob.peer_id)["route"].startswith("direct")
        for metadata in ((), (("peer", f"unix-abstract:lowcomm.{bob.tunnels._token}.in.{ada.peer_id}.1"),)):
            with pytest.raises(aio.AioRpcError, match="without a credential"):
                await soon(stub.Describe(pb.Introduction(), metadata=metadata, timeout=30))


async def test_a_flood_of_streams_is_bounded_and_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(tunnel, "MAX_TUNNELS", 6)
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        flood = [await eve.streams.open_stream(bob.peer_id, protocol_of(RUN), 1) for _ in range(50)]
        assert bob.tunnels.refused == 50 - tunnel.MAX_TUNNELS_PER_PEER
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "others get through"
        with pytest.raises(LinkLost, match="no room"):
            await eve.tunnels.open(bob.peer_id, ())
        for stream in flood:
            stream.socket.close()

        async def served_again() -> bool:
            return not bob.tunnels._held[eve.peer_id]

        await until_async(served_again, 30, "the flood has ended")
        assert await soon(eve.introduce(bob.info())) == eve.peer_id


async def test_streams_that_come_and_go_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tunnel, "MAX_NEW", 3)
    monkeypatch.setattr(tunnel, "MAX_TUNNELS_PER_PEER", 100)
    async with pair(tmp_path) as (ada, bob):
        for _ in range(20):
            stream = await ada.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
            stream.socket.close()
        assert bob.tunnels.refused > 0

        async def again() -> bool:
            with suppress(LinkLost):
                return await ada.introduce(bob.info()) == ada.peer_id
            return False

        await until_async(again, 30, "the flood has passed")


async def test_somebody_else_at_a_peers_address_is_told_and_counted_and_the_tunnel_taken(tmp_path):
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        meddled = bob.info(addresses=(f"127.0.0.1:{eve.port}",), certificate=new_certificate().der)
        assert await soon(ada.introduce(meddled)) == ada.peer_id
        assert bob.callers and not eve.callers
        told = ada.channels.describe(bob.peer_id)
        assert told["route"] == "punched" and "another certificate" in told["route_reason"]
        assert ada.channels._refusals.counts() == {"connection.other-certificate": 1}


async def test_a_peer_of_another_run_does_not_get_through(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        other = Tunnels(ada.streams, "cd" * 32)
        with pytest.raises(LinkLost):
            await other.open(bob.peer_id, ())


async def test_the_next_call_gets_a_fresh_stream_when_one_was_cut(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await soon(stream.receive()) == chunk(0, 8)
        for task in list(bob.tunnels._pipes.values()):
            task.cancel()
        with pytest.raises(LinkLost):
            await soon(stream.receive())
        for _ in range(3):
            assert await soon(ada.introduce(bob.info())) == ada.peer_id


async def test_tunnels_in_which_nothing_moves_are_closed(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        loop = asyncio.get_running_loop()
        bob.tunnels.sweep(loop.time() + tunnel.IDLE - 60)
        assert bob.tunnels._pipes
        bob.tunnels.sweep(loop.time() + tunnel.IDLE + 60)

        async def gone() -> bool:
            return not bob.tunnels._pipes and not ada.tunnels._pipes and not bob.tunnels._names

        await until_async(gone, 30, "the tunnel is closed at both ends")


def open_sockets() -> set[str]:
    """What this process holds."""
    found = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(path.readlink()))
    return {name for name in found if name.startswith("socket")}


async def test_nothing_is_left_when_both_ends_are_closed(tmp_path):
    before = open_sockets()
    tasks = asyncio.all_tasks()
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        await soon(stream.receive())
        dangling = await ada.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
        dangling.socket.close()

    async def all_closed() -> bool:
        return not open_sockets() - before

    await until_async(all_closed, 30, "no socket is open")

    async def all_ended() -> bool:
        return not {task for task in asyncio.all_tasks() - tasks if "lowcomm" in repr(task)}

    await until_async(all_ended, 30, "no task is left")


# The choice, carried out


async def test_a_dead_address_costs_one_call_a_moment_and_then_none(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        for _ in range(3):
            assert await soon(ada.introduce(bob.info())) == ada.peer_id
        told = ada.channels.describe(bob.peer_id)
        assert told["route"] == "punched"
        assert "can't be reached" in told["route_reason"]


async def test_an_address_that_comes_alive_is_taken_when_the_record_tells_it(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))

        async def direct() -> bool:
            await ada.introduce(alive)
            return ada.channels.describe(bob.peer_id)["route"] == f"direct 127.0.0.1:{bob.port}"

        await until_async(direct, 30, "the direct route is taken")
        told = ada.channels.describe(bob.peer_id)
        assert told["route_reason"] is None


async def test_calls_under_way_go_on_when_another_route_is_taken(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await soon(stream.receive()) == chunk(0, 8)
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))

        async def direct() -> bool:
            await ada.introduce(alive)
            return ada.channels.describe(bob.peer_id)["route"].startswith("direct")

        await until_async(direct, 30, "the direct route is taken")
        await stream.send(chunk(1, 8))
        assert await soon(stream.receive()) == chunk(1, 8)
        await stream.close()


async def test_a_server_that_goes_is_noticed_and_the_tunnel_taken(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        broken = listener.sockets[0].getsockname()[1]
        assert await soon(ada.introduce(alive)) == ada.peer_id
        assert ada.channels.describe(bob.peer_id)["route"].startswith("direct")
        assert await soon(ada.introduce(bob.info(addresses=(f"127.0.0.1:{broken}",)))) == ada.peer_id
        assert ada.channels.describe(bob.peer_id)["route"] == "punched"
        listener.close()


async def test_a_relayed_tunnel_gives_way_to_a_direct_one_and_its_calls_go_on(tmp_path, monkeypatch):
    from lowcomm_node.exchange import line

    monkeypatch.setattr(line, "LOOK_EVERY", 0.0)
    async with pair(tmp_path) as (ada, bob):
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        punched, network.address = network.address, f"{network.address}/p2p/{EVE.peer_id}/p2p-circuit"
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await soon(stream.receive()) == chunk(0, 8)
        assert ada.channels.describe(bob.peer_id)["route"] == f"relay {EVE.peer_id[-6:]}"
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        assert ada.channels.describe(bob.peer_id)["route"].startswith("relay"), "there is no better one"
        network.address = punched

        async def better() -> bool:
            await ada.introduce(bob.info())
            return ada.channels.describe(bob.peer_id)["route"] == "punched"

        await until_async(better, 30, "the direct connection is used")
        await stream.send(chunk(1, 8))
        assert await soon(stream.receive()) == chunk(1, 8)
        await stream.close()


async def test_no_route_at_all_is_one_clear_reason(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        gone = bob.info()
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        network.served.clear()
        with pytest.raises(LinkLost, match=r"can't be reached \(direct: can't be reached; tunnel: can't be reached\)"):
            await soon(ada.call(gone))
        told = ada.channels.describe(bob.peer_id)
        assert told["route"] is None and "tunnel: can't be reached" in told["route_reason"]


async def test_the_round_trip_and_the_rates_are_measured(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        for number in range(16):
            await stream.send(chunk(number, 2**16))
            await soon(stream.receive())
        await stream.close()
        told = ada.channels.describe(bob.peer_id)
        assert told["rate_up"] > 1e5 and told["rate_down"] > 1e5

        async def measured() -> bool:
            return ada.channels.describe(bob.peer_id)["round_trip"] is not None

        await until_async(measured, 30, "the round trip is measured")


async def test_a_stranger_of_this_machine_can_not_use_our_way_to_a_peer(tmp_path):
    import subprocess
    import sys

    async with pair(tmp_path) as (ada, bob):
        way = ada.tunnels.way(bob.peer_id)
        code = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(20)\n"
            "s.connect('\\0' + sys.argv[1])\nprint(len(s.recv(10)))"
        )
        name = way.target.removeprefix("unix-abstract:")
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, name], capture_output=True, text=True
        )
        assert done.stdout.strip() == "0", done.stderr
        assert not bob.tunnels._held


def test_a_stream_tells_where_it_leads():
    assert OpenStream("a", "/ip4/1.2.3.4/tcp/1", socket.socket()).address == "/ip4/1.2.3.4/tcp/1"
