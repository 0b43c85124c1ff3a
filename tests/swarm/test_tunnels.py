"""Tunnels through real p2pd processes on loopback: over TCP, over QUIC, through a relay."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from dht import Dht, Peer, free_port

from lowcomm_node.discovery.control import Control
from lowcomm_node.discovery.multiaddress import EntryPoint, circuit, parse_entry_point
from lowcomm_node.discovery.p2pd import P2pDaemon
from lowcomm_node.discovery.relay import RelayLimits, reserve
from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange import tunnel
from lowcomm_node.exchange.pipe import Pipe
from lowcomm_node.exchange.security import make_certificate
from lowcomm_node.exchange.stream import CalleeStream
from lowcomm_node.exchange.tunnel import protocol_of
from lowcomm_node.exchange.tunnel_frames import WORD, Signal, word
from tunnelling import RUN, End, chunk, soon
from waiting import until, until_async

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
DEAD = ("/ip4/127.0.0.1/tcp/1",)
CERTIFICATE = make_certificate(datetime.now(UTC))
LIMITS = RelayLimits(peers=4, bytes=2**30, seconds=600)


class Net:
    """Ends, each with a p2pd of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dht = Dht(folder)
        self.ends: list[End] = []

    async def end(self, *peers: tuple[str, ...], **options: object) -> End:
        """An end that others can call through tunnels."""
        peer = await self.dht.peer(*peers, **options)
        end = End(peer.identity, peer, CERTIFICATE)
        self.ends.append(end)
        await end.start(self.folder)
        return end

    async def close(self) -> None:
        """End everything."""
        for end in self.ends:
            await end.close()
        await self.dht.close()


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Net]:
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as sockets:
        os.environ["XDG_RUNTIME_DIR"], before = sockets, os.environ.get("XDG_RUNTIME_DIR")
        net = Net(tmp_path)
        try:
            yield net
        finally:
            await net.close()
            os.environ.pop("XDG_RUNTIME_DIR")
            if before is not None:
                os.environ["XDG_RUNTIME_DIR"] = before
        assert list((Path(sockets) / "lowcomm").iterdir()) == [], "nothing is left behind"
        assert not [child for child in psutil.Process().children() if "p2pd" in child.name()]


def where(end: End) -> tuple[str, ...]:
    """The entry points of an end's p2pd."""
    peer = end.streams
    assert isinstance(peer, Peer)
    return peer.addresses()


async def swap(caller: End, callee: End, pieces: int, size: int, **record: object) -> None:
    """One Swap: contents both ways at once, each piece checked."""
    stream = await soon(caller.call(callee.info(**{"entry_points": where(callee), **record})))

    async def send() -> None:
        for number in range(pieces):
            await stream.send(chunk(number, size))

    sending = asyncio.create_task(send())
    try:
        for number in range(pieces):
            assert await soon(stream.receive()) == chunk(number, size)
        await sending
        await stream.close()
    finally:
        sending.cancel()


@pytest.mark.parametrize("transport", [TCP, QUIC])
async def test_contents_go_both_ways_at_once_and_the_caller_is_known(net: Net, transport: str) -> None:
    bob = await net.end(listen=[transport])
    ada = await net.end(where(bob), listen=[transport])
    await swap(ada, bob, 64, 2**20)
    assert set(bob.callers) == {ada.peer_id}
    told = ada.channels.describe(bob.peer_id)
    assert told["route"] == "punched"
    assert ("quic" in bob.tunnels._inbound[ada.peer_id]) == (transport == QUIC)
    await swap(bob, ada, 4, 2**20)
    assert bob.channels.describe(ada.peer_id)["route"] == "punched"


async def test_no_byte_is_lost_at_the_end_of_a_stream_over_quic(net: Net) -> None:
    bob = await net.end(listen=[QUIC])
    ada = await net.end(where(bob), listen=[QUIC])
    size, runs = 300_000, 30

    async def talk(peer: str, stream: CalleeStream) -> None:
        await stream.receive()
        for number in range(8):
            await stream.send(chunk(number, size))

    bob.swapping = talk
    for _ in range(runs):
        way = ada.tunnels.way(bob.peer_id)  # each time a stream of its own, which ends with the call
        way.entry_points = where(bob)
        await one_call_then_close(way.target, size)
        await way.close()

    async def all_gone() -> bool:
        return not bob.tunnels._names

    await until_async(all_gone, 30, "no tunnel is left at the callee")


async def one_call_then_close(target: str, size: int) -> None:
    from grpc import aio

    from lowcomm_node.exchange.stream import CallerStream
    from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

    async with aio.insecure_channel(target) as channel:
        stream = CallerStream(ExchangeStub(channel).Swap(timeout=60))
        await stream.send(chunk(0, 8))
        for number in range(8):
            assert await soon(stream.receive()) == chunk(number, size)
        assert await soon(stream.receive()) is None, "with its status"


async def test_raw_bytes_up_to_the_last_arrive_though_the_sender_closes_at_once_over_quic(net: Net) -> None:
    """What p2pd itself does not do (28 of 30 runs lost their tail): the END of a pipe waits for its ACK."""
    received: asyncio.Queue[bytes] = asyncio.Queue()
    bob, ada = await net.dht.peer(listen=[QUIC]), await net.dht.peer(listen=[QUIC])
    tasks: set[asyncio.Task[None]] = set()

    def take(stream: tunnel.OpenStream) -> None:
        local, mine = socket.socketpair()
        for one in (local, mine):
            one.setblocking(False)
        tasks.add(asyncio.create_task(Pipe(local, stream.socket, lambda sent, got: None).run()))
        tasks.add(asyncio.create_task(collect(mine)))

    async def collect(source: socket.socket) -> None:
        data = b""
        while part := await asyncio.get_running_loop().sock_recv(source, 2**20):
            data += part
        source.close()
        received.put_nowait(data)

    await bob.serve_streams("/raw/1", take)
    for run in range(30):
        await ada.connect(bob.peer_id, bob.addresses(), 10)
        stream = await ada.open_stream(bob.peer_id, "/raw/1", 10)
        local, mine = socket.socketpair()
        for one in (local, mine):
            one.setblocking(False)
        pipe = asyncio.create_task(Pipe(local, stream.socket, lambda sent, got: None).run())
        data = bytes([run]) * 500_000
        await asyncio.get_running_loop().sock_sendall(mine, data)
        mine.close()
        assert await soon(received.get()) == data
        await soon(pipe)
    await soon(asyncio.gather(*tasks))


# Relays


async def relayed(net: Net, **limits: int) -> tuple[Peer, End, End]:
    """A relay and two ends that can reach each other only through it."""
    door = await net.dht.peer(relay=RelayLimits(**{**LIMITS.__dict__, **limits}))
    options = {"announce": DEAD, "punching": False, "wants_places": True}
    bob = await net.end(door.addresses(), **options)
    ada = await net.end(door.addresses(), **options)
    await bob.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
    return door, ada, bob


async def test_an_exchange_through_a_relay(net: Net) -> None:
    door, ada, bob = await relayed(net)
    (entry,) = [parse_entry_point(text) for text in where(bob) if "circuit" in text]
    assert entry == EntryPoint(bob.peer_id, circuit(parse_entry_point(door.addresses()[0])))
    await swap(ada, bob, 32, 2**20, entry_points=(str(entry),))
    assert ada.channels.describe(bob.peer_id)["route"] == f"relay {door.peer_id[-6:]}"
    assert bob.callers[-1] == ada.peer_id
    assert bob.channels.describe(ada.peer_id)["route"] == f"relay {door.peer_id[-6:]}", "the callee tells it too"


async def test_a_peer_whose_record_names_no_relay_is_found_through_our_own(net: Net) -> None:
    door, ada, bob = await relayed(net)
    await swap(ada, bob, 1, 2**10, entry_points=())
    assert ada.channels.describe(bob.peer_id)["route"] == f"relay {door.peer_id[-6:]}"


async def test_a_relay_gives_what_its_owner_says_and_no_more(net: Net) -> None:
    door, ada, bob = await relayed(net, bytes=64 * 2**20, seconds=1234, peers=2)
    control = net_control(bob)
    place = await reserve(control, parse_entry_point(door.addresses()[0]))
    assert (place.bytes, place.seconds) == (64 * 2**20, 1234)
    await ada.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
    third = await net.dht.peer(door.addresses(), wants_places=True)
    with pytest.raises(LinkLost, match=r"refuses places|no place left"):
        await reserve(Control(daemon_of(third).control), parse_entry_point(door.addresses()[0]))
    assert not [text for text in third.addresses() if "circuit" in text]
    # A circuit ends at its limit: that call is lost, the next one works on a fresh one.
    with pytest.raises((LinkLost, AssertionError)):
        await swap(ada, bob, 100, 2**20, entry_points=())

    async def again() -> bool:
        try:
            await swap(ada, bob, 2, 2**20, entry_points=())
        except LinkLost:
            return False
        return True

    await until_async(again, 60, "a fresh circuit is opened")


async def test_a_place_is_taken_again_when_the_relay_returns(net: Net) -> None:
    port = free_port()
    listen = [f"/ip4/127.0.0.1/tcp/{port}"]
    door = await net.dht.peer(home="door", listen=listen, relay=LIMITS)
    bob = await net.end(door.addresses(), announce=DEAD, punching=False, wants_places=True)
    ada = await net.end(door.addresses(), announce=DEAD, punching=False, wants_places=True)
    await bob.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
    await swap(ada, bob, 1, 2**10, entry_points=())
    await door.close()
    assert await swap_fails(ada, bob)
    await net.dht.peer(home="door", listen=listen, relay=LIMITS)

    async def again() -> bool:
        await bob.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
        await ada.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
        return not await swap_fails(ada, bob)

    await until_async(again, 120, "the relay is used again")


async def swap_fails(ada: End, bob: End) -> bool:
    try:
        await swap(ada, bob, 1, 2**10, entry_points=())
    except LinkLost:
        return True
    return False


def daemon_of(peer: Peer) -> P2pDaemon:
    assert peer._daemon is not None
    return peer._daemon


def net_control(end: End) -> Control:
    peer = end.streams
    assert isinstance(peer, Peer)
    return Control(daemon_of(peer).control)


# What goes wrong


async def test_p2pd_that_dies_costs_the_calls_under_way_and_no_more(net: Net) -> None:
    bob = await net.end(listen=[QUIC])
    ada = await net.end(where(bob), listen=[QUIC])
    stream = await soon(ada.call(bob.info(entry_points=where(bob))))
    await stream.send(chunk(0, 8))
    assert await soon(stream.receive())
    peer = bob.streams
    assert isinstance(peer, Peer)
    pid = daemon_of(peer).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LinkLost):
        await soon(stream.receive())

    async def again() -> bool:
        await peer.check_connection()
        try:
            await swap(ada, bob, 1, 2**10)
        except LinkLost:
            return False
        return True

    await until_async(again, 90, "tunnels go through the new p2pd")


CALLER = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowcomm_node.logs import configure_logs
configure_logs()
from datetime import UTC, datetime
from pathlib import Path
from dht import Peer
from tunnelling import End, chunk
from lowcomm_node.exchange.security import make_certificate
from lowcomm_node.exchange.tunnel import Way
async def live():
    where = json.loads(sys.argv[3])
    peer = Peer(Path(sys.argv[2]), where)
    await peer.start()
    end = End(peer.identity, peer, make_certificate(datetime.now(UTC)))
    callee = end.info(peer_id=where[0].rpartition("/")[2], entry_points=tuple(where))
    stream = await end.call(callee)
    number = 0
    async def read():
        while True:
            await stream.receive()
    asyncio.ensure_future(read())
    while True:
        await stream.send(chunk(number, 2**16))
        if number == 20:
            print("under way", flush=True)
        number += 1
asyncio.run(live())
"""


@pytest.mark.parametrize("transport", [TCP, QUIC])
async def test_a_caller_that_is_killed_leaves_nothing_at_the_callee(net: Net, tmp_path: Path, transport: str) -> None:
    bob = await net.end(listen=[transport])
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALLER, json.dumps(sys.path), str(tmp_path / "caller"), json.dumps(where(bob))),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(120):
            assert await child.stdout.readline() == b"under way\n"
        assert len(bob.tunnels._names) == 1
    finally:
        child.kill()
        await child.wait()

    async def gone() -> bool:
        return not bob.tunnels._names and not bob.tunnels._pipes and not bob.service._calls

    await until_async(gone, 60, "call and tunnel have ended")


async def test_a_flood_of_streams_is_bounded_and_others_get_through(net: Net) -> None:
    bob = await net.end(listen=[QUIC])
    eve = await net.dht.peer(where(bob), listen=[QUIC])
    ada = await net.end(where(bob), listen=[QUIC])
    flood = await asyncio.gather(*(eve.open_stream(bob.peer_id, protocol_of(RUN), 20) for _ in range(100)))

    words = await soon(asyncio.gather(*(first_word(stream.socket) for stream in flood)))
    assert words.count(word(Signal.READY)) == tunnel.MAX_TUNNELS_PER_PEER, words
    await swap(ada, bob, 4, 2**20)
    for stream in flood:
        stream.socket.close()

    async def gone() -> bool:
        return not bob.tunnels._held[eve.peer_id]

    await until_async(gone, 30, "the flood is gone")


async def first_word(source: socket.socket) -> bytes:
    """What is answered to a stream; nothing if it is reset."""
    try:
        return await asyncio.get_running_loop().sock_recv(source, WORD)
    except OSError:
        return b""


async def test_a_peer_that_serves_no_tunnels_is_told_apart(net: Net) -> None:
    door = await net.dht.peer()
    ada = await net.end(door.addresses())
    with pytest.raises(LinkLost):
        await soon(ada.tunnels.open(door.peer_id, door.addresses()))


def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as sockets:
        code = CALLEE.replace("FOLDER", str(tmp_path))
        environment = {**os.environ, "XDG_RUNTIME_DIR": sockets}
        child = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(tmp_path / "home")],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "serving\n"
        finally:
            child.kill()
            child.wait()
        folder = Path(sockets) / "lowcomm"
        until(lambda: list(folder.iterdir()) == [], 20, "p2pd and its socket are gone")
        assert not list(tmp_path.glob("*.grpc"))


CALLEE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowcomm_node.logs import configure_logs
configure_logs()
from datetime import UTC, datetime
from pathlib import Path
from dht import Peer
from tunnelling import End
from lowcomm_node.discovery.p2pd import runtime_folder
from lowcomm_node.exchange.security import make_certificate
async def live():
    peer = Peer(Path(sys.argv[2]))
    await peer.start()
    end = End(peer.identity, peer, make_certificate(datetime.now(UTC)))
    await end.start(runtime_folder())
    print("serving", flush=True)
    await asyncio.sleep(1000)
asyncio.run(live())
"""
