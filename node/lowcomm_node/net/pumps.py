"""All pumps of a node: their memory, their counters, and an end to those that stall."""

from collections.abc import Iterator
from contextlib import contextmanager

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.pump import Pump
from lowcomm_node.net.session import Slabs

IDLE = 600.0
"""Seconds without a byte before a session is closed."""
STALL = 60.0
"""Seconds without progress before a stream is given up; if gRPC stalls, the session."""
SWEEP_EVERY = 5.0


class Pumps:
    """The pumps at both ends of all tunnels."""

    def __init__(self) -> None:
        self.slabs = Slabs()
        self._live: set[Pump] = set()
        self._resumed = 0
        self._repeated = 0

    @property
    def resumed(self) -> int:
        """Streams that replaced an interrupted one, so far."""
        return self._resumed + sum(pump.resumed for pump in self._live)

    @property
    def repeated(self) -> int:
        """Bytes sent again because of that, so far."""
        return self._repeated + sum(pump.repeated for pump in self._live)

    def __iter__(self) -> Iterator[Pump]:
        return iter(tuple(self._live))

    def __len__(self) -> int:
        return len(self._live)

    @contextmanager
    def minding(self, pump: Pump) -> Iterator[None]:
        """Context in which a pump lives; closes it at the end."""
        self._live.add(pump)
        try:
            yield
        finally:
            pump.close()
            self._live.discard(pump)
            self._resumed += pump.resumed
            self._repeated += pump.repeated

    def sweep(self, now: float) -> None:
        """End sessions and streams in which nothing moves; ``now``: the event loop's time."""
        for pump in self:
            local, stream = pump.blocked(now)
            if pump.idle(now) > IDLE or local > STALL:
                pump.fail(LinkLost("was closed, for nothing moved in it"))
            elif stream > STALL:
                pump.cut_off(f"took nothing for {STALL:.0f} s")
            elif pump.idle(now) > SWEEP_EVERY:
                pump.acknowledge()
