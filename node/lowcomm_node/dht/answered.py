"""Peers that have answered recently, or have not."""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

LASTS = 3600.0
"""Seconds for which an answer counts: the longest life of a record."""
MAX_ANSWERED = 8192


class Answered:
    """The newest answers, bounded in number."""

    def __init__(self, clock: Callable[[], float] = monotonic, lasts: float = LASTS) -> None:
        self._clock = clock
        self._lasts = lasts
        self._at: OrderedDict[object, float] = OrderedDict()

    def add(self, peer: object) -> None:
        """A peer has answered, or has called and authenticated."""
        self._at[peer] = self._clock()
        self._at.move_to_end(peer)
        if len(self._at) > MAX_ANSWERED:
            self._at.popitem(last=False)

    def __contains__(self, peer: object) -> bool:
        return self._clock() < self._at.get(peer, float("-inf")) + self._lasts


class Silent(Answered):
    """Peers that hivemind avoids, in place of its ``Blacklist``, whose bans would last longer when
    the clock of this machine is set back."""

    def register_failure(self, peer: object) -> None:
        """A peer has not answered."""
        self.add(peer)

    def register_success(self, peer: object) -> None:
        """A peer has answered."""
        self._at.pop(peer, None)
