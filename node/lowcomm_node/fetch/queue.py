"""The fair queue of a giver: a few peers are served at once, the others wait.

Identities are free, so places are shared by address, not by peer id:

    enter     an address may hold half of the places at most, its network two thirds
    order     one peer of each address before a second of any; then by arrival
    slow      while others wait, a peer that keeps us waiting for too long loses its turn
    long      while others wait, a turn ends after some time, the longest first

A peer that loses its turn may enter again, and keeps what it has.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from lowcomm_node.errors import RetryLater
from lowcomm_node.system.quota import OF_FEW, Shares, prefixes_of

MOST_SERVED = 2
"""Peers served at once."""
MOST_WAITING = 30
"""Peers that may wait for their turn."""
SLOW_SECONDS, SLOW_RATE = 10.0, 16_000.0
"""Seconds for which a served peer may keep us waiting while others wait, and bytes a second that
buy it as much time again: twice the least ``--max-down``."""
TURN_SECONDS = 300.0
"""Length of a turn while others wait."""
NETWORK_WEIGHT = 4
"""Peers of one /24 (IPv4) or /48 (IPv6) that weigh as much as one of a single address."""
LOOK_SECONDS = 1.0
"""Between two looks, while others wait, whether a served peer must go."""


class Patience:
    """Time for which the other end may keep us waiting; the bytes that pass buy it more."""

    def __init__(self, seconds: float, rate: float) -> None:
        """``seconds``: at the beginning and at most; ``rate``: bytes that buy a second."""
        self.left = self.most = seconds
        self._rate = rate

    def waited(self, seconds: float) -> None:
        """The other end has kept us waiting."""
        self.left -= seconds

    def passed(self, count: int) -> None:
        """Bytes have passed."""
        self.left = min(self.most, self.left + count / self._rate)


class GivingTurn:
    """A peer's place in the queue."""

    def __init__(self, turns: "TurnQueue", peer: str, place: str) -> None:
        self.peer = peer
        self.place = place
        self.began: float | None = None
        """When it was first served."""
        self.patience = Patience(SLOW_SECONDS, SLOW_RATE)
        self._turns = turns
        self._waiting_since: float | None = None
        self._over = asyncio.Event()
        self._reason = ""

    async def wait_served(self) -> AsyncIterator[int]:
        """Its position, at once and whenever it falls, until it is served."""
        said = 0
        while position := self._turns.position(self):
            # It may grow when a peer of another address enters; that is not reported.
            if not said or position < said:
                said = position
                yield position
            self._turns.press()
            await self._turns.wait_moved()

    async def wait_over(self) -> None:
        """Raise RetryLater with the reason as soon as the turn is over."""
        await self._over.wait()
        raise RetryLater(self._reason)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which we wait for the peer."""
        self._waiting_since = began = self._turns.clock()
        try:
            yield
        finally:
            self.patience.waited(self._turns.clock() - began)
            self._waiting_since = None

    def is_slow(self, now: float) -> bool:
        """Whether the peer has kept us waiting for too long."""
        waiting = now - self._waiting_since if self._waiting_since is not None else 0.0
        return self.patience.left < waiting

    def end(self, reason: str) -> None:
        """Have its stream end."""
        self._reason = reason
        self._over.set()

    def leave(self) -> None:
        """Free its place."""
        self._turns.leave(self)


class TurnQueue:
    """Has one place a peer. A peer that enters again after a broken stream has its place back."""

    def __init__(
        self,
        served: int = MOST_SERVED,
        waiting: int = MOST_WAITING,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.clock = clock
        self._served = served
        self._places = served + waiting
        self._shares = Shares(OF_FEW)
        self._turns: list[GivingTurn] = []
        """In the order of arrival; those that have begun are served."""
        self._moved = asyncio.Event()

    @property
    def serving(self) -> int:
        """Peers that are served."""
        return sum(turn.began is not None for turn in self._turns)

    @property
    def waiting(self) -> int:
        """Peers that wait."""
        return len(self._turns) - self.serving

    def enter(self, peer: str, place: str) -> GivingTurn:
        """Take a place; ``place``: the address that the peer comes from.

        Raises RetryLater if there is none for that address.
        """
        turn, taken = GivingTurn(self, peer, place), len(self._turns)
        former = next((one for one in self._turns if one.peer == peer), None)
        if former is not None:  # entering again makes no turn longer
            self._turns[self._turns.index(former)] = turn
            turn.place, turn.began, turn.patience = former.place, former.began, former.patience
            former.end("You have come again: your former stream ends.")
            return turn
        if taken >= self._places or not self._shares.has_room(place, self._places - taken):
            raise RetryLater(f"{taken} peers are served or wait here: ask another peer, or later.")
        self._shares.take(place)
        self._turns.append(turn)
        self._advance()
        return turn

    def position(self, turn: GivingTurn) -> int:
        """Its place among those that wait, from 1; 0 while it is served."""
        return 0 if turn.began is not None else self._order().index(turn) + 1

    def leave(self, turn: GivingTurn) -> None:
        """Free a place, unless another stream of the same peer has it."""
        if turn in self._turns:
            self._turns.remove(turn)
            self._shares.give_back(turn.place)
            self._advance()

    def press(self) -> None:
        """While others wait: end the turns of peers that are slow, or have had enough."""
        if not self.waiting or self.serving < self._served:
            return
        now = self.clock()
        began = {turn: turn.began for turn in self._turns if turn.began is not None}
        long = [turn for turn, since in began.items() if now - since > TURN_SECONDS]
        over = [turn for turn in began if turn.is_slow(now)]
        for turn in over or sorted(long, key=lambda turn: began[turn])[:1]:
            turn.end("Your turn is over, and others wait: come again.")
            self.leave(turn)

    async def wait_moved(self) -> None:
        """Wait until positions may have changed, or for a moment."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._moved.wait()
        except TimeoutError:
            return

    def _advance(self) -> None:
        while self.waiting and self.serving < self._served:
            self._order()[0].began = self.clock()
        self._moved.set()
        self._moved = asyncio.Event()

    def _order(self) -> list[GivingTurn]:
        """The waiting turns, in the order in which they will be served."""
        served = [turn.place for turn in self._turns if turn.began is not None]
        held = Counter(prefix for place in served for prefix in prefixes_of(place))
        loads: dict[GivingTurn, float] = {}
        for turn in self._turns:
            if turn.began is None:
                prefixes = prefixes_of(turn.place)
                loads[turn] = max(held[prefixes[0]], held[prefixes[-1]] / NETWORK_WEIGHT)
                held.update(prefixes)
        return sorted(loads, key=lambda turn: loads[turn])
