"""Bytes to and from each peer, and their rates.

Exchanges come every few seconds or minutes, and spend most of their time waiting for the trainer,
so an average over time would say nothing about the link. Only the time of contents counts: from one
message to the next, if the next is large. A content's header goes out right before its first piece,
so that piece counts too.

Outgoing bytes are counted when gRPC takes them. So a rate up is too high for contents smaller than
the buffers on the path.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

from cachetools import LRUCache

MAX_PEERS = 1024
LARGE = 16 * 1024
"""Bytes of a message above which its time reflects the rate rather than the latency."""
MIN_SECONDS = 0.001


class Rate:
    """Bytes in one direction."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._bytes = 0
        self._seconds = 0.0
        self._measured: float | None = None

    def add(self, size: int) -> None:
        """Count a message that has just gone through."""
        now = self._clock()
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

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.up = Rate(clock)
        self.down = Rate(clock)


class Traffic:
    """The meters of all peers. The least recently used is evicted."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._meters: LRUCache[str, Meter] = LRUCache(MAX_PEERS)

    def of(self, peer_id: str) -> Meter:
        """The meter of one peer."""
        meter = self._meters[peer_id] = self._meters.get(peer_id) or Meter(self._clock)
        return meter


class MeteredStub:
    """A service stub that counts the bytes of its streams, and reports calls that begin and end."""

    def __init__(self, stub: Any, meter: Meter, changed: Callable[[int], None]) -> None:
        """``changed`` receives 1 when a call begins, and -1 when it ends."""
        self._stub = stub
        self._meter = meter
        self._changed = changed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)

        def call(*arguments: Any, **options: Any) -> Any:
            begun = method(*arguments, **options)
            self._changed(1)
            begun.add_done_callback(lambda _: self._changed(-1))
            return begun if name == "Describe" else MeteredCall(begun, self._meter)

        return call


class MeteredCall:
    """A gRPC call that counts its bytes."""

    def __init__(self, call: Any, meter: Meter) -> None:
        self._call = call
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def write(self, message: Any) -> None:
        """Send one message."""
        await self._call.write(message)
        self._meter.up.add(message.ByteSize())

    async def read(self) -> Any:
        """The next message, or gRPC's marker of the end."""
        message = await self._call.read()
        if size := message.ByteSize() if hasattr(message, "ByteSize") else 0:
            self._meter.down.add(size)
        return message
