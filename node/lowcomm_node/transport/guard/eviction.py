"""Who is turned away, and who makes room, where too many come. No clock: time is an argument."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import TypeVar

MAX_NEW = 16
"""Streams of one peer that are taken within a second: each new session costs a connection of
gRPC."""
MAX_CALLERS = 1024
"""Peers whose new streams are counted."""

T = TypeVar("T")


class Arrivals:
    """How often peers have come of late."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, deque[float]] = OrderedDict()

    def is_flood(self, peer: str, now: float) -> bool:
        """Whether this is one stream too many of a peer within a second; counts it if not."""
        taken = self._taken.setdefault(peer, deque(maxlen=MAX_NEW))
        self._taken.move_to_end(peer)
        if len(self._taken) > MAX_CALLERS:
            self._taken.popitem(last=False)
        if len(taken) == MAX_NEW and now - taken[0] < 1.0:
            return True
        taken.append(now)
        return False


def choose_evicted(asking: str, held: Mapping[T, str]) -> T | None:
    """What makes room for a peer that asks; None if it is the one that has to go without.

    ``held``: what there is, the oldest first, and whose it is. The oldest of the peer that holds
    most gives way, to one that holds less: so no peer keeps another one out.
    """
    counts = Counter(held.values())
    most = max(held, key=lambda one: counts[held[one]], default=None)
    return most if most is not None and counts[asking] < counts[held[most]] else None
