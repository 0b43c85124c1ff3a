"""Limits of the server: calls by address and by peer, and the owner's limit on peers at once.

    an address   calls a minute without a valid credential; beyond that calls are refused unread
                 calls a minute of all its peers, and calls at once that leave some to others
    a peer       calls a minute, and calls at once
    a node       peers at once, as its owner allows

Unused calls come back evenly. No clock: time is an argument (seconds, monotonic). Connections that
make no calls are gRPC's to end; floods below that are a firewall's (SECURITY.md).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from lowcomm_node.system.quota import Allowed, Quota, Shares, prefixes_of

MAX_CALLS_PER_PEER = 8
"""At once: as many fragments as may be exchanged, a fetch, an introduction and a ping."""
UNBOUND = 1 << 40
"""For all callers together: with a bound there, a few could lock out everybody."""
CALLS = Allowed(each=1200, all=UNBOUND, seconds=60.0)
"""Of one peer. A small model on a fast machine exchanges a few times a second."""
OF_ADDRESS = Allowed(each=4800, all=UNBOUND, seconds=60.0)
"""Of all peers of one IPv4 address, /64 of IPv6, or relay, since identities are free."""
MAX_CALLS = 128
"""Of all peers at once. Each may have an unread window (bandwidth.py), which bounds the memory that
others can fill."""
BAD_CALLS = Allowed(each=300, all=UNBOUND, seconds=60.0)
"""Of one address, without a valid credential: checking one costs a signature."""
DEFAULT_PEERS = 64


class RateLimits:
    """Counts calls."""

    def __init__(self) -> None:
        self._of_address = Quota(OF_ADDRESS)
        self._shares = Shares()
        self._calls = Quota(CALLS)
        self._bad = Quota(BAD_CALLS)
        self._open: Counter[str] = Counter()

    def refuses_place(self, place: str, now: float) -> str | None:
        """Why calls from an address, or from a peer that libp2p authenticated, are refused unread;
        or None."""
        why = "too many calls without a good credential came from there: call again in a minute"
        return None if self._bad.has(prefixes_of(place)[0], 1, now) else why

    def bad(self, place: str, now: float) -> None:
        """Count a call without a valid credential."""
        self._bad.take(prefixes_of(place)[0], 1, now)

    def refuses(self, peer: str, now: float, place: str = "") -> str | None:
        """Why a call of an authenticated peer is refused; None if it is accepted, which counts it.
        ``place``: where it comes from."""
        address = prefixes_of(place)[0]
        if not self._shares.has_room(place, MAX_CALLS - self.open_calls):
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
            return f"at most {self._calls.each} calls a minute: call again later"
        self._of_address.take(address, 1, now)
        return None

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
            self._open -= Counter([peer])


class PeerLimit:
    """The owner's limit on the number of peers at once, and the peers that hold a place.

    A peer counts while we keep a connection to it, and while we serve a call of it. ``Describe``
    does not count: it is answered at once, and peers say hello and goodbye with it. When the limit
    is reached, connections without calls are closed. Peers that only call us share their places by
    address, so that free identities can't take all of them.
    """

    def __init__(self, most: int | None = None) -> None:
        self.allow(most)
        self._held: Counter[str] = Counter()
        self._shares = Shares()
        self._calling: Counter[tuple[str, str]] = Counter()
        """Calls under way, by peer and address."""
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        """Closes an idle connection; returns whether there was one."""
        self.turned_away = 0
        """How often there was no room for a peer, in either direction."""

    def allow(self, most: int | None) -> None:
        """Set another limit. Peers above it stay until their calls have ended."""
        self.most = DEFAULT_PEERS if most is None else most

    def __len__(self) -> int:
        """How many peers there are."""
        return len(self._held)

    async def has_room_for(self, peer: str, place: str | None = None) -> bool:
        """Whether a peer has or may take a place, after making room; ``place``: where it calls
        from."""
        while peer not in self._held:
            free = self.most - len(self._held)
            if free > 0 and (place is None or self._shares.has_room(place, free)):
                return True
            if free > 0 or self.make_room is None or not await self.make_room():
                self.turned_away += 1
                return False
        return True

    def join(self, peer: str) -> None:
        """Count one more connection or call of a peer."""
        self._held[peer] += 1

    def leave(self, peer: str) -> None:
        """Undo ``join``."""
        self._held -= Counter([peer])

    @contextmanager
    def with_(self, peer: str, place: str = "") -> Iterator[None]:
        """Context in which a call of a peer is served."""
        caller = (peer, place)
        self.join(peer)
        self._calling[caller] += 1
        if self._calling[caller] == 1:
            self._shares.take(place)
        try:
            yield
        finally:
            self._calling -= Counter([caller])
            if caller not in self._calling:
                self._shares.give_back(place)
            self.leave(peer)
