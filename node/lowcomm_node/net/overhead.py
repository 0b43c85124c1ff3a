"""Bytes on peers' connections that belong to no message, such as WINDOW_UPDATE frames.

    the kernel    counts the bytes of each connection
    our streams   count the bytes of their messages: these and their usual overhead are explained
    the rest      fills a leaky bucket per address; if it overflows, the noisiest connection ends

No clock: time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lowcomm_node.net.connections import Place
from lowcomm_node.system.quota import network_of

OF_CALL = 16 * 1024
"""Bytes that a call explains: at most 8 KiB of metadata, a request that no stream counts, and
frames."""
OF_MESSAGE = 256
"""Bytes that a message explains beside its own: headers of gRPC, HTTP/2 and TLS, and gRPC's
pings."""
SHARE = 1 / 8
"""The same as a share of message bytes in both directions: frame headers of large messages, and
WINDOW_UPDATE for what we send."""
BURST = 64 * 1024**2
"""Bytes per address. Windows of 2 MiB on 32 calls may be unread, or were never read when calls
broke off."""
RATE = 512 * 1024
"""Bytes a second per address: a content that breaks off every 4 s, or 40,000 WINDOW_UPDATE frames
(a twentieth of a core)."""


class Counts(Protocol):
    """Receives the sizes of messages."""

    def sent(self, size: int) -> None:
        """A message of ``size`` bytes went out."""
        ...

    def received(self, size: int) -> None:
        """A message of ``size`` bytes came in."""
        ...


@dataclass
class _Seen:
    received: int = 0
    """By the kernel's count, at the last look."""
    explained: float = 0.0
    """Since the last look."""
    extra: float = 0.0
    """Unexplained bytes, in all."""


class Overhead:
    """Finds connections that carry too many unexplained bytes."""

    def __init__(self, burst: float = BURST, rate: float = RATE) -> None:
        self._burst = burst
        self._rate = rate
        self._seen: dict[Place, _Seen] = {}
        self._levels: dict[str, float] = {}
        self._looked = 0.0

    def explain(self, place: Place, size: float) -> None:
        """Account for ``size`` bytes of a connection."""
        self._seen.setdefault(place, _Seen()).explained += size

    def excess(self, received: Mapping[Place, int], now: float) -> list[Place]:
        """The connections to end, one per offending address; ``received``: bytes of each so far."""
        self._seen = {place: self._seen.get(place, _Seen()) for place in received}
        leaked = self._rate * (now - self._looked)
        self._looked = now
        levels = {network_of(host): 0.0 for host, _ in received}
        for network in levels:
            levels[network] = max(0.0, self._levels.get(network, 0.0) - leaked)
        for place, count in received.items():
            seen = self._seen[place]
            extra = count - seen.received - seen.explained
            seen.received, seen.explained = count, 0.0
            seen.extra = max(0.0, seen.extra + extra)
            levels[network_of(place[0])] += extra
        self._levels = levels
        return [self._noisiest(network) for network, level in levels.items() if level > self._burst]

    def _noisiest(self, network: str) -> Place:
        places = [place for place in self._seen if network_of(place[0]) == network]
        return max(places, key=lambda place: self._seen[place].extra)


class Explaining:
    """Counts a stream's messages for the peer's rate, and explains the bytes of its connection."""

    def __init__(self, meter: Counts, overhead: Overhead, place: Place) -> None:
        self._meter = meter
        self._overhead = overhead
        self._place = place

    def sent(self, size: int) -> None:
        """See Counts."""
        self._meter.sent(size)
        self._overhead.explain(self._place, OF_MESSAGE + SHARE * size)

    def received(self, size: int) -> None:
        """See Counts."""
        self._meter.received(size)
        self._overhead.explain(self._place, OF_MESSAGE + (1 + SHARE) * size)
