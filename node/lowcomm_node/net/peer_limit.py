"""The owner's limit on the number of peers at once.

A peer counts while we keep a connection to it, and while we serve a call of it. ``Describe`` does
not count: it is answered at once, and peers say hello and goodbye with it. When the limit is
reached, connections without calls are closed. Peers that only call us share their places by address
(``quota.Shares``), so that free identities can't take all of them.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from lowcomm_node.system.quota import Shares

DEFAULT_PEERS = 64


async def _nothing() -> bool:
    return False


class PeerLimit:
    """The peers that hold a place."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._shares = Shares()
        self._calling: Counter[tuple[str, str]] = Counter()
        """Calls under way, by peer and address."""
        self.make_room: Callable[[], Awaitable[bool]] = _nothing
        """Closes an idle connection; returns whether there was one."""
        self.turned_away = 0
        """How often there was no room for a peer, in either direction."""

    @property
    def most(self) -> int:
        """The limit."""
        return DEFAULT_PEERS if self._most is None else self._most

    def allow(self, most: int | None) -> None:
        """Set another limit. Peers above it stay until their calls have ended."""
        self._most = most

    def __len__(self) -> int:
        """How many peers there are."""
        return len(self._held)

    @property
    def is_over(self) -> bool:
        """Whether there are more peers than allowed."""
        return len(self._held) > self.most

    async def has_room_for(self, peer: str, place: str | None = None) -> bool:
        """Whether a peer has or may take a place, after making room. ``place``: where it calls
        from."""
        while peer not in self._held:
            free = self.most - len(self._held)
            if free > 0 and (place is None or self._shares.has_room(place, free)):
                return True
            if free > 0 or not await self.make_room():
                self.turned_away += 1
                return False
        return True

    def join(self, peer: str) -> None:
        """Count one more connection or call of a peer."""
        self._held[peer] += 1

    def leave(self, peer: str) -> None:
        """The counterpart of ``join``."""
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

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
            self._calling[caller] -= 1
            if not self._calling[caller]:
                del self._calling[caller]
                self._shares.give_back(place)
            self.leave(peer)
