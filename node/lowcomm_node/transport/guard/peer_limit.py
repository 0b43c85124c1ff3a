"""With how many peers this node talks at once, as its owner says.

A peer counts while we keep a connection to call it, and while a call of its is served. ``Describe``
does not count: it is answered at once, and is how peers say hello and goodbye. When there is no
room, connections that carry no call make some. Peers that only call us share their places by
address (``ration.Shares``), so that free identities do not take all of them.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from lowcomm_node.system.quota import Shares

DEFAULT_PEERS = 64


async def _nothing() -> bool:
    return False


class PeerLimit:
    """The peers that we talk with."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._shares = Shares()
        self._calling: Counter[tuple[str, str]] = Counter()
        """Calls that are served, by peer and address."""
        self.make_room: Callable[[], Awaitable[bool]] = _nothing
        """Closes an idle connection; whether there was one."""
        self.turned_away = 0
        """Times that there was no room for a peer, whoever called."""

    @property
    def most(self) -> int:
        """How many peers there may be."""
        return DEFAULT_PEERS if self._most is None else self._most

    def allow(self, most: int | None) -> None:
        """Set another bound; whoever is there stays until its calls have ended."""
        self._most = most

    def __len__(self) -> int:
        """How many peers there are."""
        return len(self._held)

    @property
    def is_over(self) -> bool:
        """Whether there are more than there may be."""
        return len(self._held) > self.most

    async def has_room_for(self, peer: str, place: str | None = None) -> bool:
        """Whether we may talk with a peer, now that room was made where possible.

        ``place``: where it calls from.
        """
        while peer not in self._held:
            free = self.most - len(self._held)
            if free > 0 and (place is None or self._shares.has_room(place, free)):
                return True
            if free > 0 or not await self.make_room():
                self.turned_away += 1
                return False
        return True

    def join(self, peer: str) -> None:
        """There is a connection or a call more with a peer."""
        self._held[peer] += 1

    def leave(self, peer: str) -> None:
        """The counterpart of ``join``."""
        self._held[peer] -= 1
        if not self._held[peer]:
            del self._held[peer]

    @contextmanager
    def with_(self, peer: str, place: str = "") -> Iterator[None]:
        """A call of a peer is served."""
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
