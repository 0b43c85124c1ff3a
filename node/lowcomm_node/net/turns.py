"""Contents go out one at a time while one of them fills the line: two at once would both come late.

The line is full while what goes out moves about as fast as the faster contents of late. A content
that stalls, or goes to a peer whose line is slower than ours, holds up nobody.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from statistics import quantiles
from time import monotonic

LEAST_PIECE, FIRST_PIECE = 16 * 1024, 64 * 1024
QUICK, SLOW = 0.05, 0.15
"""Seconds: pieces that went out sooner are followed by larger ones, those that took longer by
smaller ones. What is told meanwhile, such as an offer, waits for no more than a few of them."""
BUFFERED = 512 * 1024
"""Bytes of a content that buffers of the path may take at once: their time tells nothing."""
MEASURED = 256 * 1024
"""Bytes after these whose time tells a rate."""
SMALL = 64 * 1024
"""A content of at most so many bytes waits for no turn: what comes again ends an exchange that has
waited for all else, and takes the line for a moment only."""
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

    def piece(self, most: int) -> int:
        """How many bytes to send next, of ``most``."""
        return min(most, self._turns.piece)

    def sent(self, count: int) -> None:
        """Take in that so many bytes went out."""
        now = self._turns.clock()
        took, self._moved = now - self._moved, now
        self._sent += count
        if self._sent <= BUFFERED:
            self._since = now
        else:
            self._turns.learn_piece(took)
            self._counted += count

    def moves(self, now: float) -> bool:
        """Whether a piece went out of late."""
        return now - self._moved < STALLED

    def age(self, now: float) -> float:
        """Seconds since it began."""
        return now - self._began

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
        moving = [turn for turn in self._going if turn.moves(now)]
        if not self._rates:
            return any(turn.age(now) < FIRST for turn in moving)
        rates = [turn.rate(now) for turn in moving]
        if any(
            rate is None and turn.age(now) < UNTOLD
            for turn, rate in zip(moving, rates, strict=True)
        ):
            return True
        return sum(rate or 0.0 for rate in rates) >= FULL * self._line

    @property
    def _line(self) -> float:
        """Bytes a second that our line carries: the upper quartile of late. The best one may have
        gone out through a buffer that was empty."""
        rates = list(self._rates)
        return quantiles(rates, n=4, method="inclusive")[-1] if len(rates) > 1 else rates[0]
