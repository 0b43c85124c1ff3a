"""How long a node that has copied a state to get back to the others waits before it copies another
one. Pure.

A copy is the whole model. Where it does not help, the next one hardly does, and whoever makes a
node copy again and again wastes its line: so each copy of the last day doubles the wait for the
next.
"""

from collections import deque

FIRST = 10.0
"""Seconds after the first copy: exchanges show meanwhile whether it has helped."""
SHARE = 4.0
"""Times as long as the copy took, where that is longer: so at most a fifth of the time goes into
copies."""
LONGEST = 3600.0
"""Seconds that a rest lasts at most."""
REMEMBERED = 24 * 3600.0
"""Seconds for which a copy counts."""
MOST = 16


class Rest:
    """The rest after copies; times are seconds of one clock."""

    def __init__(self) -> None:
        self._copies: deque[float] = deque(maxlen=MOST)
        self._until = float("-inf")

    def copied(self, took: float, now: float) -> None:
        """A copy that took so many seconds is done."""
        doublings = sum(now - before < REMEMBERED for before in self._copies)
        self._copies.append(now)
        self._until = now + min(LONGEST, max(FIRST, SHARE * took) * 2**doublings)

    def left(self, now: float) -> float:
        """Seconds until the next copy may begin."""
        return max(0.0, self._until - now)
