"""How much of its link a node may use, as its owner says: one bucket for each direction, over all streams together.

Payload is counted, in pieces small enough that a slow link is used evenly; framing and encryption add about one percent.
Whoever sends waits before a piece goes out. Whoever receives waits before it reads on, and flow control tells the sender.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

SHORTEST_PIECE = 16 * 1024
PIECE_SECONDS = 0.1
"""A piece takes about so long at the allowed rate."""


class TokenBucket:
    """Tells how long to wait so that a rate is kept; no clock of its own."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        """Bytes a second; None: as many as come."""
        self._free = 0.0
        """When all that was taken is paid for."""

    def take(self, count: int, now: float) -> float:
        """Take ``count`` bytes at time ``now``; the seconds to wait before they may go."""
        if self.rate is None:
            self._free = now
            return 0.0
        # What was not used does not add up: an idle link does not allow a burst afterwards.
        begins = max(now, self._free)
        self._free = begins + count / self.rate
        return begins - now


class Throttle:
    """One direction of the link."""

    def __init__(self, rate: float | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._bucket, self._clock = TokenBucket(rate), clock
        self._changed = asyncio.Event()
        self.total = 0
        """Payload bytes so far."""

    @property
    def rate(self) -> float | None:
        """Bytes a second that are allowed; None: as many as come."""
        return self._bucket.rate

    def allow(self, rate: float | None) -> None:
        """Set another rate; whoever waits now goes on at once, and what comes after is bound by it."""
        self._bucket = TokenBucket(rate)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def piece(self, largest: int) -> int:
        """How many bytes to pass at a time, at most."""
        rate = self._bucket.rate
        return largest if rate is None else min(largest, max(SHORTEST_PIECE, int(rate * PIECE_SECONDS)))

    async def pass_(self, count: int) -> None:
        """Wait until ``count`` bytes may pass, in the order of asking."""
        self.total += count
        seconds = self._bucket.take(count, self._clock())
        if seconds > 0.0:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return


@dataclass(frozen=True)
class Bandwidth:
    """Both directions of a node's link."""

    up: Throttle = field(default_factory=Throttle)
    down: Throttle = field(default_factory=Throttle)
