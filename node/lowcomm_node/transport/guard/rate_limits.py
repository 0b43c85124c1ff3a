"""How often and how many at once: what one caller may take of the server, whoever it says it is.

    an address   so many calls a minute without a good credential; then its calls are refused unread
                 so many calls a minute of all its peers, and no more at once than leave some to others
    a peer       so many calls a minute, and so many at once
    both         who goes on calling beyond that loses its connection

What a caller has not used comes back evenly. No clock of its own: time is an argument, seconds that
never go back.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lowcomm_node.system.quota import Allowed, Quota, Shares, network_of, prefixes_of

MAX_CALLS_PER_PEER = 8
"""At once: exchanges of as many fragments as may be under way, a fetch, an introduction, a ping."""
UNBOUND = 1 << 40
"""Of all callers together: a bound there would let a few lock out everybody."""
CALLS = Allowed(each=1200, all=UNBOUND, seconds=60.0)
"""Calls of peers. A small model on a fast machine exchanges some times a second; the usual is some
times a minute."""
OF_ADDRESS = Allowed(each=4800, all=UNBOUND, seconds=60.0)
"""Calls of all peers of an address of IPv4 or a /64 of IPv6, or behind one relay: four that call as
often as they may, eighty that call once a second. Identities are free, so without it an address
calls as often as it likes."""
MAX_CALLS = 128
"""Of all peers at once. Each may have a window unread (transport/bandwidth.py): so much memory can
be filled from outside."""
BAD_CALLS = Allowed(each=300, all=UNBOUND, seconds=60.0)
"""Calls without a good credential, by address: to check one costs a signature."""
REFUSED = Allowed(each=100, all=UNBOUND, seconds=60.0)
"""Refusals beyond these limits, until the connection is ended."""

TIMES_REFUSED = 10
"""So many times as many of all peers of an address, until the connections of all that are refused
are ended."""


class RateLimits:
    """Counts calls."""

    def __init__(
        self,
        calls: Allowed = CALLS,
        bad_calls: Allowed = BAD_CALLS,
        refused: Allowed = REFUSED,
        of_address: Allowed = OF_ADDRESS,
        most: int = MAX_CALLS,
    ) -> None:
        """``most``: calls of all peers at once."""
        self._a_minute = calls.each
        self._most = most
        self._of_address = Quota(of_address)
        self._shares = Shares()
        self._refused_of_address = Quota(replace(refused, each=TIMES_REFUSED * refused.each))
        self._calls = Quota(calls)
        self._bad = Quota(bad_calls)
        self._refused = Quota(refused)
        self._open: Counter[str] = Counter()

    def refuses_place(self, place: str, now: float) -> str | None:
        """Why no call from an address, or of whom libp2p vouches for, is looked at; None if it
        is."""
        if self._bad.has(_caller(place), 1, now):
            return None
        return "too many calls without a good credential came from there: call again in a minute"

    def bad(self, place: str, now: float) -> None:
        """A call from there had no good credential."""
        self._bad.take(_caller(place), 1, now)

    def refuses(self, peer: str, now: float, place: str = "") -> str | None:
        """Why a call of an authenticated peer is not taken; None if it is, which counts it.

        ``place``: where it comes from.
        """
        address = prefixes_of(place)[0]
        if not self._shares.has_room(place, self._most - self.open_calls):
            return (
                "peers of your address have as many calls open as leave some to others: call again when one has ended"
            )
        if not self._of_address.has(address, 1, now):
            return f"peers of your address called more than {self._of_address.each} times a minute: call again later"
        if self._open[peer] >= MAX_CALLS_PER_PEER:
            return f"at most {MAX_CALLS_PER_PEER} calls at once: call again when one has ended"
        if not self._calls.take(peer, 1, now):
            return f"at most {self._a_minute} calls a minute: call again later"
        self._of_address.take(address, 1, now)
        return None

    def is_flood(self, place: str, now: float, peer: str = "") -> bool:
        """Count a refusal; whether its caller has had so many that its connection should end.

        A peer that has shown who it is answers for itself, so that it does not lose its connection
        for a neighbour behind the same NAT, until its address has had ten times as many.
        """
        if not peer:
            return not self._refused.take(_caller(place), 1, now)
        of_peer = self._refused.take(peer, 1, now)
        return not (self._refused_of_address.take(_caller(place), 1, now) and of_peer)

    @property
    def open_calls(self) -> int:
        """Of all peers."""
        return self._open.total()

    @contextmanager
    def open(self, peer: str, place: str = "") -> Iterator[None]:
        """While a call of a peer is open."""
        self._open[peer] += 1
        self._shares.take(place)
        try:
            yield
        finally:
            self._shares.give_back(place)
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


def _caller(place: str) -> str:
    """A household of IPv6 has more addresses than could be counted; what is no address counts as it
    is."""
    try:
        return network_of(place)
    except ValueError:
        return place
