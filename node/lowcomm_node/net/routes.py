"""The routes to a peer, and when a failed one is tried again. No I/O, no clock: time is an argument
(seconds, monotonic).

    direct   TLS to the address in the peer's record       cheap and fast, if that is reachable
    tunnel   a stream of libp2p, punched or relayed        works nearly everywhere
"""

from dataclasses import dataclass
from enum import StrEnum

DIRECT_DEADLINE = 5.0
"""Seconds for TCP and TLS. The second SYN goes out after one second, the third after three."""
TUNNEL_DEADLINE = 15.0
"""Seconds for a stream and gRPC over it: p2pd may have to dial a relay, and is slow to give up dead
addresses."""
HEAD_START = 0.6
"""Seconds that a direct connection has before a tunnel is opened beside it."""
FIRST_PAUSE = 15.0
LONGEST_PAUSE = 600.0
"""Seconds before a failed route is tried again while another is open: the first and the longest
pause."""
ALONE_PAUSE = 2.0
"""The same if no other route is open: the exchange has nothing else to use."""
FLAP = 10.0
"""A route that is lost within this many seconds counts as failed: it opens, but does not hold."""


class Route(StrEnum):
    """How a peer is reached."""

    DIRECT = "direct"
    TUNNEL = "tunnel"


@dataclass(frozen=True, kw_only=True)
class PeerRoute:
    """How a peer is reached."""

    route: str | None = None
    """`direct IP:PORT`, `punched` or `relay NAME`; null if it is not reached."""
    route_reason: str | None = None
    """Why it is not reached, or not by the better route."""
    round_trip: float | None = None
    """Seconds."""
    rate_up: float | None = None
    """Bytes a second at which contents went to it last."""
    rate_down: float | None = None
    """Bytes a second at which contents came from it last."""


@dataclass(frozen=True, kw_only=True)
class RouteSpeed:
    """The measurements of one route. If they are missing, ``reason`` says why the route failed."""

    route: str
    """As `peers` names it: `direct HOST:PORT`, `punched`, `relay NAME`; `tunnel` if there is
    none."""
    round_trip: float | None = None
    """Seconds."""
    up: float | None = None
    """Bytes a second to the peer."""
    down: float | None = None
    """Bytes a second from the peer."""
    reason: str = ""
    """Why the route failed; empty if it did not."""


DEADLINES = {Route.DIRECT: DIRECT_DEADLINE, Route.TUNNEL: TUNNEL_DEADLINE}


@dataclass
class RouteHistory:
    """Attempts to open one route."""

    failures: int = 0
    """In a row."""
    opened: float = 0.0
    failed: float = float("-inf")
    due: float = float("-inf")
    """When it may be tried again while another route is open."""
    reason: str = ""
    """Why it failed last; empty if it has not failed, or was opened since."""

    def is_due(self, now: float, alone: bool) -> bool:
        """Whether it may be tried; ``alone``: no other route is open."""
        return now >= (self.failed + ALONE_PAUSE if alone else self.due)

    def open(self, now: float) -> None:
        """An attempt succeeded."""
        self.opened, self.reason = now, ""

    def fail(self, now: float, reason: str) -> None:
        """An attempt failed."""
        self.failed, self.reason = now, reason
        self.due = now + min(FIRST_PAUSE * 2 ** min(self.failures, 20), LONGEST_PAUSE)
        self.failures += 1

    def lose(self, now: float) -> None:
        """The connection broke. It may be dead, or merely idle, so the route is opened again before
        its next use."""
        if now - self.opened < FLAP:
            self.fail(now, "the connection broke off soon after it was made")
            self.failed = float("-inf")  # where no other is open, it is better than none
        else:
            self.failures, self.due = 0, now
