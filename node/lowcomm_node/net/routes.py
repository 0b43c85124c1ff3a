"""Chooses the route to a peer. No I/O, no clock: time is an argument (seconds, monotonic).

    direct   TLS to the address in the peer's record       cheap and fast, if that is reachable
    tunnel   a stream of libp2p, punched or relayed        works nearly everywhere

Direct is preferred. Unknown routes are tried: direct at once, the tunnel after a head start, or as
soon as direct has failed. A failed route is tried again with growing pauses, or soon if no other is
open.

    CLOSED ── plan ──► OPENING ── opened ──► OPEN ── lost ──► CLOSED
                          └── failed, dropped ──────────────────┘
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

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


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """What to do for a call."""

    use: Route | None
    """The route to take; None: wait for an attempt, or give up if none is under way."""
    attempts: Mapping[Route, float] = field(default_factory=dict)
    """Routes to begin to open now, with the seconds to wait for another attempt under way; less if
    that one fails sooner."""
    reason: str = ""
    """Why there is neither a route nor an attempt."""


class _Phase(Enum):
    CLOSED = auto()
    OPENING = auto()
    OPEN = auto()


@dataclass
class _RouteState:
    phase: _Phase = _Phase.CLOSED
    failures: int = 0
    """In a row."""
    opened: float = 0.0
    failed: float = float("-inf")
    due: float = float("-inf")
    """When it may be tried again while another route is open."""
    reason: str = ""


class RouteChoice:
    """Chooses among the routes to one peer."""

    def __init__(self, routes: tuple[Route, ...] = tuple(Route)) -> None:
        """``routes``: the available ones, the best first."""
        self._states = {route: _RouteState() for route in routes}

    @property
    def route(self) -> Route | None:
        """The best open route."""
        opened = (route for route, state in self._states.items() if state.phase is _Phase.OPEN)
        return next(opened, None)

    def reason(self, route: Route) -> str:
        """Why a route failed last; empty if it has not failed, or was opened since."""
        return self._states[route].reason if route in self._states else ""

    def reasons(self) -> str:
        """Why each route failed last, in words."""
        return "; ".join(
            f"{route}: {state.reason}" for route, state in self._states.items() if state.reason
        )

    def plan(self, now: float) -> CallPlan:
        """What to do for a call that is made now."""
        use, attempts, is_opening = self.route, dict[Route, float](), False
        for route, state in self._states.items():
            if route is use:
                break
            is_due = (state.due if use is not None else state.failed + ALONE_PAUSE) <= now
            if state.phase is _Phase.CLOSED and is_due:
                state.phase = _Phase.OPENING
                attempts[route] = HEAD_START if is_opening else 0.0
            is_opening |= state.phase is _Phase.OPENING
        if use is None and not is_opening:
            reasons = self.reasons()
            reason = "can't be reached" + (f" ({reasons})" if reasons else "")
            return CallPlan(use=None, reason=reason)
        return CallPlan(use=use, attempts=attempts)

    def opened(self, route: Route, now: float) -> None:
        """An attempt succeeded."""
        state = self._states[route]
        state.phase, state.opened, state.reason = _Phase.OPEN, now, ""

    def failed(self, route: Route, now: float, reason: str) -> None:
        """An attempt failed."""
        state = self._states[route]
        state.phase, state.failed, state.reason = _Phase.CLOSED, now, reason
        state.due = now + min(FIRST_PAUSE * 2**state.failures, LONGEST_PAUSE)
        state.failures += 1

    def dropped(self, route: Route) -> None:
        """An attempt was abandoned because another route is open."""
        self._states[route].phase = _Phase.CLOSED

    def lost(self, route: Route, now: float, reason: str) -> None:
        """An open route was closed. It may be dead, or merely idle, so it is reopened before its
        next use. ``reason``: shown if the route did not hold."""
        state = self._states[route]
        if state.phase is not _Phase.OPEN:
            return
        if now - state.opened < FLAP:
            self.failed(route, now, reason)
            state.failed = float("-inf")  # where no other is open, it is better than none
            return
        state.phase, state.failures, state.due, state.reason = _Phase.CLOSED, 0, now, ""

    def moved(self, route: Route) -> None:
        """The peer announced another address: forget this route's history. End any attempt under
        way."""
        self._states[route] = _RouteState()
