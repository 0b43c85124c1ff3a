"""Rest of the trainer, as its owner wants it."""

from collections.abc import Callable
from time import monotonic, sleep

LEAST_REST = 0.005
"""Seconds; shorter rests add up first, as no timer keeps them."""
MOST_CREDIT = 1.0
"""Seconds that a rest which took too long shortens later ones."""


class Duty:
    """Rests so that computing takes a share of the time."""

    def __init__(
        self,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        """``wait``: waits for a device that computes beside this thread."""
        self.share = 1.0
        """Of the time, above 0; 1 never rests."""
        self.wait, self.clock, self.sleep = wait, clock, sleep
        self._began = self._due = self._rested = 0.0

    def begin(self) -> None:
        """Take in that computing begins."""
        self._began = self.clock()

    def rest(self) -> None:
        """Rest for what was computed since ``begin`` or the last rest."""
        if self.share >= 1:
            return
        self.wait()
        now = self.clock()
        self._due += (now - self._began) * (1 / self.share - 1)
        if self._due >= LEAST_REST:
            self.sleep(self._due)
        self._began = self.clock()
        rested = self._began - now
        self._due = max(-MOST_CREDIT, self._due - rested)
        self._rested += rested

    def take_rested(self) -> float:
        """Seconds of rest since the last call."""
        rested, self._rested = self._rested, 0.0
        return rested
