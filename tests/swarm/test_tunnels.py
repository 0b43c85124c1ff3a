"""Tunnels through real p2pd processes on loopback: over TCP, over QUIC, through a relay."""

import asyncio
import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc import aio

from helpers.dht_peers import Dht, Peer
from helpers.processes import free_port
from helpers.tunnelling import RUN, End, chunk, received, soon
from helpers.waiting import until, until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import eviction as crowd
from lowcomm_node.net import relays
from lowcomm_node.net.addresses import EntryPoint, circuit, parse_entry_point
from lowcomm_node.net.callee import MAX_TUNNELS_PER_PEER
from lowcomm_node.net.control import Control
from lowcomm_node.net.frames import ANSWER, SESSION, Signal, numbered, opening
from lowcomm_node.net.p2pd import P2pDaemon, RelayLimits
from lowcomm_node.net.relays import reserve
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.net.tls import make_certificate
from lowcomm_node.net.tunnels import Tunnels, protocol_of
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

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
            assert await received(stream) == chunk(number, size)
        await sending
        await stream.close()
    finally:
        sending.cancel()


@pytest.mark.parametrize("transport", [TCP, QUIC])
async def test_contents_go_both_ways_at_once_and_the_caller_is_known(
    net: Net, transport: str
) -> None:
    bob = await net.end(listen=[transport])
    ada = await net.end(where(bob), listen=[transport])
    await swap(ada, bob, 64, 2**20)
    assert set(bob.callers) == {ada.peer_id}
    told = ada.channels.describe(bob.peer_id)
    assert told.route == "punched"
    assert ("quic" in (bob.tunnels.callee.caller_at(ada.peer_id) or "")) == (transport == QUIC)
    await swap(bob, ada, 4, 2**20)
    assert bob.channels.describe(ada.peer_id).route == "punched"


# What is written comes, and its end


SIZES = (0, 1, 7, 100, 4_096, 10_000, 65_536, 262_144, 500_000, 1_000_000)


async def one_exchange(ada: End, bob: End, number: int, sizes: tuple[int, int]) -> None:
    """A session of its own that ends with its call: contents to the callee, then others back, then
    the status."""
    dialer = ada.tunnels.dialer(bob.peer_id)
    dialer.entry_points = where(bob)
    there, back = (random.Random(1000 * number + size).randbytes(size) for size in sizes)
    async with aio.insecure_channel(dialer.target) as channel:
        stream = CallerStream(ExchangeStub(channel).Swap(timeout=60))
        await stream.send(pb.Frame(chunk=pb.Chunk(offset=sizes[1], data=there)))
        answer = await soon(stream.receive())
        assert answer is not None
        assert (answer.chunk.data, answer.chunk.offset) == (back, zlib.crc32(there)), sizes
        assert await soon(stream.receive()) is None, "with its status"
    await dialer.close()
    assert not dialer.reason


@pytest.mark.parametrize("transport", [TCP, QUIC])
async def test_nothing_that_grpc_wrote_is_lost_and_its_end_is_seen_though_each_stream_ends_at_once(
    net: Net, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over QUIC p2pd loses small contents whole, and the tails of large ones, where the sender
    closes at once."""
    monkeypatch.setattr(crowd, "MAX_NEW", 1000)
    bob = await net.end(listen=[transport])
    ada = await net.end(where(bob), listen=[transport])
    pairs = [
        (there, back)
        for there in SIZES
        for back in (SIZES[(there + 3) % len(SIZES)], SIZES[-1 - there % 7])
    ]

    async def answer(peer: str, stream: CalleeStream) -> None:
        frame = await stream.receive()
        assert frame is not None
        number, size, crc = numbers.pop(0), frame.chunk.offset, zlib.crc32(frame.chunk.data)
        data = random.Random(1000 * number + size).randbytes(size)
        await stream.send(pb.Frame(chunk=pb.Chunk(offset=crc, data=data)))

    bob.swapping = answer
    runs = int(os.environ.get("LOWCOMM_TUNNEL_RUNS", "40"))
    numbers = list(range(runs))
    for number in range(runs):
        await one_exchange(ada, bob, number, pairs[number % len(pairs)])

    async def all_gone() -> bool:
        return not bob.tunnels.callee._names and not bob.tunnels._pumps

    await until_async(all_gone, 10, "no session is left at the callee: it has seen the end of each")
    assert len(bob.tunnels.callee._finished) == runs, "and each has ended as it should"


@pytest.mark.parametrize("transport", [TCP, QUIC])
@pytest.mark.parametrize("size", [1, 10_000, 500_000])
async def test_raw_bytes_up_to_the_last_arrive_and_so_does_the_end_though_the_sender_closes_at_once(
    net: Net, transport: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gRPC, whose own words at the beginning and at the end would hide what is lost."""
    monkeypatch.setattr(crowd, "MAX_NEW", 1000)
    received: asyncio.Queue[bytes] = asyncio.Queue()
    bob, ada = await net.dht.peer(listen=[transport]), await net.dht.peer(listen=[transport])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0lowcomm-test-" + secrets.token_hex(8))
    listener.listen()
    listener.setblocking(False)
    loop = asyncio.get_running_loop()

    async def collect() -> None:
        while True:
            source, _ = await loop.sock_accept(listener)
            source.setblocking(False)
            data = bytearray()
            while part := await loop.sock_recv(source, 2**20):
                data += part
            source.close()
            received.put_nowait(bytes(data))

    collecting = asyncio.create_task(collect())
    callee, caller = Tunnels(bob, RUN), Tunnels(ada, RUN)
    await callee.serve(listener.getsockname().decode())
    dialer = caller.dialer(bob.peer_id)
    dialer.entry_points = bob.addresses()
    try:
        for run in range(20):
            mine = socket.socket(socket.AF_UNIX)
            mine.setblocking(False)
            await loop.sock_connect(mine, "\0" + dialer.target.partition(":")[2])
            data = random.Random(run).randbytes(size)
            await loop.sock_sendall(mine, data)
            mine.close()
            assert await soon(received.get()) == data

        async def all_gone() -> bool:
            return not callee._pumps and not caller._pumps

        await until_async(all_gone, 10, "both ends know that all is done")
        assert len(callee.callee._finished) == 20
    finally:
        collecting.cancel()
        await dialer.close()
        for tunnels in (caller, callee):
            await tunnels.close()
        listener.close()


# Relays


async def relayed(net: Net, port: int = 0, **limits: int) -> tuple[Peer, End, End]:
    """A relay and two ends that can reach each other only through it, unless they learn of the
    second one's port."""
    door = await net.dht.peer(relay=RelayLimits(**{**LIMITS.__dict__, **limits}))
    options = {"announce": DEAD, "punching": False, "wants_places": True}
    bob = await net.end(door.addresses(), port=port, **options)
    ada = await net.end(door.addresses(), **options)
    await bob.streams.check_connection()  # pyright: ignore[reportAttributeAccessIssue]
    return door, ada, bob


async def test_an_exchange_through_a_relay(net: Net) -> None:
    door, ada, bob = await relayed(net)
    (entry,) = [parse_entry_point(text) for text in where(bob) if "circuit" in text]
    assert entry == EntryPoint(bob.peer_id, circuit(parse_entry_point(door.addresses()[0])))
    await swap(ada, bob, 32, 2**20, entry_points=(str(entry),))
    assert ada.channels.describe(bob.peer_id).route == f"relay {door.peer_id[-6:]}"
    assert bob.callers[-1] == ada.peer_id
    assert bob.channels.describe(ada.peer_id).route == f"relay {door.peer_id[-6:]}", (
        "the callee tells it too"
    )


async def test_a_peer_whose_record_names_no_relay_is_found_through_our_own(net: Net) -> None:
    door, ada, bob = await relayed(net)
    await swap(ada, bob, 1, 2**10, entry_points=())
    assert ada.channels.describe(bob.peer_id).route == f"relay {door.peer_id[-6:]}"


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
    # A circuit ends at its limit, the exchange does not.
    await swap(ada, bob, 100, 2**20, entry_points=())
    assert ada.tunnels.statistics().resumed >= 1


async def test_an_exchange_goes_on_over_fresh_circuits_when_a_relay_ends_them_at_its_limit(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "USEFUL_BYTES", 2**20)
    door, ada, bob = await relayed(net, bytes=12 * 2**20)
    stream = await exchange(ada, bob, 64 * 2**20)
    resumed, repeated = totals(ada, bob)
    assert resumed >= 5, "64 MiB over circuits of 12 MiB"
    assert repeated <= 0.1 * 64 * 2**20, f"{repeated / 2**20:.1f} MiB were sent again"
    assert ada.channels.describe(bob.peer_id).route == f"relay {door.peer_id[-6:]}"
    await stream.close()


async def test_an_exchange_goes_on_over_a_fresh_circuit_when_a_relay_ends_one_by_the_clock(
    net: Net,
) -> None:
    door, ada, bob = await relayed(net, seconds=4)

    async def outlived() -> bool:
        return totals(ada, bob)[0] >= 2

    async def linger(taken: int) -> None:
        if taken == 4 * 2**20:
            await until_async(outlived, 60, "two circuits have ended")

    stream = await exchange(ada, bob, 8 * 2**20, linger)
    assert totals(ada, bob)[1] <= 4 * 2**20, "nothing but what was on its way was sent again"
    assert ada.channels.describe(bob.peer_id).route == f"relay {door.peer_id[-6:]}"
    await stream.close()


async def exchange(
    ada: End, bob: End, size: int, between: Callable[[int], Awaitable[None]] | None = None
) -> CallerStream:
    """One call that brings random contents to the callee, and is told their digest; the digests
    must be equal.

    ``between``: told how many bytes gRPC has taken, after each MiB; what follows waits for it.
    """

    async def digest(peer: str, stream: CalleeStream) -> None:
        digests.append(hash_ := sha256())
        while (frame := await stream.receive()) is not None and frame.chunk.data:
            hash_.update(frame.chunk.data)
        await stream.send(pb.Frame(confirm=pb.Confirm(members=hash_.digest())))

    digests: list[Any] = []
    bob.swapping = digest
    stream = await soon(ada.call(bob.info(entry_points=where(bob)), timeout=240))
    draw, mine = random.Random(size), sha256()
    for taken in range(2**20, size + 1, 2**20):
        mine.update(data := draw.randbytes(2**20))
        await soon(stream.send(pb.Frame(chunk=pb.Chunk(data=data))))
        if between:
            await between(taken)
    await stream.send(pb.Frame(chunk=pb.Chunk()))
    answer = await soon(stream.receive())
    assert answer is not None and answer.confirm.members == mine.digest()
    assert len(digests) == 1, "the callee has answered one call"
    return stream


def totals(*ends: End) -> tuple[int, int]:
    """Streams that took the place of others, as the first end counts them, and bytes that any end
    has sent again."""
    return ends[0].tunnels.statistics().resumed, sum(
        end.tunnels.statistics().repeated for end in ends
    )


@pytest.mark.parametrize(
    ("transport", "seed"),
    [
        (TCP, 1),
        (QUIC, 2),
        *(
            pytest.param(one, seed, marks=pytest.mark.soak)
            for one in (TCP, QUIC)
            for seed in range(3, 8)
        ),
    ],
)
async def test_an_exchange_outlives_connections_that_are_cut_at_random_instants(
    net: Net, transport: str, seed: int
) -> None:
    bob = await net.end(listen=[transport])
    ada = await net.end(where(bob), listen=[transport])
    size, draw = 64 * 2**20, random.Random(seed)
    places = sorted(draw.sample(range(size // 20, size * 9 // 10), 4))

    async def cut(taken: int) -> None:
        while places and taken >= places[0]:
            places.pop(0)
            await until_async(lambda: is_carried(ada), 60, "there is a stream to cut")
            end, other = draw.choice([(ada, bob), (bob, ada)])
            await end.streams.disconnect(other.peer_id)

    stream = await exchange(ada, bob, size, cut)
    resumed, repeated = totals(ada, bob)
    assert not places and resumed >= 3, "two cuts may fall on one stream that is not there"
    assert repeated <= 0.1 * size, f"{repeated / 2**20:.1f} MiB were sent again"
    await stream.close()


async def is_carried(end: End) -> bool:
    """Whether a session of an end has a stream."""
    return any(pump.carried for pump in end.tunnels._pumps)


async def test_an_exchange_goes_on_directly_when_its_relay_is_gone(net: Net) -> None:
    port = free_port()
    door, ada, bob = await relayed(net, port)
    straight = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{bob.peer_id}"]
    stream = await soon(ada.call(bob.info(entry_points=())))
    await stream.send(chunk(0, 2**20))
    assert await received(stream) == chunk(0, 2**20)
    assert ada.channels.describe(bob.peer_id).route.startswith("relay")
    (dialer,) = ada.tunnels._dialers
    dialer.entry_points = tuple(straight)
    await door.close()
    await stream.send(chunk(1, 2**20))
    assert await received(stream) == chunk(1, 2**20)
    assert ada.channels.describe(bob.peer_id).route == "punched"
    await stream.close()


@pytest.mark.soak  # most of a minute: places are asked for again after a pause
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


async def test_a_call_goes_on_when_p2pd_dies_and_is_started_again(net: Net) -> None:
    bob = await net.end(listen=[f"/ip4/127.0.0.1/udp/{free_port()}/quic-v1"])
    ada = await net.end(where(bob), listen=[QUIC])
    stream = await soon(ada.call(bob.info(entry_points=where(bob))))
    await stream.send(chunk(0, 8))
    assert await soon(stream.receive())
    peer = bob.streams
    assert isinstance(peer, Peer)
    pid = daemon_of(peer).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def again() -> bool:
        await peer.check_connection()
        return peer._daemon is not None and peer._daemon.running and peer._daemon.pid != pid

    await until_async(again, 90, "p2pd is started again")
    await stream.send(chunk(1, 8))
    assert await received(stream) == chunk(1, 8)
    assert ada.tunnels.statistics().resumed == 1
    await stream.close()


CALLER = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowcomm_node.system.logs import configure_logs
configure_logs()
from datetime import UTC, datetime
from pathlib import Path
from helpers.dht_peers import Peer
from helpers.tunnelling import End, chunk
from lowcomm_node.net.tls import make_certificate
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
async def test_a_caller_that_is_killed_leaves_nothing_at_the_callee(
    net: Net, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowcomm_node.net.callee.KEEP", 2.0)
    bob = await net.end(listen=[transport])
    child = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-c",
            CALLER,
            json.dumps(sys.path),
            str(tmp_path / "caller"),
            json.dumps(where(bob)),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(120):
            assert await child.stdout.readline() == b"under way\n"
        assert len(bob.tunnels.callee._names) == 1
    finally:
        child.kill()
        await child.wait()

    async def gone() -> bool:
        return (
            not bob.tunnels.callee._names and not bob.tunnels._pumps and not bob.service.open_calls
        )

    await until_async(gone, 60, "call and tunnel have ended")


async def test_a_flood_of_streams_is_bounded_and_others_get_through(net: Net) -> None:
    bob = await net.end(listen=[QUIC])
    eve = await net.dht.peer(where(bob), listen=[QUIC])
    ada = await net.end(where(bob), listen=[QUIC])
    flood = await asyncio.gather(
        *(eve.open_stream(bob.peer_id, protocol_of(RUN), 20) for _ in range(100))
    )

    answers = await soon(asyncio.gather(*(begin(stream.socket) for stream in flood)))
    assert 0 < answers.count(numbered(Signal.READY, 0)) <= MAX_TUNNELS_PER_PEER, answers
    await swap(ada, bob, 4, 2**20)
    for stream in flood:
        stream.socket.close()

    async def gone() -> bool:
        return not bob.tunnels.callee._held_by(eve.peer_id)

    await until_async(gone, 30, "the flood is gone")


async def begin(stream: socket.socket) -> bytes:
    """What is answered to a stream that begins a session; nothing if it is reset."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(stream, opening(secrets.token_bytes(SESSION), None))
        return await loop.sock_recv(stream, ANSWER)
    except OSError:
        return b""


async def test_a_peer_that_serves_no_tunnels_is_told_apart(net: Net) -> None:
    door = await net.dht.peer()
    ada = await net.end(door.addresses())
    with pytest.raises(LinkLost):
        await soon(ada.tunnels.open(door.peer_id, door.addresses(), secrets.token_bytes(SESSION)))


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
            readable, _, _ = select.select([child.stdout], [], [], 120)
            assert readable and child.stdout.readline() == "serving\n"
        finally:
            child.kill()
            child.wait()
        folder = Path(sockets) / "lowcomm"
        until(lambda: list(folder.iterdir()) == [], 20, "p2pd and its socket are gone")
        assert not list(tmp_path.glob("*.grpc"))


CALLEE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowcomm_node.system.logs import configure_logs
configure_logs()
from datetime import UTC, datetime
from pathlib import Path
from helpers.dht_peers import Peer
from helpers.tunnelling import End
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.net.tls import make_certificate
async def live():
    peer = Peer(Path(sys.argv[2]))
    await peer.start()
    end = End(peer.identity, peer, make_certificate(datetime.now(UTC)))
    await end.start(runtime_folder())
    print("serving", flush=True)
    await asyncio.sleep(1000)
asyncio.run(live())
"""
