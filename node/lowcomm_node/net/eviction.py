"""Eviction policy for too many tunnels. No clock: time is an argument."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import TypeVar

MAX_NEW = 16
"""Streams accepted from one peer within a second. Each new session costs a gRPC connection."""
MAX_CALLERS = 1024
"""Peers whose new streams are counted."""

T = TypeVar("T")


class Arrivals:
    """Recent arrivals of each peer."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, deque[float]] = OrderedDict()

    def is_flood(self, peer: str, now: float) -> bool:
        """Whether this stream exceeds MAX_NEW within a second; counts it if not."""
        taken = self._taken.setdefault(peer, deque(maxlen=MAX_NEW))
        self._taken.move_to_end(peer)
        if len(self._taken) > MAX_CALLERS:
            self._taken.popitem(last=False)
        if len(taken) == MAX_NEW and now - taken[0] < 1.0:
            return True
        taken.append(now)
        return False


def choose_evicted(asking: str, held: Mapping[T, str]) -> T | None:
    """The entry that makes room for ``asking``; None if ``asking`` itself has to go without.

    ``held``: the entries, oldest first, and their owners. The owner with most entries loses its
    oldest, if ``asking`` holds fewer. So no peer can keep another one out.
    """
    counts = Counter(held.values())
    most = max(held, key=lambda one: counts[held[one]], default=None)
    return most if most is not None and counts[asking] < counts[held[most]] else None
