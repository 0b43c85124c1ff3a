"""``doctor`` asks others: what they answer, or leave unanswered, spoils nothing but what they were asked for."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest

from helpers.waiting import until_async
from lowcomm_node.daemon import daemon as daemons
from lowcomm_node.doctor import line, scouts, survey
from lowcomm_node.doctor.examining import _serving
from lowcomm_node.doctor.sights import Helper, Subject, Survey
from lowcomm_node.errors import RetryLater
from lowcomm_node.libp2p.interface import OpenStream
from lowcomm_node.libp2p.multiaddress import EntryPoint
from lowcomm_node.libp2p.p2pd import has_ipv6
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.probing.asker import Asker
from lowcomm_node.probing.prober import ProbeLimits, Prober
from lowcomm_node.system.quota import Allowed
from lowcomm_node.testing.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import PROTOCOL, Kind, Seen, Target

ME, *HELPERS = (Identity(letter * 32).peer_id for letter in (b"m", b"1", b"2", b"3"))
OUTER, INNER = "44.128.0.12", "192.168.1.7"
SUBJECT = Subject(peer_id=ME, hosts=(INNER,), listens=(f"/ip4/{INNER}/tcp/4001",))
PLENTY, LITTLE = (Allowed(each=count, all=10**9, seconds=86_400.0) for count in (10**9, 40_000))


def helper(number: int, sees: str = OUTER, *told: str) -> Helper:
    """One at a public address, who tells of further ones."""
    entry = EntryPoint(HELPERS[number], f"/ip4/44.128.0.2{number}/tcp/31330")
    seen = f"/{'ip6' if ':' in sees else 'ip4'}/{sees}/tcp/9"
    return Helper(
        entry, f"44.128.0.2{number}", Seen(seen, time(), tuple(f"{dial}/p2p/{entry.peer_id}" for dial in told)), 0.0
    )


@asynccontextmanager
async def answering(address: str, size: Allowed = PLENTY) -> AsyncIterator[tuple[MemoryDiscovery, list[Target]]]:
    """The first helper answers probes, which come from ``address``; who asks, and the ports that were called."""
    network, called = MemoryNetwork(time, address=address), list[Target]()

    async def dial(host: str, peer_id: str, target: Target) -> bool:
        called.append(target)
        return True

    limits = ProbeLimits(calls=PLENTY, bytes=size, rate=1e9)
    prober = Prober(MemoryDiscovery(HELPERS[0], network), tuple, limits, dial)
    await prober.serve()
    try:
        yield MemoryDiscovery(ME, network), called
    finally:
        await prober.close()


@pytest.fixture
def no_scouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scout is sent out."""

    async def nothing(*_: object) -> None: ...

    async def none(*_: object) -> tuple[()]:
        return ()

    for name in ("scout_udp", "scout_ipv6"):
        monkeypatch.setattr(survey, name, nothing)
    monkeypatch.setattr(survey, "scout_packets", none)


async def test_who_does_not_measure_with_us_still_calls_us_back(no_scouts: None):
    async with answering(f"/ip4/{OUTER}/tcp/9", LITTLE) as (streams, called):
        found = await survey.survey(streams, SUBJECT, [str(helper(0).entry)])
    assert found.speed is None and "tomorrow" in found.no_speed
    assert found.helpers[0].reached == ((Kind.TCP, True),) and not found.helpers[0].refused
    assert called == [Target(Kind.TCP, 4001)]


async def test_a_survey_that_is_given_up_leaves_no_stream_open():
    opened = list[socket.socket]()

    class Mute(MemoryDiscovery):
        async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
            stream = await super().open_stream(peer_id, protocol, seconds)
            opened.append(stream.socket)
            return stream

    network, kept = MemoryNetwork(time, address=f"/ip4/{OUTER}/tcp/9"), list[OpenStream]()
    await MemoryDiscovery(HELPERS[0], network).serve_streams(PROTOCOL, kept.append)
    asking = asyncio.create_task(survey.survey(Mute(ME, network), SUBJECT, [str(helper(0).entry)]))

    async def is_asked() -> bool:
        return bool(kept)

    await until_async(is_asked, 20, "the helper is asked")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [one.fileno() for one in opened] == [-1]
    kept[0].socket.close()


@pytest.mark.parametrize("address", ["/ip4/44.128.0.13/udp/99999999999/quic-v1", "/ip4/44.128.0.13/udp/0/quic-v1"])
async def test_an_address_that_there_can_not_be_is_not_believed(address: str):
    async with answering(address) as (streams, _):
        with Asker(await streams.open_stream(HELPERS[0], PROTOCOL, 5)) as asker, pytest.raises(ProtocolViolation):
            await scouts._sight(asker)
    liar = Helper(helper(0).entry, "44.128.0.20", Seen(address.replace("udp", "tcp"), 0.0, ()), 0.0)
    assert Survey(helpers=(liar,)).sights == ()


# scouts


class Control:
    """As much of a p2pd as a scout needs: all calls of it lead to the first helper."""

    def __init__(self, streams: MemoryDiscovery) -> None:
        self._streams = streams

    async def connect(self, *_: object) -> None: ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        return await self._streams.open_stream(HELPERS[0], protocol, seconds)

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        return ME, ()


class Caller:
    """One that calls back."""

    def __init__(self) -> None:
        self.called: list[Target] = []

    async def dial_back(self, peer_id: str, targets: Sequence[Target]) -> tuple[bool, ...]:
        self.called += targets
        return (False,) * len(targets)


async def test_only_who_sees_the_address_of_a_scout_is_asked_to_call_it():
    helpers = [helper(0), helper(1, "2a00:128::7"), helper(2)]
    callers = [Caller() for _ in helpers]
    askers: Any = list(zip(callers, helpers, strict=True))
    async with answering(f"/ip4/{OUTER}/udp/7000/quic-v1") as (streams, called):
        control: Any = Control(streams)
        found = await scouts._scout_over_quic(control, askers, helpers[0].entry, helpers[1:])
        assert (found.gets_in, found.by_stranger) == (False, True)
        assert [caller.called for caller in callers] == [[], [], [Target(Kind.QUIC, 7000)]]
        assert not called
        # Nobody else sees it: the one that the scout has called is asked, which says less.
        found = await scouts._scout_over_quic(control, askers[:2], helpers[0].entry, helpers[1:2])
        assert (found.gets_in, found.by_stranger) == (True, False)
        assert called == [Target(Kind.QUIC, 7000)] and not callers[1].called


async def test_a_scout_that_others_keep_waiting_comes_back(monkeypatch: pytest.MonkeyPatch):
    stopped = list[tuple[int, str]]()

    class Waiting:
        async def connect(self, *_: object) -> None:
            await asyncio.Event().wait()

    @asynccontextmanager
    async def scout(version: int, loopback: bool, transport: str) -> AsyncIterator[Waiting]:
        try:
            yield Waiting()
        finally:
            stopped.append((version, transport))

    monkeypatch.setattr(scouts, "_scout", scout)
    monkeypatch.setattr(scouts, "SCOUT_DEADLINE", 0.05)
    one: Any = (Caller(), helper(0, OUTER, "/ip6/2a00:128::20/tcp/31330"))
    async with asyncio.timeout(20):
        assert await scouts.scout_udp([one], SUBJECT) is None
        assert await scouts.scout_ipv6([one[1]], SUBJECT) is None
        assert await scouts.scout_packets([one[1]], SUBJECT) == ()
    over_ipv6 = [(6, "tcp")] if has_ipv6() else []
    assert stopped == [(4, "udp"), *over_ipv6, (4, "tcp"), (4, "tcp")]


@pytest.mark.parametrize("lost", ["", "out", "in"])
async def test_large_packets_are_sent_over_tcp_each_way_by_a_scout_of_its_own(
    monkeypatch: pytest.MonkeyPatch, lost: str
):
    """A connection over which something was lost carries nothing that follows, as TCP does."""

    class Scout:
        def __init__(self) -> None:
            self.connected, self.stuck = list[str](), False

        async def connect(self, peer_id: str, entries: Sequence[EntryPoint], seconds: float) -> None:
            self.connected += [entry.dial for entry in entries]

    async def pinged(one: Scout, entry: EntryPoint, ping: pb.Ping) -> bool:
        is_large = {"out": len(ping.content), "in": ping.wanted, "": 0}[lost] > 1000
        one.stuck = one.stuck or is_large
        return not one.stuck

    made = list[Scout]()

    @asynccontextmanager
    async def scout(version: int, loopback: bool, transport: str) -> AsyncIterator[Scout]:
        assert (version, transport) == (4, "tcp")
        made.append(Scout())
        yield made[-1]

    monkeypatch.setattr(scouts, "_scout", scout)
    monkeypatch.setattr(line, "_pinged", pinged)
    told = await scouts.scout_packets([helper(0)], SUBJECT)
    assert [(one.out, one.into) for one in told] == [(lost != "out", lost != "in")]
    assert [one.connected for one in made] == [[helper(0).entry.dial]] * 2


async def test_where_the_kernel_has_no_ipv6_none_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    class Without(socket.socket):
        def __init__(self, family: int = -1, *rest: Any, **options: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest, **options)

    monkeypatch.setattr(socket, "socket", Without)
    assert await scouts.scout_ipv6([helper(0, OUTER, "/ip6/2a00:128::20/tcp/31330")], SUBJECT) is None


def test_no_stranger_names_an_address_of_our_own_networks():
    inner = ("/ip6/::1/tcp/1", "/ip6/fd00::1/tcp/1", "/ip6/fe80::1/tcp/1")
    assert scouts.over_ipv6(helper(0, OUTER, *inner), loopback=False) is None
    told = scouts.over_ipv6(helper(0, OUTER, *inner, "/ip6/2a00:128::20/tcp/31330"), loopback=False)
    assert told is not None and told.dial == "/ip6/2a00:128::20/tcp/31330"
    here = scouts.over_ipv6(helper(0, OUTER, *inner), loopback=True)
    assert here is not None and here.dial == "/ip6/::1/tcp/1"


# examining


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_without_a_node_calls_over_ipv6_are_answered_too(tmp_path: Path):
    async with _serving(NodeSettings(home=tmp_path, peers=("/ip4/44.128.0.20/tcp/1/p2p/x",))) as (port, _, _):
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()


async def test_an_examination_that_takes_too_long_is_given_up_by_the_node_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(daemons, "EXAMINE_DEADLINE", 0.05)
    node = daemons.Daemon(NodeSettings(home=tmp_path))
    async with node._examining, asyncio.timeout(20):  # another one is under way
        with pytest.raises(RetryLater, match=r"took longer than .* try again"):
            await node.doctor(())
