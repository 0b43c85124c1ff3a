"""Latency and rate of a line, measured with pings, whatever carries them.

A rate is measured with several pings in flight: two at first, and one more for each answer. So the
queue of a slow line stays short, and a fast line is full after a few round trips.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Protocol

from lowcomm_node.errors import LinkLost
from lowcomm_protocol.errors import in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import MAX_CONTENT

SAMPLES = 7
MAX_SECONDS = 2.0
"""Of one direction; answers to pings in flight are still awaited then."""
MAX_BYTES = 8_000_000
"""Of one direction."""
PIECE = 32 * 1024
"""Bytes of content at a time."""
FIRST_WINDOW, LAST_WINDOW = 2, 48
"""Pings in flight."""
ANSWER_DEADLINE = 10.0
OVERHEAD = 256
"""Bytes that any probe counts as beside its content: an empty one is not free."""
TOO_MUCH = "too much was measured lately: measure again tomorrow"
"""Why a ping is refused."""
_CONTENT = secrets.token_bytes(PIECE)
"""Random, so that nothing on the way can compress it."""


class Carrier(Protocol):
    """Carries pings there, and pongs back."""

    async def send(self, ping: pb.Ping) -> None:
        """Send one. Raises LinkLost."""
        ...

    async def receive(self) -> pb.Pong:
        """The answer to the oldest ping in flight. Raises LinkLost, ProtocolViolation."""
        ...


@dataclass(frozen=True)
class Speed:
    """The latency and rates of a line."""

    round_trip: float
    """Seconds, the median of several."""
    up: float
    """Bytes a second to the other end."""
    down: float


async def measure_speed(carrier: Carrier, clock: Callable[[], float] = monotonic) -> Speed:
    """Latency, then each direction by itself. Raises LinkLost, ProtocolViolation."""
    round_trip = await measure_round_trip(carrier, clock)
    up = await measure_rate(carrier, pb.Ping(content=_CONTENT), clock)
    down = await measure_rate(carrier, pb.Ping(wanted=PIECE), clock)
    return Speed(round_trip, up, down)


async def measure_round_trip(carrier: Carrier, clock: Callable[[], float] = monotonic) -> float:
    """Seconds from ping to pong, the median of SAMPLES. Raises LinkLost, ProtocolViolation."""
    samples = list[float]()
    for _ in range(SAMPLES):
        began = clock()
        await carrier.send(pb.Ping())
        await receive_pong(carrier, 0)
        samples.append(clock() - began)
    return median(samples)


async def measure_rate(
    carrier: Carrier,
    ping: pb.Ping,
    clock: Callable[[], float] = monotonic,
) -> float:
    """Bytes a second of the contents of many such pings. Raises LinkLost, ProtocolViolation."""
    size = len(ping.content) + ping.wanted
    window, in_flight, asked, answered = FIRST_WINDOW, 0, 0, 0
    began = first = clock()
    while True:
        over = clock() - began > MAX_SECONDS or (asked + 1) * size > MAX_BYTES
        if over and not in_flight:
            break
        if not over and in_flight < window:
            await carrier.send(ping)
            in_flight += 1
            asked += 1
            continue
        await receive_pong(carrier, ping.wanted)
        in_flight -= 1
        answered += 1
        window = min(window + 1, LAST_WINDOW)
        if answered == 1:
            first = clock()
    # The first answer comes after the latency of the line: the rate is how fast others follow.
    if answered > FIRST_WINDOW:
        return (answered - 1) * size / max(clock() - first, 1e-6)
    return answered * size / max(clock() - began, 1e-6)


async def receive_pong(carrier: Carrier, size: int) -> None:
    """Await a pong with ``size`` bytes of content. Raises LinkLost, ProtocolViolation."""
    try:
        async with asyncio.timeout(ANSWER_DEADLINE):
            pong = await carrier.receive()
    except TimeoutError:
        raise LinkLost(f"answered no ping within {ANSWER_DEADLINE:.0f} s") from None
    if pong.refused:
        raise LinkLost(in_words(pong.refused))
    if len(pong.content) != size:
        found = len(pong.content)
        raise LinkLost(f"answered a ping with {found} bytes where {size} were asked for")


def answer_to(ping: pb.Ping) -> pb.Pong:
    """The pong to a ping that was checked."""
    return pb.Pong(content=(_CONTENT * -(-MAX_CONTENT // PIECE))[: ping.wanted])
