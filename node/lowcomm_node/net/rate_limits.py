"""Rate limits of the server, by address and by peer.

    an address   calls a minute without a valid credential; beyond that calls are refused unread
                 calls a minute of all its peers, and calls at once that leave some to others
    a peer       calls a minute, and calls at once
    both         a caller that goes on beyond its limits loses its connection

Unused calls come back evenly. No clock: time is an argument (seconds, monotonic).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lowcomm_node.system.quota import Allowed, Quota, Shares, network_of, prefixes_of

MAX_CALLS_PER_PEER = 8
"""At once: as many fragments as may be exchanged, a fetch, an introduction and a ping."""
UNBOUND = 1 << 40
"""For all callers together: with a bound there, a few could lock out everybody."""
CALLS = Allowed(each=1200, all=UNBOUND, seconds=60.0)
"""Of one peer. A small model on a fast machine exchanges a few times a second; usual is a few times
a minute."""
OF_ADDRESS = Allowed(each=4800, all=UNBOUND, seconds=60.0)
"""Of all peers of one IPv4 address, /64 of IPv6, or relay: four peers at their limit, or eighty
that call once a second. Identities are free, so without this limit an address could call without
bound."""
MAX_CALLS = 128
"""Of all peers at once. Each may have an unread window (bandwidth.py), which bounds the
memory that others can fill."""
BAD_CALLS = Allowed(each=300, all=UNBOUND, seconds=60.0)
"""Of one address, without a valid credential: checking one costs a signature."""
REFUSED = Allowed(each=100, all=UNBOUND, seconds=60.0)
"""Refusals beyond these limits before the connection is ended."""

TIMES_REFUSED = 10
"""Factor for all peers of an address, before the connections of all that are refused are ended."""


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
        """Why calls from an address, or from a peer that libp2p authenticated, are refused unread;
        or None."""
        if self._bad.has(_caller(place), 1, now):
            return None
        return "too many calls without a good credential came from there: call again in a minute"

    def bad(self, place: str, now: float) -> None:
        """Count a call without a valid credential."""
        self._bad.take(_caller(place), 1, now)

    def refuses(self, peer: str, now: float, place: str = "") -> str | None:
        """Why a call of an authenticated peer is refused; None if it is accepted, which counts it.

        ``place``: where it comes from.
        """
        address = prefixes_of(place)[0]
        if not self._shares.has_room(place, self._most - self.open_calls):
            return (
                "peers of your address have as many calls open as leave some to others: call again "
                "when one has ended"
            )
        if not self._of_address.has(address, 1, now):
            return (
                f"peers of your address called more than {self._of_address.each} times a minute: "
                "call again later"
            )
        if self._open[peer] >= MAX_CALLS_PER_PEER:
            return f"at most {MAX_CALLS_PER_PEER} calls at once: call again when one has ended"
        if not self._calls.take(peer, 1, now):
            return f"at most {self._a_minute} calls a minute: call again later"
        self._of_address.take(address, 1, now)
        return None

    def is_flood(self, place: str, now: float, peer: str = "") -> bool:
        """Count a refusal. Returns whether the caller's connection should end.

        An authenticated peer has a count of its own, so that it does not lose its connection for a
        neighbour behind the same NAT, until the address has had ten times as many.
        """
        if not peer:
            return not self._refused.take(_caller(place), 1, now)
        of_peer = self._refused.take(peer, 1, now)
        return not (self._refused_of_address.take(_caller(place), 1, now) and of_peer)

    @property
    def open_calls(self) -> int:
        """Calls of all peers under way."""
        return self._open.total()

    @contextmanager
    def open(self, peer: str, place: str = "") -> Iterator[None]:
        """Context of a peer's call."""
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
    """The key of quotas: an IPv4 address or a /64, since a household of IPv6 has too many
    addresses."""
    try:
        return network_of(place)
    except ValueError:
        return place
