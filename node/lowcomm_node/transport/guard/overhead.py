"""Bytes on connections of peers that belong to no message. gRPC tells nothing of frames such as
WINDOW_UPDATE.

    the kernel    how many bytes have come over a connection
    our streams   how many bytes their messages had: these are explained, with what such messages cost beside
    the rest      each address may have so many at once, which leak away evenly; then its noisiest connection ends

No clock: time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lowcomm_node.system.quota import network_of
from lowcomm_node.transport.guard.connections import Place

OF_CALL = 16 * 1024
"""Bytes that a call explains: 8 KiB of metadata at most, a request that no stream counts, and its
frames."""
OF_MESSAGE = 256
"""Bytes that a message explains beside its own: headers of gRPC, HTTP/2 and TLS, pings of gRPC that
measure the line."""
SHARE = 1 / 8
"""Of the bytes of messages in both directions: the same for each frame of a large one,
WINDOW_UPDATE for what we send."""
BURST = 64 * 1024**2
"""Bytes of one address: what 32 calls hold in windows of 2 MiB is unread yet, or was never read as
they broke off."""
RATE = 512 * 1024
"""Bytes a second of one address: a content that breaks off every 4 s, or 40,000 frames of
WINDOW_UPDATE (a twentieth of a core)."""


class Counts(Protocol):
    """Is told of messages."""

    def sent(self, size: int) -> None:
        """So many bytes have gone out."""
        ...

    def received(self, size: int) -> None:
        """So many bytes have come in."""
        ...


@dataclass
class _Seen:
    received: int = 0
    """By the kernel's count, at the last look."""
    explained: float = 0.0
    """Since the last look."""
    extra: float = 0.0
    """Bytes that nothing explained, in all."""


class Overhead:
    """Tells which connections carry too much that belongs to no message."""

    def __init__(self, burst: float = BURST, rate: float = RATE) -> None:
        self._burst = burst
        self._rate = rate
        self._seen: dict[Place, _Seen] = {}
        self._levels: dict[str, float] = {}
        self._looked = 0.0

    def explain(self, place: Place, size: float) -> None:
        """So many bytes over a connection are accounted for."""
        self._seen.setdefault(place, _Seen()).explained += size

    def excess(self, received: Mapping[Place, int], now: float) -> list[Place]:
        """The connections that should end, one of each address that has too much; ``received``:
        bytes of each so far."""
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
    """Counts the messages of one stream twice: for the rate of a peer, and as what its connection
    carries."""

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
