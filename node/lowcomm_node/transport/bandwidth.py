"""How much of its link a node may use, as its owner says: one bucket for each direction, over all
streams together.

Contents are counted: the chunks of exchanges and of state for joiners, over both routes. Not
counted is what goes around them (docs/limits.md has figures): messages without contents, framing,
encryption, and the DHT.

    up     whoever sends waits before a piece goes out; pieces are small enough that a slow link is used evenly
    down   whoever receives pays before it reads on. gRPC takes in some bytes ahead of it: a window, and the message that is
           being read. So that much of a content is paid for first (``Arrival``), and ``flow_options`` keep the window
           small
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

SHORTEST_PIECE = 16 * 1024
PIECE_SECONDS = 0.1
"""A piece takes about so long at the allowed rate."""
CREDIT_SECONDS = 0.2
"""What was not used adds up to so much, or a machine that is busy for a moment would lose that
moment of its link."""
LEAST_WINDOW, MOST_WINDOW = 16 * 1024, 1024 * 1024
WINDOW_SECONDS = 1 / 16
"""A window is about what comes in so many seconds: with the message that is being read, enough for
a round trip of that."""
USE_SECONDS = 5.0
"""Over so long a rate is measured that is shown."""
_BIN = 0.25
FREE_WINDOW = 2 * 1024 * 1024
"""The window where nothing is limited: as much as 335 Mbit/s and 50 ms have under way. gRPC's own
begins with 64 KiB and grows by measuring: that takes longer than an exchange, and has no end where
nobody reads (50 MiB a call were seen)."""


class TokenBucket:
    """Tells how long to wait so that a rate is kept; no clock of its own."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        """Bytes a second; None: as many as come."""
        self._free = float("-inf")
        """When all that was taken is paid for."""

    def take(self, count: int, now: float) -> tuple[float, float]:
        """Take ``count`` bytes at time ``now``; the seconds until they may begin to go, and until
        they are paid for."""
        if self.rate is None:
            return 0.0, 0.0
        begins = max(now - CREDIT_SECONDS, self._free)
        self._free = begins + count / self.rate
        return max(0.0, begins - now), max(0.0, self._free - now)

    def debt(self, now: float) -> float:
        """Seconds until all that was taken is paid for."""
        return max(0.0, self._free - now)


class Use:
    """How many bytes have passed of late."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """So many have passed now."""
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
        """Bytes a second that are allowed; None: as many as come."""
        return self._bucket.rate

    @property
    def used(self) -> float:
        """Bytes a second of late."""
        return self._use.rate(self._clock())

    @property
    def debt(self) -> float:
        """Seconds for which the link is taken by what was asked for so far."""
        return self._bucket.debt(self._clock())

    def allow(self, rate: float | None) -> None:
        """Set another rate; whoever waits now goes on at once, and what comes after is bound by
        it."""
        self._bucket = TokenBucket(rate)
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    def piece(self, largest: int) -> int:
        """How many bytes to pass at a time, at most."""
        rate = self._bucket.rate
        return largest if rate is None else min(largest, max(SHORTEST_PIECE, int(rate * PIECE_SECONDS)))

    async def pass_(self, count: int) -> None:
        """Wait until ``count`` bytes may go, in the order of asking; what carries none need not
        wait."""
        if not count:
            return
        await self._wait(self._bucket.take(count, self._clock())[0])
        self.count(count)

    async def pay(self, count: int) -> None:
        """Wait until ``count`` bytes that will come are paid for, in the order of asking; nothing
        costs nothing."""
        if not count:
            return
        await self._wait(self._bucket.take(count, self._clock())[1])

    def owe(self, count: int) -> None:
        """Take bytes that have come unasked: others pay for them by waiting longer."""
        self._bucket.take(count, self._clock())

    def count(self, count: int) -> None:
        """So many bytes have passed."""
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

    def seconds(self, size: int, streams: int) -> float:
        """How long ``size`` bytes each way take, where so many others share the link; 0 where
        nothing is limited."""
        rates = [limit.rate for limit in (self.up, self.down) if limit.rate is not None]
        return size * streams / min(rates) if rates else 0.0


class Arrival:
    """Pays for one content of ``size`` bytes before it comes in, as far ahead as gRPC takes it
    in."""

    def __init__(self, limit: BandwidthLimit, size: int, message: int) -> None:
        """``message``: bytes of one message, at most, as far as is known."""
        self._limit = limit
        self._unpaid = size
        self._message = message
        self._ahead = 0
        """Bytes that are paid for and have not come out yet."""

    async def make_room(self) -> None:
        """Wait until another message may come in; to be called before each read."""
        if not self._unpaid:
            return
        # A window is filled again when half of it is empty, so twice of it may be on its way.
        ahead = 2 * window(self._limit.rate) + self._message
        count = min(self._unpaid, max(0, ahead - self._ahead))
        self._unpaid -= count
        self._ahead += count
        await self._limit.pay(count)

    def took(self, count: int) -> None:
        """So many bytes have come out."""
        self._limit.count(count)
        self._ahead -= count
        if self._ahead < 0:  # the messages are larger than we thought
            self._limit.owe(-self._ahead)
            self._unpaid = max(0, self._unpaid + self._ahead)
            self._ahead = 0


def window(rate: float | None) -> int:
    """Bytes that gRPC may take in of a stream that nobody reads."""
    if rate is None:
        return FREE_WINDOW
    # A power of two: a limit that changes a little needs no new connections.
    return min(MOST_WINDOW, max(LEAST_WINDOW, 1 << int(rate * WINDOW_SECONDS).bit_length() - 1))


def flow_options(rate: float | None) -> tuple[tuple[str, Any], ...]:
    """Options of gRPC for channels and servers where so many bytes a second may come in; None: as
    many as come."""
    return (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window(rate)))


FREE_FLOW = flow_options(None)
