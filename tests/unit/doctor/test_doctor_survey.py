"""``doctor`` asks others: whatever they answer, or leave unanswered, spoils nothing else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.waiting import until_async
from lowcomm_node.doctor import survey
from lowcomm_node.doctor.findings import Helper, Subject
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.control import OpenStream
from lowcomm_node.swarm.probes import Prober
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.probes import PROTOCOL, ProbeKind, Seen, Target

ME, *HELPERS = (Identity(letter * 32).peer_id for letter in (b"m", b"1", b"2", b"3"))
OUTER, INNER = "44.128.0.12", "192.168.1.7"
SUBJECT = Subject(peer_id=ME, hosts=(INNER,), listens=(f"/ip4/{INNER}/tcp/4001",))
PLENTY = Allowed(each=10**9, all=10**9, seconds=86_400.0)


def helper(number: int, sees: str = OUTER) -> Helper:
    """A helper at a public address."""
    entry = EntryPoint(HELPERS[number], f"/ip4/44.128.0.2{number}/tcp/31330")
    seen = Seen(f"/{'ip6' if ':' in sees else 'ip4'}/{sees}/tcp/9", 0.0, ())
    return Helper(entry, f"44.128.0.2{number}", seen, 0.0)


@asynccontextmanager
async def answering(
    address: str,
) -> AsyncIterator[tuple[MemoryDiscovery, list[Target]]]:
    """The first helper answers probes that come from ``address``: the asker, the ports called."""
    network, called = MemoryNetwork(time, address=address), list[Target]()

    async def dial(host: str, peer_id: str, target: Target) -> bool:
        called.append(target)
        return True

    prober = Prober(MemoryDiscovery(HELPERS[0], network), tuple, PLENTY, dial)
    await prober.serve()
    try:
        yield MemoryDiscovery(ME, network), called
    finally:
        await prober.close()


async def test_a_helper_says_how_it_sees_us_and_calls_us_back(monkeypatch: pytest.MonkeyPatch):
    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(survey, "probe_udp", nothing)
    async with answering(f"/ip4/{OUTER}/tcp/9") as (streams, called):
        found = await survey.ask_others(streams, SUBJECT, [str(helper(0).entry)])
    assert found.helpers[0].sees == OUTER and abs(found.helpers[0].offset) < 1
    assert found.helpers[0].reached == {ProbeKind.TCP: True} and not found.helpers[0].refused
    assert called == [Target(ProbeKind.TCP, 4001)]


async def test_a_survey_that_is_given_up_leaves_no_stream_open():
    opened = list[socket.socket]()

    class Mute(MemoryDiscovery):
        async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
            stream = await super().open_stream(peer_id, protocol, seconds)
            opened.append(stream.socket)
            return stream

    network, kept = MemoryNetwork(time, address=f"/ip4/{OUTER}/tcp/9"), list[OpenStream]()
    await MemoryDiscovery(HELPERS[0], network).serve_streams(PROTOCOL, kept.append)
    asked = survey.ask_others(Mute(ME, network), SUBJECT, [str(helper(0).entry)])
    asking = asyncio.create_task(asked)

    async def is_asked() -> bool:
        return bool(kept)

    await until_async(is_asked, 20, "the helper is asked")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [one.fileno() for one in opened] == [-1]
    kept[0].socket.close()


def test_neighbours_help_only_where_there_is_nobody_else():
    def chosen(*helpers: Helper) -> list[Helper]:
        pairs: Any = [(None, each) for each in helpers]
        return [each for _, each in survey.choose_helpers(pairs)]

    near, far = replace(helper(0, "192.168.1.9"), host="192.168.1.5"), helper(1)
    assert chosen(near, far) == [far]
    assert chosen(near) == [near]
    assert chosen(far, far, helper(2)) == [far, helper(2)]


# probes


class Control:
    """As much of a p2pd as a probe needs: all calls of it lead to the first helper."""

    def __init__(self, streams: MemoryDiscovery) -> None:
        self._streams = streams

    async def connect(self, *_: object) -> None: ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        return await self._streams.open_stream(HELPERS[0], protocol, seconds)

    async def identify(self) -> tuple[str, tuple[str, ...]]:
        return ME, ()


class Caller:
    """A helper that calls back."""

    def __init__(self) -> None:
        self.called: list[Target] = []

    async def dial_back(self, peer_id: str, targets: Sequence[Target]) -> tuple[bool, ...]:
        self.called += targets
        return (False,) * len(targets)


class P2pd:
    """A p2pd of the probe of UDP, of which each call leads to ``connect``."""

    control = Path("unused")

    def __init__(self, *_: object, **__: object) -> None:
        self.stopped = False
        P2pd.newest = self

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.stopped = True


async def test_a_probe_that_others_keep_waiting_ends(monkeypatch: pytest.MonkeyPatch):
    class Waiting:
        def __init__(self, _: Path) -> None: ...

        async def connect(self, *_: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(survey, "P2pDaemon", P2pd)
    monkeypatch.setattr(survey, "Control", Waiting)
    monkeypatch.setattr(survey, "UDP_DEADLINE", 0.05)
    asker: Any = (Caller(), helper(0))
    async with asyncio.timeout(20):
        assert await survey.probe_udp([asker], loopback=False) is None
    assert P2pd.newest.stopped


@pytest.mark.parametrize("is_told", [True, False])
async def test_udp_that_nobody_offered_is_no_loss(monkeypatch: pytest.MonkeyPatch, is_told: bool):
    class Deaf:
        def __init__(self, _: Path) -> None: ...

        async def connect(self, *_: object) -> None:
            raise LinkLost("no answer")

    monkeypatch.setattr(survey, "P2pDaemon", P2pd)
    monkeypatch.setattr(survey, "Control", Deaf)
    told = (f"/ip4/44.128.0.20/udp/31330/quic-v1/p2p/{HELPERS[0]}",) if is_told else ()
    one: Any = (Caller(), replace(helper(0), seen=Seen("", 0.0, told)))
    found = await survey.probe_udp([one], loopback=False)
    assert (found is not None) == is_told and (found is None or not found.gets_out)
