"""The owner's limits on the link, and whose turn it is to send contents.

The limits are one token bucket per direction, shared by all streams. Counted are contents: the
chunks of exchanges and of state for joiners, over both routes. Messages without contents, framing,
encryption and the DHT are not counted (docs/node.md has figures).

    up     the sender waits before each piece; pieces are small, so a slow link is used evenly
    down   the receiver pays before it reads on. gRPC buffers some bytes ahead of the reader: one
           window and the message being read. That much of a content is paid for in advance
           (``Arrival``), and ``flow_options`` keep the window small

Contents go out one at a time while one of them fills the line: two at once would both come late.
The line is full while what goes out moves about as fast as the faster recent contents. A content
that stalls, or goes to a peer whose line is slower than ours, holds up nobody.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import exp
from statistics import quantiles
from time import monotonic
from typing import Any

LEAST_PIECE, FIRST_PIECE = 16 * 1024, 64 * 1024
QUICK, SLOW = 0.05, 0.15
"""Seconds: pieces that went out sooner are followed by larger ones, those that took longer by
smaller ones, so that an offer meanwhile waits for few of them."""
BUFFERED = 512 * 1024
"""Bytes of a content that buffers of the path may take at once: their time shows no rate."""
MEASURED = 256 * 1024
"""Bytes after these whose time shows a rate."""
SMALL = 64 * 1024
"""A content of at most this many bytes waits for no turn: it takes the line for a moment only."""
STALLED = 3.0
"""Seconds without a piece after which a content does not hold up others."""
UNTOLD, FIRST = 10.0, 60.0
"""Seconds for which a content may hold up others before its own rate is known, and before that of
our line is: a peer that reads a little now and then must not keep our line for itself."""
FULL = 0.6
"""Share of the best rate from which on the line counts as full."""
LOOK = 0.25
"""Seconds between two looks at whether those before us move."""


class Turn:
    """One content that goes out."""

    def __init__(self, turns: "Turns", now: float) -> None:
        self._turns = turns
        self._sent = 0
        self._counted = 0
        self._began = self._since = self._moved = now
        self.alone = True
        """Whether no other has gone out beside it."""

    def sent(self, count: int) -> None:
        """Count bytes that went out."""
        now = self._turns.clock()
        took, self._moved = now - self._moved, now
        self._sent += count
        if self._sent <= BUFFERED:
            self._since = now
        else:
            self._turns.learn_piece(took)
            self._counted += count

    def moves(self, now: float, most: float = float("inf")) -> bool:
        """Whether a piece went out recently, and it began less than ``most`` seconds ago."""
        return now - self._moved < STALLED and now - self._began < most

    def rate(self, now: float) -> float | None:
        """Bytes a second; None while too little went out to tell."""
        seconds = now - self._since
        return self._counted / seconds if self._counted >= MEASURED and seconds > 0 else None


class Turns:
    """Whose turn it is, first come first served."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.piece = FIRST_PIECE
        """Bytes to send at a time."""
        self._going: list[Turn] = []
        self._waiting: deque[asyncio.Event] = deque()
        self._rates: deque[float] = deque(maxlen=16)
        """Of the last contents that went out alone."""

    @asynccontextmanager
    async def take(self, size: int, given_up: asyncio.Event) -> AsyncGenerator[Turn]:
        """Wait for the turn of a content of ``size`` bytes; it lasts as long as the context. Nobody
        waits who has given up."""
        if size > SMALL:
            await self._wait(given_up)
        turn = Turn(self, self.clock())
        self._going.append(turn)
        if len(self._going) > 1:
            for one in self._going:
                one.alone = False
        try:
            yield turn
        finally:
            self._going.remove(turn)
            rate = turn.rate(self.clock())
            if turn.alone and rate is not None:
                self._rates.append(rate)
            if self._waiting:
                self._waiting[0].set()

    async def _wait(self, given_up: asyncio.Event) -> None:
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            while not given_up.is_set() and (self._waiting[0] is not mine or self._is_full()):
                mine.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await mine.wait()
        finally:
            self._waiting.remove(mine)

    def learn_piece(self, seconds: float) -> None:
        """Take in how long the last piece took."""
        if seconds < QUICK:
            self.piece = min(2 * self.piece, 1 << 30)
        elif seconds > SLOW:
            self.piece = max(self.piece // 2, LEAST_PIECE)

    def _is_full(self) -> bool:
        now = self.clock()
        if not self._rates:
            return any(turn.moves(now, FIRST) for turn in self._going)
        moving = [(turn, turn.rate(now)) for turn in self._going if turn.moves(now)]
        if any(rate is None and turn.moves(now, UNTOLD) for turn, rate in moving):
            return True
        # Our line carries the upper quartile of recent rates, since the best content may have gone
        # out through a buffer that was empty.
        rates = list(self._rates)
        line = quantiles(rates, n=4, method="inclusive")[-1] if len(rates) > 1 else rates[0]
        return sum(rate or 0.0 for _, rate in moving) >= FULL * line


PIECE_SECONDS = 0.1
"""A piece takes about this long at the allowed rate."""
CREDIT_SECONDS = 0.2
"""The bucket allows a burst of this length, so that a busy machine still reaches its full rate."""
LEAST_WINDOW, MOST_WINDOW = 16 * 1024, 1024 * 1024
WINDOW_SECONDS = 1 / 16
"""A window holds about this many seconds of traffic. Together with the message being read, that
covers a round trip of the same length."""
QUIET, TRICKLE = 0.5, 2.0
"""Seconds without bytes of an exchange after which text goes on; and in which one small piece of it
passes meanwhile, so that nobody takes its sender for dead."""
USE_SECONDS = 5.0
"""Rates shown to the owner are averages over about this many seconds."""
FREE_WINDOW = 2 * 1024 * 1024
"""The window without a limit: the bytes under way at 335 Mbit/s and 50 ms.

gRPC's own window begins at 64 KiB and grows by measuring. That takes longer than an exchange, and
has no upper bound where nobody reads: 50 MiB per call were seen."""


class Use:
    """Moving average of a rate: weights fall by e in USE_SECONDS."""

    def __init__(self) -> None:
        self._bytes = self._at = 0.0

    def add(self, count: int, now: float) -> None:
        """Count bytes that have just passed."""
        self._bytes, self._at = self._left(now) + count, now

    def rate(self, now: float) -> float:
        """Bytes a second."""
        return self._left(now) / USE_SECONDS

    def _left(self, now: float) -> float:
        return self._bytes * exp((self._at - now) / USE_SECONDS)


class BandwidthLimit:
    """A token bucket for one direction of the link."""

    def __init__(self, rate: float | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.rate = rate
        """Allowed bytes a second; None: unlimited."""
        self._free = float("-inf")
        """Time at which everything taken so far is paid for."""
        self._clock = clock
        self._use = Use()
        self._changed = asyncio.Event()
        self._exchanged = float("-inf")
        """When bytes of an exchange have passed last."""
        self.total = 0
        """Bytes of contents so far."""

    @property
    def used(self) -> float:
        """Recent bytes a second."""
        return self._use.rate(self._clock())

    @property
    def debt(self) -> float:
        """Seconds for which earlier requests occupy the link."""
        return max(0.0, self._free - self._clock())

    @property
    def is_busy(self) -> bool:
        """Whether an exchange uses the link."""
        return self._clock() - self._exchanged < QUIET

    def exchanged(self) -> None:
        """Bytes of an exchange pass, or are about to."""
        self._exchanged = self._clock()

    async def give_way(self) -> None:
        """Wait until no exchange uses the link, at most `TRICKLE` seconds."""
        end = self._clock() + TRICKLE
        while self.is_busy and (now := self._clock()) < end:  # noqa: ASYNC110
            await asyncio.sleep(min(self._exchanged + QUIET, end) - now)

    def allow(self, rate: float | None) -> None:
        """Set another rate. Callers that wait now go on at once; later ones are bound by it."""
        self.rate, self._free = rate, float("-inf")
        self._changed.set()
        self._changed = asyncio.Event()

    def piece(self, largest: int) -> int:
        """The most bytes to pass at a time."""
        if self.rate is None:
            return largest
        return min(largest, max(LEAST_PIECE, int(self.rate * PIECE_SECONDS)))

    async def pass_(self, count: int) -> None:
        """Wait until ``count`` bytes may go, first come first served. Zero bytes never wait."""
        if count:
            await self._wait(self.take(count)[0])
            self.count(count)

    async def pay(self, count: int) -> None:
        """Wait until ``count`` bytes to come are paid for, first come first served."""
        if count:
            await self._wait(self.take(count)[1])

    def take(self, count: int) -> tuple[float, float]:
        """Take bytes, for which later callers wait longer. Returns the seconds until they may begin
        to go, and the seconds until they are paid for."""
        if self.rate is None:
            return 0.0, 0.0
        now = self._clock()
        begins = max(now - CREDIT_SECONDS, self._free)
        self._free = begins + count / self.rate
        return max(0.0, begins - now), max(0.0, self._free - now)

    def count(self, count: int) -> None:
        """Count bytes that have passed."""
        self.total += count
        self._use.add(count, self._clock())

    async def _wait(self, seconds: float) -> None:
        if seconds > 0.0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()


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
            self._limit.take(-self._ahead)
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
