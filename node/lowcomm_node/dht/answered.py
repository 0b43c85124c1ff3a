"""Peers that have proved recently to be there."""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

LASTS = 3600.0
"""Seconds for which an answer counts: the longest life of a record."""
MAX_ANSWERED = 8192


class Answered:
    """The newest answers, bounded in number."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, peer_id: str) -> None:
        """A peer has answered, or has called and authenticated."""
        self._at[peer_id] = self._clock()
        self._at.move_to_end(peer_id)
        if len(self._at) > MAX_ANSWERED:
            self._at.popitem(last=False)

    def __contains__(self, peer_id: str) -> bool:
        return self._clock() < self._at.get(peer_id, float("-inf")) + LASTS
