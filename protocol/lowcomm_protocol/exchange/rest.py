"""How long a node waits between two copies of a state against drift. Pure.

A copy is the whole model. If one does not help, the next hardly does, and a peer that makes others
copy repeatedly wastes their bandwidth: so each copy of the last day doubles the wait.
"""

from collections import deque

FIRST = 10.0
"""Seconds after the first copy, in which exchanges show whether it has helped."""
SHARE = 4.0
"""The wait in durations of the copy, if that is longer: at most a fifth of the time goes into
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
        """A copy that took ``took`` seconds is done."""
        doublings = sum(now - before < REMEMBERED for before in self._copies)
        self._copies.append(now)
        self._until = now + min(LONGEST, max(FIRST, SHARE * took) * 2**doublings)

    def left(self, now: float) -> float:
        """Seconds until the next copy may begin."""
        return max(0.0, self._until - now)
