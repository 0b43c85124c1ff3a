"""Tunnels through real p2pd processes on loopback: over TCP, over QUIC, through a relay."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from grpc import aio

from helpers.dht_peers import Dht, Peer
from helpers.processes import free_port
from helpers.tunnelling import End, chunk, received, soon
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import EntryPoint, circuit, parse_entry_point
from lowcomm_node.net.control import Control
from lowcomm_node.net.p2pd import P2pDaemon, RelayLimits
from lowcomm_node.net.relays import reserve
from lowcomm_node.net.stream import CallerStream
from lowcomm_node.net.tls import make_certificate
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
DEAD = ("/ip4/127.0.0.1/tcp/1",)
CERTIFICATE = make_certificate()
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
        await end.start()
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


@pytest.mark.parametrize("transport", [TCP, QUIC], ids=["TCP", "QUIC"])
async def test_contents_go_both_ways_at_once_and_the_caller_is_known(
    net: Net, transport: str
) -> None:
    bob = await net.end(listen=[transport])
    ada = await net.end(where(bob), listen=[transport])
    await swap(ada, bob, 64, 2**20)
    assert set(bob.callers) == {ada.peer_id}
    told = ada.channels.describe(bob.peer_id)
    assert told.route == "punched"
    assert ("quic" in bob.pipes.called_from(ada.peer_id)) == (transport == QUIC)
    await swap(bob, ada, 4, 2**20)
    assert bob.channels.describe(ada.peer_id).route == "punched"


async def test_nothing_is_lost_where_a_channel_is_closed_as_soon_as_its_call_has_ended(
    net: Net,
) -> None:
    """Over QUIC p2pd loses the tails of streams whose sender closes at once."""
    bob = await net.end(listen=[QUIC])
    ada = await net.end(where(bob), listen=[QUIC])
    for number in range(12):
        outgoing = await ada.pipes.dial(bob.peer_id, where(bob))
        metadata = ada.channels.metadata(bob.peer_id)
        async with aio.insecure_channel(outgoing.target) as channel:
            stream = CallerStream(ExchangeStub(channel).Swap(metadata=metadata, timeout=60))
            await stream.send(chunk(number, 8 << number))
            assert await received(stream) == chunk(number, 8 << number)
            await stream.close()
        await outgoing.close()
    await until_async(
        lambda: not bob.pipes.statistics()["open"], 10, "the callee has seen the end of each"
    )


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
    # A circuit ends at its limit, and the next call takes another.
    with pytest.raises(LinkLost):
        await swap(ada, bob, 100, 2**20, entry_points=())
    await until_async(lambda: swap_works(ada, bob), 60, "another circuit is taken")


async def test_the_next_call_takes_a_direct_connection_when_the_relay_is_gone(net: Net) -> None:
    port = free_port()
    door, ada, bob = await relayed(net, port)
    straight = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{bob.peer_id}",)
    stream = await soon(ada.call(bob.info(entry_points=())))
    await stream.send(chunk(0, 2**20))
    assert await received(stream) == chunk(0, 2**20)
    assert ada.channels.describe(bob.peer_id).route.startswith("relay")
    await door.close()
    with pytest.raises(LinkLost):
        await soon(stream.receive())
    await until_async(lambda: swap_works(ada, bob, straight), 60, "they connect directly")
    assert ada.channels.describe(bob.peer_id).route == "punched"


async def swap_works(ada: End, bob: End, entry_points: tuple[str, ...] = ()) -> bool:
    try:
        await swap(ada, bob, 1, 2**10, entry_points=entry_points)
    except LinkLost:
        return False
    return True


def daemon_of(peer: Peer) -> P2pDaemon:
    assert peer._daemon is not None
    return peer._daemon


def net_control(end: End) -> Control:
    peer = end.streams
    assert isinstance(peer, Peer)
    return Control(daemon_of(peer).control)


# What goes wrong


async def test_the_next_call_gets_through_when_p2pd_died_and_is_started_again(net: Net) -> None:
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
    with pytest.raises(LinkLost):
        await soon(stream.receive())
    await until_async(lambda: swap_works(ada, bob, where(bob)), 60, "the next call gets through")
