"""A peer that answers probes calls nobody but the asker, and gives no more than it may."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import Any
from unittest.mock import patch

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.waiting import until_async
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import OpenStream, read_message, send_message
from lowcomm_node.swarm import probes
from lowcomm_node.swarm.probes import (
    MAX_STREAMS_PER_CALLER,
    Asker,
    Prober,
)
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import PROTOCOL, Keeping

ASKER, HELPER = Identity(b"a" * 32).peer_id, Identity(b"h" * 32).peer_id
RELAY = Identity(b"r" * 32).peer_id
FROM = "/ip4/203.0.113.7/tcp/4001"
PLENTY = Allowed(each=10**9, all=10**9, seconds=3600.0)
TARGETS = [
    pb.Target(kind=pb.Target.DIRECT, port=45123, certificate=b"d" * 32),
    pb.Target(kind=pb.Target.TCP, port=4001),
    pb.Target(kind=pb.Target.QUIC, port=4002),
]


class World:
    """A helper, and who asks it."""

    def __init__(
        self,
        address: str = FROM,
        calls: Allowed = PLENTY,
        keeps: bool = True,
    ) -> None:
        self.network = MemoryNetwork(clock=time, address=address)
        self.helper, self.asker = (MemoryDiscovery(peer, self.network) for peer in (HELPER, ASKER))
        self.now = 0.0
        self.called: list[tuple[str, str, pb.Target]] = []
        self.answering = {pb.Target.DIRECT, pb.Target.QUIC}
        self.asked_for: list[tuple[str, str]] = []
        self.prober = Prober(
            self.helper,
            lambda: ("/ip4/198.51.100.1/tcp/1/p2p/" + HELPER,),
            calls,
            self.keep if keeps else None,
        )

    async def keep(self, run_id: str, place: str | None) -> Keeping:
        self.asked_for.append((run_id, place))
        return Keeping(kept=True, seconds=86_400.0)

    def clock(self) -> float:
        return self.now

    async def dial(self, host: str, peer_id: str, target: pb.Target) -> bool:
        self.called.append((host, peer_id, target))
        return target.kind in self.answering

    async def stream(self) -> Asker:
        return Asker(await self.asker.open_stream(HELPER, PROTOCOL, 5))


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    made = World(**options)
    await made.prober.serve()
    with patch.multiple(probes, is_reached=made.dial, monotonic=made.clock):
        try:
            yield made
        finally:
            await made.prober.close()


async def test_the_asker_is_told_where_it_comes_from_and_what_time_it_is():
    async with world() as made:
        with await made.stream() as asker:
            seen, offset = await asker.look()
            assert seen.address == FROM and seen.entry_points[0].endswith(HELPER)
            assert abs(offset) < 0.01
            _, ahead = await asker.look(clock=lambda: time() - 12.3)
            assert ahead == pytest.approx(12.3, abs=1.0)


async def test_calls_go_to_the_address_that_the_asker_comes_from_and_nowhere_else():
    async with world() as made:
        with await made.stream() as asker:
            assert await asker.dial_back(ASKER, TARGETS) == (True, False, True)
    assert made.called == [("203.0.113.7", ASKER, target) for target in TARGETS]


async def test_who_comes_through_a_relay_is_not_called():
    async with world(address=f"/ip4/198.51.100.9/tcp/1/p2p/{RELAY}/p2p-circuit") as made:
        with await made.stream() as asker, pytest.raises(LinkLost, match="relay"):
            await asker.dial_back(ASKER, TARGETS)
    assert made.called == []


async def test_a_caller_that_asks_for_too_many_calls_is_refused_until_time_has_passed():
    async with world(calls=Allowed(each=6, all=100, seconds=3600.0)) as made:
        with await made.stream() as asker:
            for _ in range(2):
                await asker.dial_back(ASKER, TARGETS)
            with pytest.raises(LinkLost, match="ask again"):
                await asker.dial_back(ASKER, TARGETS)
            assert len(made.called) == 6
            # Another identity at the same address is the same caller.
            made.asker.peer_id = RELAY
            with await made.stream() as twin, pytest.raises(LinkLost, match="ask again"):
                await twin.dial_back(RELAY, TARGETS)
            made.now += 1800.0
            assert await asker.dial_back(ASKER, TARGETS) == (True, False, True)


async def test_a_caller_holds_a_few_streams_at_most():
    async with world() as made:
        askers = [await made.stream() for _ in range(MAX_STREAMS_PER_CALLER + 1)]
        for asker in askers[:-1]:
            await asker.look()
        with pytest.raises(LinkLost):
            await askers[-1].look()
        made.asker.opened[0].close()

        async def is_let_in() -> bool:
            with await made.stream() as another:
                try:
                    await another.look()
                except LinkLost:
                    return False
                return True

        await until_async(is_let_in, 30, "a stream that has ended makes room")
        for asker in askers:
            asker.__exit__()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff",
        pb.Probe(dial_back=pb.DialBack(peer_id="nobody")).SerializeToString(),
        pb.Probe(
            dial_back=pb.DialBack(
                peer_id=ASKER, targets=[pb.Target(kind=pb.Target.TCP, port=22)] * 99
            )
        ).SerializeToString(),
    ],
)
async def test_what_is_no_probe_ends_the_stream_and_nothing_else(data: bytes):
    async with world() as made:
        stream = await made.asker.open_stream(HELPER, PROTOCOL, 5)
        with stream.socket:
            await send_message(stream.socket, data)
            with pytest.raises(LinkLost):
                await read_message(stream.socket)
        with await made.stream() as asker:
            await asker.look()
    assert made.called == []


async def test_a_helper_that_answers_something_else_is_not_believed():
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    lie = pb.Probed(dialed_back=pb.DialedBack(reached=[True])).SerializeToString()
    with far, Asker(OpenStream(HELPER, FROM, near)) as asker:
        await send_message(far, lie)
        with pytest.raises(ProtocolViolation, match="was expected"):
            await asker.look()
        await send_message(far, lie)
        with pytest.raises(ProtocolViolation, match="on 1 calls where 3"):
            await asker.dial_back(ASKER, TARGETS)


async def test_a_bootstrap_server_is_asked_for_a_run_with_the_place_of_who_asks():
    async with world(calls=Allowed(each=2, all=100, seconds=3600.0)) as made:
        with await made.stream() as asker:
            assert await asker.keeps("ab" * 32) == Keeping(kept=True, seconds=86_400.0)
            assert made.asked_for == [("ab" * 32, "203.0.113.7")]
            await asker.keeps("cd" * 32)
            with pytest.raises(LinkLost, match="too often"):
                await asker.keeps("ef" * 32)
    async with world(keeps=False) as made:
        with await made.stream() as asker, pytest.raises(LinkLost, match="is a node"):
            await asker.keeps("ab" * 32)
    async with world() as made:
        with await made.stream() as asker, pytest.raises(LinkLost):
            await asker.keeps("ab")
