"""What is told of routes to peers."""

from dataclasses import dataclass
from typing import ClassVar

from lowcomm_node.system.events import Event


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


@dataclass(frozen=True, kw_only=True)
class CongestionChanged(Event):
    """A connection that loses segments goes on with BBR, or without it where that loses more."""

    wire_name: ClassVar[str] = "congestion.changed"
    address: str
    """The other end, `HOST:PORT`."""
    before: str
    """Congestion control that it had."""
    now: str
    """The one that it has."""
    resent: float
    """Share of the segments that were sent again."""
