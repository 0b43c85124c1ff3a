"""The fair queue of a giver: a few peers are served at once, the others wait.

Identities are free, so places are shared by address, not by peer id:

    enter     an address may hold half of the places at most, its network two thirds
    order     one peer of each address before a second of any; then by arrival
    turns     while others wait, a turn ends after some time, the longest first

A peer that loses its turn may enter again, and keeps what it has. It has one place for each kind of
content, so that it can fetch text and a state at once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from math import inf
from time import monotonic

from lowcomm_node.errors import RetryLater
from lowcomm_node.system.quota import OF_FEW, Shares, prefixes_of

MOST_SERVED = 2  # peers served at once
MOST_WAITING = 30  # peers that may wait for their turn
TURN_SECONDS = 60.0  # length of a turn while others wait, from when its content is open
NETWORK_WEIGHT = 4
"""Peers of one /24 (IPv4) or /48 (IPv6) that weigh as much as one of a single address."""
LOOK_SECONDS = 1.0  # between two looks, while others wait, whether a served peer must go


class GivingTurn:
    """A peer's place in the queue."""

    def __init__(self, peer: str, kind: str, place: str) -> None:
        self.peer = peer
        self.kind = kind
        self.place = place
        self.began: float | None = None
        """When it was first served; infinity while its content is being prepared."""
        self._over = asyncio.Event()
        self._reason = ""

    async def wait_over(self) -> None:
        """Raise RetryLater with the reason as soon as the turn is over."""
        await self._over.wait()
        raise RetryLater(self._reason)

    def end(self, reason: str) -> None:
        """Have its stream end."""
        self._reason = reason
        self._over.set()


class TurnQueue:
    """Has one place a peer and kind of content, which a peer finds again after a broken stream."""

    def __init__(
        self,
        served: int = MOST_SERVED,
        waiting: int = MOST_WAITING,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._served = served
        self._places = served + waiting
        self._shares = Shares(OF_FEW)
        self._turns: list[GivingTurn] = []
        """In the order of arrival; those that have begun are served."""
        self._moved = asyncio.Event()

    @property
    def serving(self) -> int:
        """Turns that are served."""
        return sum(turn.began is not None for turn in self._turns)

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._turns) - self.serving

    def enter(self, peer: str, kind: str, place: str) -> GivingTurn:
        """Take a place; ``kind``: of the content; ``place``: the address that the peer comes from.

        Raises RetryLater if there is none for that address.
        """
        turn, taken = GivingTurn(peer, kind, place), len(self._turns)
        for number, former in enumerate(self._turns):
            if (former.peer, former.kind) == (peer, kind):  # entering again makes no turn longer
                turn.place, turn.began = former.place, former.began
                self._turns[number] = turn
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

    async def wait_served(self, turn: GivingTurn) -> AsyncIterator[int]:
        """Its position, at once and whenever it falls, until it is served."""
        last = self._places + 1
        while position := self.position(turn):
            # It may grow when a peer of another address enters; that is not reported.
            if position < last:
                last = position
                yield position
            self.press()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._moved.wait()

    def leave(self, turn: GivingTurn) -> None:
        """Free a place, unless another stream of the same peer has it."""
        if turn in self._turns:
            self._turns.remove(turn)
            self._shares.give_back(turn.place)
            self._advance()

    def begin(self, turn: GivingTurn) -> None:
        """The content of a served turn is open: its time runs."""
        turn.began = min(self._clock(), turn.began or inf)

    def press(self) -> None:
        """While others wait: end the longest turn, if it has lasted long enough."""
        began = [(turn.began, turn) for turn in self._turns if turn.began is not None]
        since, turn = min(began, key=lambda item: item[0], default=(inf, None))
        if turn is not None and self.waiting and self._clock() - since > TURN_SECONDS:
            turn.end("Your turn is over, and others wait: come again.")
            self.leave(turn)

    def _advance(self) -> None:
        while self.waiting and self.serving < self._served:
            self._order()[0].began = inf
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
