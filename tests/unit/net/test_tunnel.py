"""What must hold for tunnels, whatever carries their streams: real gRPC at both ends, the twin of
libp2p between them."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from helpers.memory_dht import MemoryNetwork
from helpers.tunnelling import DAN, EVE, RUN, End, chunk, cut, pair, received, soon
from helpers.waiting import until_async
from helpers.wire import new_certificate
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import callee as callee_module
from lowcomm_node.net import dialer as dialer_module
from lowcomm_node.net import eviction, peer_channel
from lowcomm_node.net import pumps as pumps_module
from lowcomm_node.net import tunnels as tunnels_module
from lowcomm_node.net.control import OpenStream
from lowcomm_node.net.dialer import Forgotten
from lowcomm_node.net.frames import ANSWER, SESSION, Signal, numbered, opening
from lowcomm_node.net.tunnels import Tunnels, protocol_of
from lowcomm_node.system import tasks
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

pytestmark = pytest.mark.slow

Status = grpc.StatusCode


# Tunnels


async def test_the_callee_knows_who_calls_without_any_credential(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        dialer = ada.tunnels.dialer(bob.peer_id)
        async with aio.insecure_channel(dialer.target) as channel:
            answer = await soon(ExchangeStub(channel).Describe(pb.Introduction(), timeout=30))
            assert answer.release == ada.peer_id
            stream = ExchangeStub(channel).Swap(timeout=30)
            await stream.write(chunk(0, 8))
            assert await soon(stream.read()) == chunk(0, 8)


async def test_a_credential_of_somebody_else_is_refused(tmp_path):
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        dialer = ada.tunnels.dialer(bob.peer_id)
        async with aio.insecure_channel(dialer.target) as channel:
            for metadata in (
                eve.channels.metadata(bob.peer_id),
                (("lowcomm-credential-bin", b"rubbish"),),
            ):
                with pytest.raises(aio.AioRpcError) as caught:
                    await soon(
                        ExchangeStub(channel).Describe(
                            pb.Introduction(), metadata=metadata, timeout=30
                        )
                    )
                assert caught.value.code() is Status.UNAUTHENTICATED
    assert not bob.callers


@pytest.mark.parametrize(
    "name", ["", "in.{ada}.1", "lowcomm.{token}.in.{ada}.99", "lowcomm.{token}.in.{ada}.1.x"]
)
async def test_a_unix_socket_that_is_none_of_our_tunnels_is_refused(tmp_path, name):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "so that a sound name is known"
        forged = name.format(ada=ada.peer_id, token=bob.tunnels._token)
        assert forged not in bob.tunnels.callee._names
        async with (
            forwarded(forged, bob.server.local) as target,
            aio.insecure_channel(target) as channel,
        ):
            metadata = ada.channels.metadata(bob.peer_id)
            with pytest.raises(aio.AioRpcError) as caught:
                await soon(
                    ExchangeStub(channel).Describe(pb.Introduction(), metadata=metadata, timeout=30)
                )
        assert caught.value.code() is Status.UNAUTHENTICATED
        assert "none of our tunnels" in (caught.value.details() or "")


@asynccontextmanager
async def forwarded(name: str, server: str) -> AsyncIterator[str]:
    """A target for gRPC whose connection arrives at ``server`` under the name of a unix socket."""
    listener, loop = socket.socket(socket.AF_UNIX), asyncio.get_running_loop()
    listener.bind(f"\0{(dialed := f'lowcomm.test.{secrets.token_hex(8)}')}")
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
        yield f"unix-abstract:{dialed}"
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
        assert ada.channels.describe(bob.peer_id).route.startswith("direct")
        for metadata in (
            (),
            (("peer", f"unix-abstract:lowcomm.{bob.tunnels._token}.in.{ada.peer_id}.1"),),
        ):
            with pytest.raises(aio.AioRpcError, match="without a credential"):
                await soon(stub.Describe(pb.Introduction(), metadata=metadata, timeout=30))


def name() -> bytes:
    """A name for a session."""
    return secrets.token_bytes(SESSION)


async def begin(caller: End, callee: End, words: bytes) -> tuple[OpenStream, bytes]:
    """A stream on which a caller has said its first words, and what was answered."""
    stream = await caller.streams.open_stream(callee.peer_id, protocol_of(RUN), 1)
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # it was refused before
        await loop.sock_sendall(stream.socket, words)
    answer = b""
    while len(answer) < ANSWER and (
        part := await soon(loop.sock_recv(stream.socket, ANSWER - len(answer)))
    ):
        answer += part
    return stream, answer


async def test_a_flood_of_streams_is_bounded_and_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(callee_module, "MAX_TUNNELS", 6)
    monkeypatch.setattr(eviction, "MAX_NEW", 100)
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        flood = await asyncio.gather(*(begin(eve, bob, opening(name(), None)) for _ in range(50)))
        answers = [answer for _, answer in flood]
        assert answers.count(numbered(Signal.READY, 0)) == callee_module.MAX_TUNNELS_PER_PEER
        assert answers.count(numbered(Signal.BUSY, 0)) == 50 - callee_module.MAX_TUNNELS_PER_PEER
        assert bob.tunnels.statistics().refused == 50 - callee_module.MAX_TUNNELS_PER_PEER
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "others get through"
        with pytest.raises(LinkLost, match="no room"):
            await soon(eve.tunnels.open(bob.peer_id, (), name()))
        for stream, _ in flood:
            stream.socket.close()

        async def served_again() -> bool:
            return not bob.tunnels.callee._held_by(eve.peer_id)

        await until_async(served_again, 30, "the flood has ended")
        assert await soon(eve.introduce(bob.info())) == eve.peer_id


async def test_one_peers_flood_of_streams_that_say_nothing_keeps_nobody_else_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(callee_module, "OPENING_DEADLINE", 0.5)
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        silent = [
            await eve.streams.open_stream(bob.peer_id, protocol_of(RUN), 1) for _ in range(50)
        ]
        assert bob.tunnels.statistics().refused == 50 - callee_module.MAX_TUNNELS_PER_PEER
        assert await soon(ada.introduce(bob.info())) == ada.peer_id

        async def dropped() -> bool:
            return not bob.tunnels.callee._greeted

        await until_async(dropped, 30, "nobody waits for the silent ones")
        for stream in silent:
            stream.socket.close()


async def test_peers_with_many_silent_streams_keep_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(callee_module, "MAX_TUNNELS", 4)
    async with pair(tmp_path, EVE, DAN) as (ada, bob, eve, dan):
        silent = [
            await who.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
            for who in (eve, eve, dan, dan)
        ]
        loop = asyncio.get_running_loop()
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "at once"
        assert await soon(loop.sock_recv(silent[0].socket, 1)) == b"", (
            "the oldest of who has most has given way"
        )
        third = await eve.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
        fourth = await eve.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
        assert await soon(loop.sock_recv(fourth.socket, ANSWER)) == numbered(Signal.BUSY, 0), (
            "nobody takes from its equals"
        )
        assert len(bob.tunnels.callee._greeted) == 4
        for stream in (*silent, third, fourth):
            stream.socket.close()


async def test_unaccepted_sessions_have_a_bound_and_make_room_for_other_peers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(callee_module, "MAX_TUNNELS", 4)
    async with pair(tmp_path, EVE, DAN) as (ada, bob, eve, dan):
        held = [await begin(eve, bob, opening(name(), None)) for _ in range(4)]
        assert [answer for _, answer in held] == [numbered(Signal.READY, 0)] * 4
        assert await soon(ada.introduce(bob.info())) == ada.peer_id, "though all places were taken"
        assert [peer for peer, _ in bob.tunnels.callee._sessions] == [eve.peer_id] * 3 + [
            ada.peer_id
        ]
        held += [await begin(dan, bob, opening(name(), None)) for _ in range(5)]
        assert [peer for peer, _ in bob.tunnels.callee._sessions].count(ada.peer_id) == 1, (
            "accepted once, it stays"
        )
        assert len(bob.tunnels.callee._sessions) == 4
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        assert ada.tunnels.statistics().resumed == 0
        monkeypatch.setattr(callee_module, "MAX_TUNNELS", 40)
        monkeypatch.setattr(callee_module, "MAX_UNAUTHENTICATED", 3)
        held.append(await begin(eve, bob, opening(name(), None)))
        assert len(bob.tunnels.callee._sessions) == 4, "where there is room, but not for strangers"
        for stream, _ in held:
            stream.socket.close()


async def test_whose_call_was_accepted_makes_room_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(callee_module, "MAX_TUNNELS", 1)
    async with pair(tmp_path, EVE, DAN) as (ada, bob, eve, dan):
        first, _ = await begin(eve, bob, opening(name(), None))
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        second, answer = await begin(dan, bob, opening(name(), None))
        assert answer == numbered(Signal.BUSY, 0)
        assert [peer for peer, _ in bob.tunnels.callee._sessions] == [ada.peer_id]
        for stream in (first, second):
            stream.socket.close()


async def test_a_peer_that_takes_streams_and_never_answers_is_given_up_in_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tunnels_module, "ANSWER_DEADLINE", 0.2)
    async with pair(tmp_path, EVE) as (ada, _, eve):
        taken = []
        await eve.streams.serve_streams(protocol_of(RUN), taken.append)
        for received in (None, 7):
            with pytest.raises(LinkLost, match="did not answer in time"):
                await soon(ada.tunnels.open(eve.peer_id, (), name(), received), 5)
        assert len(taken) == 4, "over another connection, too"
        for stream in taken:
            stream.socket.close()


async def test_who_sends_on_where_nothing_is_due_is_not_read_on(tmp_path, monkeypatch):
    async with pair(tmp_path, EVE) as (_, bob, eve):
        monkeypatch.setattr(callee_module, "OPENING_DEADLINE", 3600.0)
        stream, answer = await begin(eve, bob, opening(name(), 7))
        assert answer == numbered(Signal.GONE, 0)
        with stream.socket:
            await asyncio.get_running_loop().sock_sendall(stream.socket, b"and on")
            assert await soon(ends_at(stream.socket)), (
                "it is closed, though its deadline is an hour away"
            )


async def ends_at(end: socket.socket) -> bool:
    with suppress(ConnectionError):  # what we sent was not read
        return await asyncio.get_running_loop().sock_recv(end, 1) == b""
    return True


@pytest.mark.slow
async def test_streams_that_come_and_go_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(eviction, "MAX_NEW", 3)
    async with pair(tmp_path) as (ada, bob):
        for _ in range(20):
            stream = await ada.streams.open_stream(bob.peer_id, protocol_of(RUN), 1)
            stream.socket.close()
        assert bob.tunnels.statistics().refused > 0

        async def again() -> bool:
            with suppress(LinkLost):
                return await ada.introduce(bob.info()) == ada.peer_id
            return False

        await until_async(again, 30, "the flood has passed")


async def test_somebody_else_at_a_peers_address_is_told_and_counted_and_the_tunnel_taken(tmp_path):
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        meddled = bob.info(
            addresses=(f"127.0.0.1:{eve.port}",), certificate=new_certificate().digest
        )
        assert await soon(ada.introduce(meddled)) == ada.peer_id
        assert bob.callers and not eve.callers
        told = ada.channels.describe(bob.peer_id)
        assert told.route == "punched" and "another certificate" in told.route_reason
        assert ada.channels._refusals.counts() == {"connection.other-certificate": 1}


async def test_a_peer_of_another_run_does_not_get_through(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        other = Tunnels(ada.streams, "cd" * 32)
        with pytest.raises(LinkLost):
            await other.open(bob.peer_id, (), name())


# Streams that break off


def keep(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have both ends keep sessions for so long."""
    for module in (callee_module, dialer_module):
        monkeypatch.setattr(module, "KEEP", seconds)


async def test_calls_go_on_over_the_next_stream_when_one_breaks_off(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        for number in range(20):
            await stream.send(chunk(number, 8 * 1024))
            if number % 3 == 1:
                cut(ada if number % 2 else bob)
            assert await received(stream) == chunk(number, 8 * 1024)
        await stream.close()
        assert ada.tunnels.statistics().resumed >= 5 and bob.tunnels.statistics().resumed >= 5


async def test_a_session_that_can_not_be_resumed_is_kept_for_a_while_and_then_lost_with_a_reason(
    tmp_path, monkeypatch
):
    keep(monkeypatch, 1.5)
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await received(stream) == chunk(0, 8)
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        served = dict(network.served)
        network.served.clear()
        cut(ada)

        async def told() -> bool:
            return "broke off; it is being resumed" in (
                ada.channels.describe(bob.peer_id).route_reason or ""
            )

        await until_async(told, 10, "the break is told")
        assert len(bob.tunnels.callee._sessions) == 1
        with pytest.raises(LinkLost):
            await soon(stream.receive())

        async def gone() -> bool:
            return (
                not bob.tunnels.callee._sessions
                and not bob.tunnels.callee._names
                and not bob.tunnels._pumps
            )

        await until_async(gone, 30, "the callee gives it up, too")
        assert bob.tunnels._pumps.slabs.used == ada.tunnels._pumps.slabs.used == 0
        network.served.update(served)
        for _ in range(3):
            assert await soon(ada.introduce(bob.info())) == ada.peer_id


@pytest.mark.slow
async def test_no_call_begins_on_a_tunnel_that_is_cut_off_and_it_is_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_channel, "PATIENCE", 1.0)
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        served = dict(network.served)
        network.served.clear()
        cut(ada)
        with pytest.raises(
            LinkLost, match=r"within 1 s \(the tunnel broke off; it is being resumed\)"
        ):
            await soon(ada.call(bob.info()))
        network.served.update(served)

        async def again() -> bool:
            with suppress(LinkLost):
                return await ada.introduce(bob.info()) == ada.peer_id
            return False

        await until_async(again, 30, "it is resumed")
        assert ada.tunnels.statistics().resumed == 1


@pytest.mark.slow
@pytest.mark.soak
async def test_grpc_is_more_patient_than_a_session_that_is_cut_off(tmp_path, monkeypatch):
    keep(monkeypatch, 60.0)
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await received(stream) == chunk(0, 8)
        before = list(bob.tunnels.callee._sessions)
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        served = dict(network.served)
        network.served.clear()
        cut(ada)
        with pytest.raises(
            TimeoutError
        ):  # as long as KEEP is, and longer than a ping of gRPC's and its default patience
            await soon(stream.receive(), 38)
        network.served.update(served)
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        assert list(bob.tunnels.callee._sessions) == before, "gRPC has kept its connection"
        assert bob.tunnels.statistics().resumed == 1


async def test_nobody_else_can_resume_a_session(tmp_path):
    async with pair(tmp_path, EVE) as (ada, bob, eve):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await received(stream) == chunk(0, 8)
        ((_, session),) = bob.tunnels.callee._sessions
        for number in (0, 1, 100):
            with pytest.raises(Forgotten):
                await soon(eve.tunnels.open(bob.peer_id, (), session, number))
        await stream.send(chunk(1, 8))
        assert await received(stream) == chunk(1, 8), "its owner has noticed nothing"
        assert bob.tunnels.statistics().resumed == 0


async def test_a_session_that_is_not_known_can_not_be_resumed(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        with pytest.raises(Forgotten):
            await soon(ada.tunnels.open(bob.peer_id, (), name(), 0))


async def test_sessions_that_are_cut_off_give_way_to_new_ones_of_the_same_peer(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        bob_loses, kept = asyncio.get_running_loop(), []
        for _ in range(callee_module.MAX_TUNNELS_PER_PEER):
            stream, number = await soon(ada.tunnels.open(bob.peer_id, (), name()))
            kept.append(stream)
            await bob_loses.sock_sendall(stream.socket, (1).to_bytes(4) + b"P")
        with pytest.raises(LinkLost, match="no room"):
            await soon(ada.tunnels.open(bob.peer_id, (), name()))
        kept[2].socket.close()

        async def is_cut() -> bool:
            return any(inbound.pump.cut for inbound in bob.tunnels.callee._sessions.values())

        await until_async(is_cut, 30, "bob has noticed")
        stream, number = await soon(ada.tunnels.open(bob.peer_id, (), name()))
        assert (
            number == 0 and len(bob.tunnels.callee._sessions) == callee_module.MAX_TUNNELS_PER_PEER
        )
        for one in (*kept, stream):
            one.socket.close()


async def test_a_caller_that_claims_impossible_numbers_loses_its_session_and_nothing_else(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        session = name()
        first, _ = await soon(ada.tunnels.open(bob.peer_id, (), session))
        await asyncio.get_running_loop().sock_sendall(first.socket, (1).to_bytes(4) + b"P")
        second, answer = await begin(ada, bob, opening(session, 2**60))
        assert answer == b""

        async def gone() -> bool:
            return not bob.tunnels.callee._sessions

        await until_async(gone, 30, "the session is lost")
        for one in (first, second):
            one.socket.close()
        assert await soon(ada.introduce(bob.info())) == ada.peer_id


async def test_sessions_in_which_nothing_moves_are_closed(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        loop = asyncio.get_running_loop()
        bob.tunnels.callee.sweep(loop.time() + pumps_module.IDLE - 60)
        assert bob.tunnels._pumps
        bob.tunnels.callee.sweep(loop.time() + pumps_module.IDLE + 60)

        async def gone() -> bool:
            return (
                not bob.tunnels._pumps and not ada.tunnels._pumps and not bob.tunnels.callee._names
            )

        await until_async(gone, 30, "the session is closed at both ends")


async def test_what_has_come_is_acknowledged_when_nothing_more_comes(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        later = asyncio.get_running_loop().time() + pumps_module.SWEEP_EVERY + 1
        for end in (ada, bob):
            end.tunnels.callee.sweep(later)

        async def acknowledged() -> bool:
            (pump,) = ada.tunnels._pumps
            return pump._session.acked == pump._session._next

        await until_async(acknowledged, 30, "nothing is kept")


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
        assert told.route == "punched"
        assert "can't be reached" in told.route_reason


async def test_an_address_that_comes_alive_is_taken_when_the_record_tells_it(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        assert await soon(ada.introduce(bob.info())) == ada.peer_id
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))

        async def direct() -> bool:
            await ada.introduce(alive)
            return ada.channels.describe(bob.peer_id).route == f"direct 127.0.0.1:{bob.port}"

        await until_async(direct, 30, "the direct route is taken")
        told = ada.channels.describe(bob.peer_id)
        assert told.route_reason is None


async def test_calls_under_way_go_on_when_another_route_is_taken(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        await stream.send(chunk(0, 8))
        assert await received(stream) == chunk(0, 8)
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))

        async def direct() -> bool:
            await ada.introduce(alive)
            return ada.channels.describe(bob.peer_id).route.startswith("direct")

        await until_async(direct, 30, "the direct route is taken")
        await stream.send(chunk(1, 8))
        assert await received(stream) == chunk(1, 8)
        await stream.close()


async def test_a_server_that_goes_is_noticed_and_the_tunnel_taken(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        alive = bob.info(addresses=(f"127.0.0.1:{bob.port}",))
        listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        broken = listener.sockets[0].getsockname()[1]
        assert await soon(ada.introduce(alive)) == ada.peer_id
        assert ada.channels.describe(bob.peer_id).route.startswith("direct")
        assert (
            await soon(ada.introduce(bob.info(addresses=(f"127.0.0.1:{broken}",)))) == ada.peer_id
        )
        assert ada.channels.describe(bob.peer_id).route == "punched"
        listener.close()


async def test_a_relayed_tunnel_gives_way_to_a_direct_one_and_its_calls_go_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(peer_channel, "LOOK_EVERY", 0.0)
    async with pair(tmp_path) as (ada, bob):
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


async def test_no_route_at_all_is_one_clear_reason(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        gone = bob.info()
        network: MemoryNetwork = ada.streams._network  # pyright: ignore[reportAttributeAccessIssue]
        network.served.clear()
        with pytest.raises(
            LinkLost,
            match=r"can't be reached \(direct: can't be reached; tunnel: can't be reached\)",
        ):
            await soon(ada.call(gone))
        told = ada.channels.describe(bob.peer_id)
        assert told.route is None and "tunnel: can't be reached" in told.route_reason


async def test_the_round_trip_and_the_rates_are_measured(tmp_path):
    async with pair(tmp_path) as (ada, bob):
        stream = await ada.call(bob.info())
        for number in range(16):
            await stream.send(chunk(number, 2**16))
            await soon(stream.receive())
        await stream.close()
        told = ada.channels.describe(bob.peer_id)
        assert told.rate_up > 1e5 and told.rate_down > 1e5

        async def measured() -> bool:
            return ada.channels.describe(bob.peer_id).round_trip is not None

        await until_async(measured, 30, "the round trip is measured")


async def test_another_process_of_this_machine_can_not_use_our_dialer(tmp_path):
    import subprocess
    import sys

    async with pair(tmp_path) as (ada, bob):
        dialer = ada.tunnels.dialer(bob.peer_id)
        code = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(20)\n"
            "s.connect('\\0' + sys.argv[1])\nprint(len(s.recv(10)))"
        )
        name = dialer.target.removeprefix("unix-abstract:")
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, name], capture_output=True, text=True
        )
        assert done.stdout.strip() == "0", done.stderr
        assert not bob.tunnels.callee._sessions


@pytest.mark.parametrize("error", [OSError("no memory"), RuntimeError("a defect")])
async def test_a_dialer_goes_on_where_one_connection_fails_and_a_defect_is_logged(
    tmp_path, monkeypatch, error
):
    asked, ask = [], dialer_module.caller

    def caller(connection):
        asked.append(connection)
        if len(asked) == 1:
            raise error
        return ask(connection)

    monkeypatch.setattr(dialer_module, "caller", caller)
    monkeypatch.setattr(tasks, "DEFECT_PAUSE", 0.0)
    async with pair(tmp_path) as (ada, bob):
        to_bob = ada.tunnels.dialer(bob.peer_id)
        with capture_logs() as logs, socket.socket(socket.AF_UNIX) as first:
            first.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(first, "\0" + to_bob.target.removeprefix("unix-abstract:"))
            assert await soon(loop.sock_recv(first, 1)) == b"", "it is closed"
            async with aio.insecure_channel(to_bob.target) as channel:
                assert await soon(ExchangeStub(channel).Describe(pb.Introduction(), timeout=30))
        (logged,) = [
            entry for entry in logs if entry["event"] in ("tunnel.not_accepted", "task.defect")
        ]
        assert str(error) in str(logged)
