"""The queue of joiners: a few are served at once, the others wait and know their position.

Identities are free, so joiners are ordered by address, not by peer id (fair queueing):

    order     one joiner of each address before a second of any; then by arrival
    full      the last in that order is evicted, possibly the newcomer itself
    slow      while others wait, a joiner that takes less than LEAST bytes in WINDOW s is evicted
    long      while others wait, a turn ends after ``turn_seconds``, the slowest first
    idle      an address whose joiner took next to nothing comes last for a while

An evicted joiner loses nothing: it may return, and keeps what it has.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from lowcomm_node.errors import RetryLater
from lowcomm_node.system.quota import prefixes_of

WINDOW, LEAST = 10.0, 160_000
"""Bytes that a served joiner must take per window of its own time while others wait: 16 kB/s, twice
the least ``--max-down``. Our own time (bandwidth limit, disk, making a snapshot) does not count."""
IDLE = 2_000.0
"""Bytes a second over a turn. A joiner below that gives its address a bad name."""
BAD_NAME = 600.0
"""Seconds for which a bad name lasts."""
MAX_BAD_NAMES = 4096
PREFIX_WEIGHT = 4
"""Joiners of one /24 (IPv4) or /48 (IPv6) that weigh as much as one of a single address."""
LOOK_EVERY = 1.0
"""Seconds between two checks, while others wait, whether a served joiner must go."""


class Turn:
    """One peer's place in the queue. Position 0: it is being served."""

    def __init__(self, turns: "TurnQueue", peer: str, place: str) -> None:
        self.peer = peer
        self.place = place
        self.lost = ""
        """Why its task was cancelled, if it was evicted."""
        self.began: float | None = None
        """When it was first served."""
        self.taken = 0
        """Bytes."""
        self._queue = turns
        self._clock = turns.clock
        self._task = asyncio.current_task()
        self._moved = asyncio.Event()
        self._ours = 0.0
        self._ours_since: float | None = None
        self._window = (0.0, 0)
        """Start of the current window: seconds of its own time, bytes."""

    @property
    def position(self) -> int:
        """Its place among those that wait, from 1; 0 while it is served."""
        return self._queue.position(self)

    async def wait_served(self) -> AsyncIterator[int]:
        """Its position, at once and whenever it falls, until it is served."""
        told = 0
        while True:
            self._moved.clear()
            position = self.position
            if not position:
                return
            # It may grow when a joiner of another address comes; that is not reported.
            if not told or position < told:
                told = position
                yield position
                continue
            self._queue.press()
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._moved.wait()
            except TimeoutError:
                continue

    def took(self, count: int) -> None:
        """Count bytes that it has taken."""
        self.taken += count

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Context in which it waits for us."""
        self._ours_since = began = self._clock()
        try:
            yield
        finally:
            self._ours += self._clock() - began
            self._ours_since = None

    def own_seconds(self) -> float:
        """Seconds of being served, less those in which it waited for us."""
        if self.began is None:
            return 0.0
        now = self._clock()
        waiting = now - self._ours_since if self._ours_since is not None else 0.0
        return now - self.began - self._ours - waiting

    def is_slow(self) -> bool:
        """Whether it took too little over the last complete window."""
        seconds, (since, before) = self.own_seconds(), self._window
        if seconds - since < WINDOW:
            return False
        slow = self.taken - before < LEAST * (seconds - since) / WINDOW
        self._window = (seconds, self.taken)
        return slow

    def rate(self) -> float:
        """Bytes a second over its turn."""
        return self.taken / max(self.own_seconds(), 0.1)

    def leave(self) -> None:
        """Leave the queue; those behind it move up."""
        self._queue.leave(self)

    def begin(self) -> None:
        """It is served from now on."""
        self.began = self._clock()
        self._moved.set()

    def go_on_from(self, former: "Turn") -> None:
        """Inherit the former turn of the same peer: coming again makes no turn longer."""
        self.began = former.began
        self.taken = former.taken
        self._ours = former._ours
        self._window = former._window

    def moved(self) -> None:
        """Its position may have changed."""
        self._moved.set()

    def give_way(self, reason: str = "") -> None:
        """Cancel its task: the same peer has come again, or, with a reason, it is evicted."""
        self.lost = reason
        if self._task is not None:
            self._task.cancel()


class TurnQueue:
    """One place per peer. A peer that returns after a broken stream gets its former place."""

    def __init__(
        self,
        served: int,
        waiting: int,
        turn_seconds: float = 600.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.served = served
        self.waiting = waiting
        self.turn_seconds = turn_seconds
        self.clock = clock
        self._serving: list[Turn] = []
        self._queued: list[Turn] = []
        """Waiting turns, in the order of arrival."""
        self._bad_names: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Turns served or waiting."""
        return len(self._serving) + len(self._queued)

    @property
    def busy(self) -> int:
        """Turns being served."""
        return len(self._serving)

    def enter(self, peer: str, place: str = "") -> Turn:
        """Queue the current task; ``place``: the address that it comes from.

        Raises RetryLater if the queue is full.
        """
        turn = Turn(self, peer, place)
        for held in (self._serving, self._queued):
            former = next((one for one in held if one.peer == peer), None)
            if former is not None:
                held[held.index(former)] = turn
                turn.go_on_from(former)
                former.give_way()
                return turn
        self._queued.append(turn)
        self._advance()
        if len(self._queued) > self.waiting:
            last = self._order()[-1]
            self._queued.remove(last)
            if last is turn:
                raise RetryLater(
                    f"{len(self)} joiners are served or wait here: ask another peer, or later."
                )
            last.give_way(
                "Your place is given to a joiner from another address: ask another peer, or later."
            )
            self._tell_moved()
        return turn

    def position(self, turn: Turn) -> int:
        """See Turn."""
        return self._order().index(turn) + 1 if turn in self._queued else 0

    def leave(self, turn: Turn) -> None:
        """See Turn."""
        for held in (self._serving, self._queued):
            if turn in held:  # unless another stream of the same peer has its place
                held.remove(turn)
        self._advance()
        self._tell_moved()

    def press(self) -> None:
        """While others wait: end the turn of a joiner that is slow, or has had enough."""
        if not self._queued or len(self._serving) < self.served:
            return
        slow = [turn for turn in self._serving if turn.is_slow()]
        now = self.clock()
        done = [
            turn
            for turn in self._serving
            if turn.began is not None and now - turn.began > self.turn_seconds
        ]
        over = slow or sorted(done, key=Turn.rate)[:1]
        for turn in over:
            if turn.rate() < IDLE:
                self._give_bad_name(turn.place)
            self._serving.remove(turn)
            turn.give_way("Your turn is over, and others wait: come again.")
        if over:
            self._advance()
            self._tell_moved()

    def _advance(self) -> None:
        while self._queued and len(self._serving) < self.served:
            turn = self._order()[0]
            self._queued.remove(turn)
            self._serving.append(turn)
            turn.begin()

    def _tell_moved(self) -> None:
        for turn in self._queued:
            turn.moved()

    def _order(self) -> list[Turn]:
        """The waiting turns, in the order in which they will be served."""
        held = Counter(prefix for turn in self._serving for prefix in prefixes_of(turn.place))
        ranks: dict[Turn, tuple[bool, float, int]] = {}
        for number, turn in enumerate(self._queued):
            prefixes = prefixes_of(turn.place)
            load = max(held[prefixes[0]], held[prefixes[-1]] / PREFIX_WEIGHT)
            ranks[turn] = (self._has_bad_name(prefixes[0]), load, number)
            held.update(prefixes)
        return sorted(self._queued, key=lambda turn: ranks[turn])

    def _give_bad_name(self, place: str) -> None:
        address = prefixes_of(place)[0]
        self._bad_names[address] = self.clock() + BAD_NAME
        self._bad_names.move_to_end(address)
        if len(self._bad_names) > MAX_BAD_NAMES:
            self._bad_names.popitem(last=False)

    def _has_bad_name(self, address: str) -> bool:
        return self._bad_names.get(address, 0.0) > self.clock()
