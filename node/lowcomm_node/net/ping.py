"""``ping PEER``: measures latency and rate of each route to a peer, and answers the pings of
others.

    caller: Ping, Ping, ... ──► direct, then the tunnel ──► callee: Pong, Pong, ...

A rate is measured with several pings in flight: two at first, and one more for each answer. So the
queue of a slow line stays short, and a fast line is full after a few round trips. Both sides keep
to their owners' bandwidth limits.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable
from statistics import median
from time import monotonic
from typing import Any

from grpc import aio

from lowcomm_node.errors import ConfigError, LinkLost, NoPeers
from lowcomm_node.net.bandwidth import Bandwidth
from lowcomm_node.net.routes import RouteSpeed
from lowcomm_node.net.stream import CallerStream
from lowcomm_node.system.quota import Allowed, Quota, prefixes_of
from lowcomm_node.system.tasks import in_time
from lowcomm_protocol.errors import in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.probes import MAX_CONTENT, check_ping
from lowcomm_protocol.peers.records import PeerInfo

GIVEN = Allowed(each=512_000_000, all=4_000_000_000, seconds=86_400.0)
"""Bytes of contents for peers of the run, per day."""
MAX_AT_ONCE = 4
BUSY_SECONDS = 5.0
"""Seconds of traffic queued at our own limits; beyond that a ping would measure the limits."""
CALL_SECONDS = 60.0
REFUSE_DEADLINE = 5.0
SAMPLES = 7
MAX_SECONDS, MAX_BYTES = 2.0, 8_000_000
"""Of one direction; answers to pings in flight are still awaited then."""
PIECE = 32 * 1024
"""Bytes of content at a time."""
FIRST_WINDOW, LAST_WINDOW = 2, 48
"""Pings in flight."""
ANSWER_DEADLINE = 10.0
OVERHEAD = 256
"""Bytes that any ping counts as beside its content: an empty one is not free."""
_CONTENT = secrets.token_bytes(PIECE)
"""Random, so that nothing on the way can compress it."""


def match_peer(text: str, peers: Iterable[PeerInfo]) -> PeerInfo:
    """The peer whose id is given, or begins or ends as given, as ``peers`` prints it. Raises
    ConfigError if several match, NoPeers if none does."""
    found = [info for info in peers if info.peer_id.startswith(text) or info.peer_id.endswith(text)]
    if len(found) > 1:
        names = ", ".join(info.peer_id for info in found[:4])
        raise ConfigError(
            f"{text[:64]!r} can mean {len(found)} peers: give more of its id, such as one of "
            f"{names}."
        )
    if not found:
        raise NoPeers(
            f"No peer of this run that is alive is called {text[:64]!r}: `lowcomm-node peers` "
            "lists them."
        )
    return found[0]


class Echo:
    """The callee's side."""

    def __init__(self, bandwidth: Bandwidth | None = None) -> None:
        self._bandwidth = bandwidth or Bandwidth()
        self._given = Quota(GIVEN)
        self._calls: Counter[str] = Counter()

    async def answer(self, peer: str, stream: Any) -> None:
        """Answer the pings of one call on its ``CalleeStream``. Raises ProtocolViolation,
        LinkLost."""
        if self._calls[peer] or self._calls.total() >= MAX_AT_ONCE:
            await _refuse(stream, "another ping is being answered: try again in a moment")
            return
        self._calls[peer] += 1
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._answer(peer, stream)
        except TimeoutError:
            await _refuse(stream, f"one call may ping for {CALL_SECONDS:.0f} s")
        finally:
            del self._calls[peer]

    async def _answer(self, peer: str, stream: Any) -> None:
        # Identities are free, so the quota counts by address.
        caller = prefixes_of(stream.place)[0] if stream.place else peer
        while (ping := await stream.receive()) is not None:
            check_ping(ping)
            if not self._given.take(
                caller, len(ping.content) + ping.wanted + OVERHEAD, monotonic()
            ):
                await _refuse(stream, "too much was measured lately: measure again tomorrow")
                return
            up, down = self._bandwidth.up, self._bandwidth.down
            if max(up.debt, down.debt) > BUSY_SECONDS:
                await _refuse(
                    stream, "its link is busy, as its owner limits it: measure again later"
                )
                return
            await down.pass_(len(ping.content))
            await up.pass_(ping.wanted)
            await stream.send(answer_to(ping))


def answer_to(ping: pb.Ping) -> pb.Pong:
    """The pong to a ping that was checked."""
    return pb.Pong(content=(_CONTENT * -(-MAX_CONTENT // PIECE))[: ping.wanted])


async def _refuse(stream: Any, reason: str) -> None:
    """Send the reason, then read what is under way: gRPC gives no reason to a caller that can't
    write. Raises LinkLost."""
    async with in_time(REFUSE_DEADLINE, "does not read our answers"):
        await stream.send(pb.Pong(refused=reason))
    await stream.close()


async def measure(
    channel: aio.Channel,
    metadata: tuple[tuple[str, bytes], ...],
    bandwidth: Bandwidth,
    route: str,
) -> RouteSpeed:
    """Latency, then the rate of each direction by itself, over one call on a connected channel.
    Raises LinkLost, ProtocolViolation."""
    call = ExchangeStub(channel).Ping(metadata=metadata, timeout=CALL_SECONDS)
    stream, samples = CallerStream(call), list[float]()
    try:
        for _ in range(SAMPLES):
            began = monotonic()
            await _send(stream, pb.Ping(), bandwidth)
            await _receive(stream, 0)
            samples.append(monotonic() - began)
        up = await _rate(stream, pb.Ping(content=_CONTENT), bandwidth)
        down = await _rate(stream, pb.Ping(wanted=PIECE), bandwidth)
    finally:
        call.cancel()
    return RouteSpeed(route=route, round_trip=median(samples), up=up, down=down)


async def _rate(stream: CallerStream, ping: pb.Ping, bandwidth: Bandwidth) -> float:
    """Bytes a second of the contents of many such pings."""
    size = len(ping.content) + ping.wanted
    window, in_flight, asked, answered = FIRST_WINDOW, 0, 0, 0
    began = first = monotonic()
    while True:
        over = monotonic() - began > MAX_SECONDS or (asked + 1) * size > MAX_BYTES
        if over and not in_flight:
            break
        if not over and in_flight < window:
            await _send(stream, ping, bandwidth)
            in_flight += 1
            asked += 1
            continue
        await _receive(stream, ping.wanted)
        in_flight -= 1
        answered += 1
        window = min(window + 1, LAST_WINDOW)
        if answered == 1:
            first = monotonic()
    # The first answer comes after the latency of the line: the rate is how fast others follow.
    if answered > FIRST_WINDOW:
        return (answered - 1) * size / max(monotonic() - first, 1e-6)
    return answered * size / max(monotonic() - began, 1e-6)


async def _send(stream: CallerStream, ping: pb.Ping, bandwidth: Bandwidth) -> None:
    await bandwidth.up.pass_(len(ping.content))
    # Pay for the pong before asking for it, so that the measured time is the peer's alone.
    await bandwidth.down.pass_(ping.wanted)
    await stream.send(ping)


async def _receive(stream: CallerStream, size: int) -> None:
    """Await a pong with ``size`` bytes of content."""
    async with in_time(ANSWER_DEADLINE, f"answered no ping within {ANSWER_DEADLINE:.0f} s"):
        pong = await stream.receive()
    if pong is None:
        raise LinkLost("broke off")
    if pong.refused:
        raise LinkLost(in_words(pong.refused))
    if len(pong.content) != size:
        came = len(pong.content)
        raise LinkLost(f"answered a ping with {came} bytes where {size} were asked for")
