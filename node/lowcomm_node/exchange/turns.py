"""Whose turn it is: a few are served at once, the others wait in the order in which they came, and know their position."""

import asyncio
from collections.abc import AsyncIterator

from lowcomm_node.errors import RetryLater


class Turn:
    """One peer's place. Position 0: it is being served."""

    def __init__(self, turns: "Turns", peer: str) -> None:
        self.peer = peer
        self._turns = turns
        self._task = asyncio.current_task()
        self._moved = asyncio.Event()

    @property
    def position(self) -> int:
        """How many are served before it, itself included; 0 while it is served."""
        return self._turns.position(self)

    async def wait_served(self) -> AsyncIterator[int]:
        """Its position, at once and whenever it has changed, until it is served."""
        told = 0
        while True:
            self._moved.clear()
            position = self.position
            if not position:
                return
            if position != told:
                told = position
                yield position
            await self._moved.wait()

    def leave(self) -> None:
        """Make room; those behind it move up."""
        self._turns.leave(self)

    def moved(self) -> None:
        """Its position may be another."""
        self._moved.set()

    def give_way(self) -> None:
        """The same peer has come again: whoever serves this one is cancelled."""
        if self._task is not None:
            self._task.cancel()


class Turns:
    """One place a peer. Who comes again, because its stream broke, takes the place that it had."""

    def __init__(self, served: int, waiting: int) -> None:
        self.served, self.waiting = served, waiting
        self._line: list[Turn] = []

    def __len__(self) -> int:
        """How many are there, served or waiting."""
        return len(self._line)

    @property
    def busy(self) -> int:
        """How many are served."""
        return min(self.served, len(self._line))

    def enter(self, peer: str) -> Turn:
        """Stand in line, for the task that asks. Raises RetryLater if it is full."""
        turn = Turn(self, peer)
        former = next((one for one in self._line if one.peer == peer), None)
        if former is not None:
            self._line[self._line.index(former)] = turn
            former.give_way()
        elif len(self._line) >= self.served + self.waiting:
            raise RetryLater(f"{len(self._line)} joiners are served or wait here: ask another peer, or later.")
        else:
            self._line.append(turn)
        return turn

    def position(self, turn: Turn) -> int:
        """See Turn."""
        return max(0, self._line.index(turn) + 1 - self.served)

    def leave(self, turn: Turn) -> None:
        """See Turn."""
        if turn in self._line:  # unless another stream of the same peer has its place
            self._line.remove(turn)
            for other in self._line:
                other.moved()
