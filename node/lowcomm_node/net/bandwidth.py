"""The owner's limits on the link: one token bucket per direction, shared by all streams.

Counted are contents: the chunks of exchanges and of state for joiners, over both routes. Messages
without contents, framing, encryption and the DHT are not counted (docs/limits.md has figures).

    up     the sender waits before each piece; pieces are small, so a slow link is used evenly
    down   the receiver pays before it reads on. gRPC buffers some bytes ahead of the reader: one
           window and the message being read. That much of a content is paid for in advance
           (``Arrival``), and ``flow_options`` keep the window small
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from lowcomm_node.net.turns import Turns

SHORTEST_PIECE = 16 * 1024
"""Bytes."""
PIECE_SECONDS = 0.1
"""A piece takes about this long at the allowed rate."""
CREDIT_SECONDS = 0.2
"""The bucket allows a burst of this length, so that a busy machine still reaches its full rate."""
LEAST_WINDOW, MOST_WINDOW = 16 * 1024, 1024 * 1024
WINDOW_SECONDS = 1 / 16
"""A window holds about this many seconds of traffic. Together with the message being read, that
covers a round trip of the same length."""
USE_SECONDS = 5.0
"""Rates shown to the owner are averages over this many seconds."""
_BIN = 0.25
FREE_WINDOW = 2 * 1024 * 1024
"""The window without a limit: the bytes under way at 335 Mbit/s and 50 ms.

gRPC's own window begins at 64 KiB and grows by measuring. That takes longer than an exchange, and
has no upper bound where nobody reads: 50 MiB per call were seen."""


class TokenBucket:
    """Computes how long to wait to keep a rate. It has no clock of its own."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        """Bytes a second; None: unlimited."""
        self._free = float("-inf")
        """Time at which everything taken so far is paid for."""

    def take(self, count: int, now: float) -> tuple[float, float]:
        """Take ``count`` bytes at time ``now``.

        Returns the seconds until they may begin to go, and the seconds until they are paid for.
        """
        if self.rate is None:
            return 0.0, 0.0
        begins = max(now - CREDIT_SECONDS, self._free)
        self._free = begins + count / self.rate
        return max(0.0, begins - now), max(0.0, self._free - now)

    def debt(self, now: float) -> float:
        """Seconds until everything taken so far is paid for."""
        return max(0.0, self._free - now)


class Use:
    """A moving average of the rate."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """Count bytes that have just passed."""
        if self._bins and now - self._bins[-1][0] < _BIN:
            since, before = self._bins.pop()
            self._bins.append((since, before + count))
        else:
            self._bins.append((now, count))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Bytes a second over the last USE_SECONDS."""
        self._forget(now)
        return sum(count for _, count in self._bins) / USE_SECONDS

    def _forget(self, now: float) -> None:
        while self._bins and self._bins[0][0] <= now - USE_SECONDS:
            self._bins.popleft()


class BandwidthLimit:
    """One direction of the link."""

    def __init__(self, rate: float | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._bucket = TokenBucket(rate)
        self._clock = clock
        self._use = Use()
        self._changed = asyncio.Event()
        self.total = 0
        """Bytes of contents so far."""

    @property
    def rate(self) -> float | None:
        """Allowed bytes a second; None: unlimited."""
        return self._bucket.rate

    @property
    def used(self) -> float:
        """Bytes a second over the last USE_SECONDS."""
        return self._use.rate(self._clock())

    @property
    def debt(self) -> float:
        """Seconds for which earlier requests occupy the link."""
        return self._bucket.debt(self._clock())

    def allow(self, rate: float | None) -> None:
        """Set another rate. Callers that wait now go on at once; later ones are bound by it."""
        self._bucket = TokenBucket(rate)
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    def piece(self, largest: int) -> int:
        """The most bytes to pass at a time."""
        rate = self._bucket.rate
        return (
            largest
            if rate is None
            else min(largest, max(SHORTEST_PIECE, int(rate * PIECE_SECONDS)))
        )

    async def pass_(self, count: int) -> None:
        """Wait until ``count`` bytes may go, first come first served. Zero bytes never wait."""
        if not count:
            return
        await self._wait(self._bucket.take(count, self._clock())[0])
        self.count(count)

    async def pay(self, count: int) -> None:
        """Wait until ``count`` bytes to come are paid for, first come first served. Zero bytes cost
        nothing."""
        if not count:
            return
        await self._wait(self._bucket.take(count, self._clock())[1])

    def owe(self, count: int) -> None:
        """Take bytes that came unannounced: later callers pay for them by waiting longer."""
        self._bucket.take(count, self._clock())

    def count(self, count: int) -> None:
        """Count bytes that have passed."""
        self.total += count
        self._use.add(count, self._clock())

    async def _wait(self, seconds: float) -> None:
        if seconds <= 0.0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return


@dataclass(frozen=True)
class Bandwidth:
    """Both directions of a node's link."""

    up: BandwidthLimit = field(default_factory=BandwidthLimit)
    down: BandwidthLimit = field(default_factory=BandwidthLimit)
    turns: Turns = field(default_factory=Turns)
    """Of what goes out."""

    def seconds(self, size: int, streams: int) -> float:
        """Seconds that ``size`` bytes each way take with ``streams`` on the link; 0 if nothing is
        limited."""
        rates = [limit.rate for limit in (self.up, self.down) if limit.rate is not None]
        return size * streams / min(rates) if rates else 0.0


class Arrival:
    """Pays for one content of ``size`` bytes ahead of its arrival, as far as gRPC buffers it."""

    def __init__(self, limit: BandwidthLimit, size: int, message: int) -> None:
        """``message``: an upper bound on the bytes of one message, as far as known."""
        self._limit = limit
        self._unpaid = size
        self._message = message
        self._ahead = 0
        """Bytes paid for that have not been read yet."""

    async def make_room(self) -> None:
        """Wait until another message may come in. Call it before each read."""
        if not self._unpaid:
            return
        # gRPC refills a window when half of it is empty, so twice its size may be under way.
        ahead = 2 * window(self._limit.rate) + self._message
        count = min(self._unpaid, max(0, ahead - self._ahead))
        self._unpaid -= count
        self._ahead += count
        await self._limit.pay(count)

    def took(self, count: int) -> None:
        """Count bytes that were read."""
        self._limit.count(count)
        self._ahead -= count
        if self._ahead < 0:  # the messages are larger than we thought
            self._limit.owe(-self._ahead)
            self._unpaid = max(0, self._unpaid + self._ahead)
            self._ahead = 0


def window(rate: float | None) -> int:
    """Bytes that gRPC may buffer of a stream that nobody reads."""
    if rate is None:
        return FREE_WINDOW
    # A power of two: a limit that changes a little needs no new connections.
    return min(MOST_WINDOW, max(LEAST_WINDOW, 1 << int(rate * WINDOW_SECONDS).bit_length() - 1))


def flow_options(rate: float | None) -> tuple[tuple[str, Any], ...]:
    """gRPC options for channels and servers that may receive ``rate`` bytes a second; None:
    unlimited."""
    return (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window(rate)))


FREE_FLOW = flow_options(None)
