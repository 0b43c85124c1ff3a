"""Who is turned away, and who makes room, where too many come. No clock: time is an argument."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import TypeVar

from lowcomm_node.probing.ration import prefixes_of

MAX_NEW = 16
"""Streams of one peer that are taken within a second: each new session costs a connection of gRPC."""
MAX_CALLERS = 1024
"""Peers whose new streams are counted."""
AT_LEAST = (8, 16)
"""Places that an address, and its /24 or /48, may have in any case, as long as there is room."""
PER_FREE = (1, 2)
"""Beyond these: as many as are free, and twice as many."""

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


class Shares:
    """Places by address. An address takes no more than half of all, its network two thirds, so others always find some.

    It may hold as many as are free (dynamic thresholds, Choudhury and Hahne 1998): alone it gets half, one of two a third.
    So many peers behind one address (carrier-grade NAT) have room while there is room, and no address has all of it.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def has_room(self, place: str, free: int) -> bool:
        """Whether one more may come from an address, where so many places are free."""
        # The widest first: a relay, behind which no address is seen, has as many peers as a network.
        bounds = zip(reversed(prefixes_of(place)), reversed(AT_LEAST), reversed(PER_FREE), strict=False)
        return all(self._held[prefix] < max(least, share * free) for prefix, least, share in bounds)

    def take(self, place: str) -> None:
        """One more from an address."""
        self._held.update(prefixes_of(place))

    def give_back(self, place: str) -> None:
        """The counterpart of ``take``."""
        for prefix in prefixes_of(place):
            self._held[prefix] -= 1
            if not self._held[prefix]:
                del self._held[prefix]


def gives_way(asking: str, held: Mapping[T, str]) -> T | None:
    """What makes room for a peer that asks; None if it is the one that has to go without.

    ``held``: what there is, the oldest first, and whose it is. The oldest of the peer that holds most gives way, to one
    that holds less: so no peer keeps another one out.
    """
    counts = Counter(held.values())
    most = max(held, key=lambda one: counts[held[one]], default=None)
    return most if most is not None and counts[asking] < counts[held[most]] else None
