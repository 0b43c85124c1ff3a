"""How often and how many at once: what one caller may take of the server, whoever it says it is.

    an address   so many calls a minute without a good credential; then its calls are refused unread
    a peer       so many calls a minute, and so many at once
    both         who goes on calling beyond that loses its connection

What a caller has not used comes back evenly. No clock of its own: time is an argument, seconds that never go back.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lowcomm_node.probing.ration import Allowed, Ration, network_of

MAX_CALLS_PER_PEER = 8
"""At once: exchanges of as many fragments as may be under way, a fetch, an introduction, a ping."""
UNBOUND = 1 << 40
"""Of all callers together: a bound there would let a few lock out everybody."""
CALLS = Allowed(each=1200, all=UNBOUND, seconds=60.0)
"""Calls of peers. A small model on a fast machine exchanges some times a second; the usual is some times a minute."""
BAD_CALLS = Allowed(each=300, all=UNBOUND, seconds=60.0)
"""Calls without a good credential, by address: to check one costs a signature."""
REFUSED = Allowed(each=100, all=UNBOUND, seconds=60.0)
"""Refusals beyond these limits, until the connection is ended."""


class Turnstile:
    """Counts calls."""

    def __init__(self, calls: Allowed = CALLS, bad_calls: Allowed = BAD_CALLS, refused: Allowed = REFUSED) -> None:
        self._a_minute = calls.each
        self._calls, self._bad, self._refused = Ration(calls), Ration(bad_calls), Ration(refused)
        self._open: Counter[str] = Counter()

    def refuses_place(self, place: str, now: float) -> str | None:
        """Why no call from an address, or of whom libp2p vouches for, is looked at; None if it is."""
        if self._bad.has(_caller(place), 1, now):
            return None
        return "too many calls without a good credential came from there: call again in a minute"

    def bad(self, place: str, now: float) -> None:
        """A call from there had no good credential."""
        self._bad.take(_caller(place), 1, now)

    def refuses(self, peer: str, now: float) -> str | None:
        """Why a call of an authenticated peer is not taken; None if it is, which counts it."""
        if self._open[peer] >= MAX_CALLS_PER_PEER:
            return f"at most {MAX_CALLS_PER_PEER} calls at once: call again when one has ended"
        if not self._calls.take(peer, 1, now):
            return f"at most {self._a_minute} calls a minute: call again later"
        return None

    def is_flood(self, place: str, now: float) -> bool:
        """Count a refusal; whether its caller has had so many that its connection should end."""
        return not self._refused.take(_caller(place), 1, now)

    @property
    def open_calls(self) -> int:
        """Of all peers."""
        return self._open.total()

    @contextmanager
    def open(self, peer: str) -> Iterator[None]:
        """While a call of a peer is open."""
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


def _caller(place: str) -> str:
    """A household of IPv6 has more addresses than could be counted; what is no address counts as it is."""
    try:
        return network_of(place)
    except ValueError:
        return place
