"""Quotas of callers. No clock: time is an argument (seconds, monotonic)."""

import ipaddress
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

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
    """Counts what callers take. It comes back evenly, so that there is no hour at which all begin
    anew."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._callers: LRUCache[str, _Level] = LRUCache(
            MAX_CALLERS
        )  # what all may have still holds
        self._all = _Level(allowed.all, allowed.seconds)

    @property
    def each(self) -> int:
        """Allowance of one caller."""
        return self._allowed.each

    def has(self, caller: str, count: int, now: float) -> bool:
        """Whether ``count`` is left for a caller."""
        level = self._callers.get(caller) or _Level(self._allowed.each, self._allowed.seconds)
        return level.has(count, now) and self._all.has(count, now)

    def take(self, caller: str, count: int, now: float) -> bool:
        """Take ``count`` for a caller. Returns whether it was left."""
        level = self._callers.get(caller) or _Level(self._allowed.each, self._allowed.seconds)
        if not (level.has(count, now) and self._all.has(count, now)):
            return False
        level.take(count)
        self._all.take(count)
        self._callers[caller] = level
        return True


class _Level:
    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._taken = 0.0
        self._at = 0.0

    def has(self, count: int, now: float) -> bool:
        self._taken = max(0.0, self._taken - (now - self._at) * self._most / self._seconds)
        self._at = now
        return self._taken + count <= self._most

    def take(self, count: int) -> None:
        self._taken += count


class Shares:
    """Places by address. An address takes at most half, its network two thirds, so others always
    find some.

    An address may hold as many as are free (dynamic thresholds, Choudhury and Hahne 1998): alone it
    gets half, one of two a third. So many peers behind one address (carrier-grade NAT) find room
    while there is room, and no address has all of it.
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
        for prefix in prefixes_of(place):
            self._held[prefix] -= 1
            if not self._held[prefix]:
                del self._held[prefix]


def network_of(host: str) -> str:
    """The key of one caller: an IPv4 address, or an IPv6 /64, which a household uses freely."""
    address = ipaddress.ip_address(host)
    return (
        host
        if address.version == 4
        else str(ipaddress.ip_network((int(address), 64), strict=False))
    )


@lru_cache(maxsize=4096)
def prefixes_of(place: str) -> tuple[str, ...]:
    """The keys of a place, narrowest first: an IPv4 address and its /24, an IPv6 /64 and its /48.

    A relay's peer id, behind which no address is visible, is its own key.
    """
    try:
        network = ipaddress.ip_network(network_of(place))
    except ValueError:
        return (place,)
    return str(network).removesuffix("/32"), str(
        network.supernet(new_prefix=24 if network.version == 4 else 48)
    )
