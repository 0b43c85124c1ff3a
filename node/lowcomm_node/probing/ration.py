"""How much strangers may have. No clock of its own: time is an argument (seconds of a clock that never goes back)."""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

MAX_CALLERS = 4096


@dataclass(frozen=True)
class Allowed:
    """What one caller, and what all of them together, may have in so many seconds."""

    each: int
    all: int
    seconds: float


class Ration:
    """Counts what callers take. What was taken comes back evenly, so that there is no hour at which all begin anew."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._callers: OrderedDict[str, _Level] = OrderedDict()
        self._all = _Level(allowed.all, allowed.seconds)

    @property
    def each(self) -> int:
        """How much one caller may take."""
        return self._allowed.each

    def has(self, caller: str, count: int, now: float) -> bool:
        """Whether so much is left for a caller."""
        level = self._callers.get(caller) or _Level(self._allowed.each, self._allowed.seconds)
        return level.has(count, now) and self._all.has(count, now)

    def take(self, caller: str, count: int, now: float) -> bool:
        """Take so much for a caller; whether that is left for it."""
        level = self._callers.get(caller) or _Level(self._allowed.each, self._allowed.seconds)
        if not (level.has(count, now) and self._all.has(count, now)):
            return False
        level.take(count)
        self._all.take(count)
        self._callers[caller] = level
        self._callers.move_to_end(caller)
        if len(self._callers) > MAX_CALLERS:  # what all may have still holds
            self._callers.popitem(last=False)
        return True


class _Level:
    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._taken, self._at = 0.0, 0.0

    def has(self, count: int, now: float) -> bool:
        self._taken = max(0.0, self._taken - (now - self._at) * self._most / self._seconds)
        self._at = now
        return self._taken + count <= self._most

    def take(self, count: int) -> None:
        self._taken += count


def network_of(host: str) -> str:
    """Who counts as one caller: an address of IPv4, or a /64 of IPv6, out of which a household takes what it likes."""
    address = ipaddress.ip_address(host)
    return host if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


@lru_cache(maxsize=4096)
def prefixes_of(place: str) -> tuple[str, ...]:
    """What a place counts as, the narrowest first: an address of IPv4 and its /24, a /64 of IPv6 and its /48.

    What is no address (a relay, whose peers have none that we could see) counts as it is.
    """
    try:
        network = ipaddress.ip_network(network_of(place))
    except ValueError:
        return (place,)
    return str(network).removesuffix("/32"), str(network.supernet(new_prefix=24 if network.version == 4 else 48))
