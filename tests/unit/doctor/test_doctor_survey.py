"""``doctor`` asks others: whatever they answer, or leave unanswered, spoils nothing else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from typing import Any
from unittest.mock import patch

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.waiting import until_async
from lowcomm_node.doctor import run
from lowcomm_node.doctor.findings import Helper, Subject
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.control import OpenStream
from lowcomm_node.swarm import probes
from lowcomm_node.swarm.probes import Prober
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import PROTOCOL, ProbeKind, Seen

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
) -> AsyncIterator[tuple[MemoryDiscovery, list[pb.Target]]]:
    """The first helper answers probes that come from ``address``: the asker, the ports called."""
    network, called = MemoryNetwork(time, address=address), list[pb.Target]()

    async def dial(host: str, peer_id: str, target: pb.Target) -> bool:
        called.append(target)
        return True

    prober = Prober(MemoryDiscovery(HELPERS[0], network), tuple, PLENTY)
    await prober.serve()
    with patch.object(probes, "is_reached", dial):
        try:
            yield MemoryDiscovery(ME, network), called
        finally:
            await prober.close()


async def test_a_helper_says_how_it_sees_us_and_calls_us_back():
    async with answering(f"/ip4/{OUTER}/tcp/9") as (streams, called):
        found = await run.ask_others(streams, SUBJECT, [str(helper(0).entry)])
    assert found.helpers[0].sees == OUTER and abs(found.helpers[0].offset) < 1
    assert found.helpers[0].reached == {ProbeKind.TCP: True} and not found.helpers[0].refused
    assert called == [pb.Target(kind=pb.Target.TCP, port=4001)]


async def test_a_survey_that_is_given_up_leaves_no_stream_open():
    opened = list[socket.socket]()

    class Mute(MemoryDiscovery):
        async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
            stream = await super().open_stream(peer_id, protocol, seconds)
            opened.append(stream.socket)
            return stream

    network, kept = MemoryNetwork(time, address=f"/ip4/{OUTER}/tcp/9"), list[OpenStream]()
    await MemoryDiscovery(HELPERS[0], network).serve_streams(PROTOCOL, kept.append)
    asked = run.ask_others(Mute(ME, network), SUBJECT, [str(helper(0).entry)])
    asking = asyncio.create_task(asked)
    await until_async(lambda: bool(kept), 20, "the helper is asked")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [one.fileno() for one in opened] == [-1]
    kept[0].socket.close()


def test_neighbours_help_only_where_there_is_nobody_else():
    def chosen(*helpers: Helper) -> list[Helper]:
        pairs: Any = [(None, each) for each in helpers]
        return [each for _, each in run.choose_helpers(pairs)]

    near, far = replace(helper(0, "192.168.1.9"), host="192.168.1.5"), helper(1)
    assert chosen(near, far) == [far]
    assert chosen(near) == [near]
    assert chosen(far, far, helper(2)) == [far, helper(2)]
