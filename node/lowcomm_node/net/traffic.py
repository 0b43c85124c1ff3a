"""Bytes to and from each peer, and their rates.

Exchanges come every few seconds or minutes, and spend most of their time waiting for the trainer,
so an average over time would say nothing about the link. Only the time of contents counts: from one
message to the next, if the next is large. A content's header goes out right before its first piece,
so that piece counts too.

Outgoing bytes are counted when gRPC takes them. So a rate up is too high for contents smaller than
the buffers on the path.
"""

from time import monotonic

from cachetools import LRUCache

MAX_PEERS = 1024
LARGE = 16 * 1024
"""Bytes of a message above which its time reflects the rate rather than the latency."""
MIN_SECONDS = 0.001


class Rate:
    """Bytes in one direction."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._bytes = 0
        self._seconds = 0.0
        self._measured: float | None = None

    def add(self, size: int) -> None:
        """Count a message that has just gone through."""
        now = monotonic()
        if size < LARGE:
            self._measured = self.last
            self._bytes = 0
            self._seconds = 0.0
        elif self._last is not None:
            self._bytes += size
            self._seconds += now - self._last
        self._last = now

    @property
    def last(self) -> float | None:
        """Bytes a second of the last contents; None if there were none."""
        return self._bytes / max(self._seconds, MIN_SECONDS) if self._bytes else self._measured


class Meter:
    """Both directions of one peer."""

    def __init__(self) -> None:
        self.up = Rate()
        self.down = Rate()


class Traffic:
    """The meters of all peers. The least recently used is evicted."""

    def __init__(self) -> None:
        self._meters: LRUCache[str, Meter] = LRUCache(MAX_PEERS)

    def of(self, peer_id: str) -> Meter:
        """The meter of one peer."""
        meter = self._meters[peer_id] = self._meters.get(peer_id) or Meter()
        return meter
