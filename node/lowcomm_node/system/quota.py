"""Quotas of callers. No clock: time is an argument (seconds, monotonic)."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address

from cachetools import LRUCache

MAX_CALLERS = 4096
AT_LEAST = (8, 16)
"""Places that an address, and its /24 or /48, may always have while there is room."""
PER_FREE = (1, 2)
"""Beyond these: as many as are free, and twice as many."""
OF_FEW = (1, 2)
"""Replaces AT_LEAST where there are few places in all."""


@dataclass(frozen=True)
class Allowed:
    """Allowance of each caller, and of all together, within ``seconds``."""

    each: int
    all: int
    seconds: float


class Quota:
    """Counts what callers take. It comes back evenly, so no hour begins with a rush."""

    def __init__(self, allowed: Allowed) -> None:
        self.each = allowed.each
        """Allowance of one caller."""
        self._allowed = allowed
        # How much was taken, and when; the least recent callers are dropped, not the sum of all.
        self._callers: LRUCache[str, tuple[float, float]] = LRUCache(MAX_CALLERS)
        self._all = (0.0, 0.0)

    def has(self, caller: str, count: int, now: float) -> bool:
        """Whether ``count`` is left for a caller."""
        own, all_ = self._taken(caller, now)
        return own + count <= self.each and all_ + count <= self._allowed.all

    def take(self, caller: str, count: int, now: float) -> bool:
        """Take ``count`` for a caller. Returns whether it was left."""
        if not self.has(caller, count, now):
            return False
        own, all_ = self._taken(caller, now)
        self._callers[caller], self._all = (own + count, now), (all_ + count, now)
        return True

    def _taken(self, caller: str, now: float) -> tuple[float, float]:
        """The counts of a caller, and of all, which have not come back yet."""
        (own, own_at), (all_, all_at) = self._callers.get(caller, (0.0, now)), self._all
        return (
            max(0.0, own - (now - own_at) * self.each / self._allowed.seconds),
            max(0.0, all_ - (now - all_at) * self._allowed.all / self._allowed.seconds),
        )


class Shares:
    """Places by address. An address takes at most half, its network two thirds, so others always
    find some.

    An address may hold as many as are free (dynamic thresholds, Choudhury and Hahne 1998): alone it
    gets half, one of two a third. Many peers behind one address (carrier-grade NAT) find room while
    there is room, and no address has all of it.
    """

    def __init__(self, at_least: tuple[int, int] = AT_LEAST) -> None:
        """``at_least``: places that an address, and its network, may have while there is room."""
        self._at_least = at_least
        self._held: Counter[str] = Counter()

    def has_room(self, place: str, free: int) -> bool:
        """Whether one more may come from an address, with ``free`` places left."""
        # The widest first: a relay, with a single prefix, gets the bounds of a network.
        bounds = zip(
            reversed(prefixes_of(place)), reversed(self._at_least), reversed(PER_FREE), strict=False
        )
        return all(self._held[prefix] < max(least, share * free) for prefix, least, share in bounds)

    def take(self, place: str) -> None:
        """Count one more from an address."""
        self._held.update(prefixes_of(place))

    def give_back(self, place: str) -> None:
        """The counterpart of ``take``."""
        self._held.subtract(prefixes_of(place))
        self._held = +self._held  # without zeros


@lru_cache(maxsize=4096)
def prefixes_of(place: str) -> tuple[str, ...]:
    """The keys of a place, narrowest first: an IPv4 address and its /24, an IPv6 /64, which a
    household uses freely, and its /48.

    A relay's peer id, behind which no address is visible, is its own key.
    """
    try:
        address = ip_address(place)
    except ValueError:
        return (place,)
    if address.version == 4:
        return str(address), str(IPv4Network((int(address), 24), strict=False))
    return tuple(str(IPv6Network((int(address), bits), strict=False)) for bits in (64, 48))
