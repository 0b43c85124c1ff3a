"""Latency and rate of a line, measured with pings, whatever carries them.

A rate is measured with several pings on the way at once: at first few, and one more for each that has been answered, so a slow
line is not filled with what takes a minute to come through, and a fast one is full after a few round trips.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Protocol

from lowcomm_node.errors import LinkLost
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import MAX_CONTENT, in_words

SAMPLES = 7
MAX_SECONDS = 2.0
"""Of one direction; what is on the way then is still awaited."""
MAX_BYTES = 8_000_000
"""Of one direction."""
PIECE = 32 * 1024
"""Bytes of content at a time."""
FIRST_WINDOW, LAST_WINDOW = 2, 48
"""Pings on the way at once."""
ANSWER_DEADLINE = 10.0
OVERHEAD = 256
"""Bytes that a ping counts as beside its contents, and another probe too: those without any are not free."""
TOO_MUCH = "too much was measured lately: measure again tomorrow"
"""Why a ping is refused."""
_CONTENT = secrets.token_bytes(PIECE)
"""So that nothing on the way can compress it."""


class Carrier(Protocol):
    """Carries pings there, and pongs back."""

    async def send(self, ping: pb.Ping) -> None:
        """Send one. Raises LinkLost."""
        ...

    async def receive(self) -> pb.Pong:
        """The answer to the oldest that was not answered yet. Raises LinkLost, ProtocolViolation."""
        ...


@dataclass(frozen=True)
class Speed:
    """What a line did."""

    round_trip: float
    """Seconds, the median of several."""
    up: float
    """Bytes a second to the other end."""
    down: float


async def measure_speed(carrier: Carrier, clock: Callable[[], float] = monotonic) -> Speed:
    """Latency, then both directions, one after the other. Raises LinkLost, ProtocolViolation."""
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


async def measure_rate(carrier: Carrier, ping: pb.Ping, clock: Callable[[], float] = monotonic) -> float:
    """Bytes a second of the contents of many such pings and their pongs. Raises LinkLost, ProtocolViolation."""
    size = len(ping.content) + ping.wanted
    window, under_way, asked, answered = FIRST_WINDOW, 0, 0, 0
    began = first = clock()
    while True:
        over = clock() - began > MAX_SECONDS or (asked + 1) * size > MAX_BYTES
        if over and not under_way:
            break
        if not over and under_way < window:
            await carrier.send(ping)
            under_way, asked = under_way + 1, asked + 1
            continue
        await receive_pong(carrier, ping.wanted)
        under_way, answered = under_way - 1, answered + 1
        window = min(window + 1, LAST_WINDOW)
        if answered == 1:
            first = clock()
    # The first answer comes after the latency of the line: what counts is how fast the others follow.
    seconds, count = (clock() - first, answered - 1) if answered > FIRST_WINDOW else (clock() - began, answered)
    return count * size / max(seconds, 1e-6)


async def receive_pong(carrier: Carrier, size: int) -> None:
    """The next pong, which must have a content of so many bytes. Raises LinkLost, ProtocolViolation."""
    try:
        async with asyncio.timeout(ANSWER_DEADLINE):
            pong = await carrier.receive()
    except TimeoutError:
        raise LinkLost(f"answered no ping within {ANSWER_DEADLINE:.0f} s") from None
    if pong.refused:
        raise LinkLost(in_words(pong.refused))
    if len(pong.content) != size:
        raise LinkLost(f"answered a ping with {len(pong.content)} bytes where {size} were asked for")


def answer_to(ping: pb.Ping) -> pb.Pong:
    """The pong to a ping that was checked."""
    return pb.Pong(content=(_CONTENT * -(-MAX_CONTENT // PIECE))[: ping.wanted])
