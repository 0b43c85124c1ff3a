"""Which peers keep the records under a key, as a search has found them, until the next search is
due.

A search asks up to ``SEARCHED`` peers, for names only. The look that searches asks all keepers. The
looks after it ask ``ASKED`` of them, others each time, so that a few looks have heard them all.
Records go to all of them.

    search ──► look: all keepers ──► look: two ──► look: two others ──► ... ──► LOOKS-th: search
      ▲                                   │
      └── one is silent, or we have met a peer that is nearer ──┘
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Any

REPLICAS = 5
"""Peers that keep a record; hivemind's own default."""
SEARCHED = 2 * REPLICAS
"""Nearest peers that a search asks, and that an answer names; half of them may be gone. hivemind
takes 20, so that in a swarm of up to 20 everybody asks and names everybody."""
ASKED = 2
"""Keepers that a look between two searches asks."""
LOOKS = 8
"""Looks from one search to the next."""
FOUND_FOR = 120.0
"""Longest time in seconds from one search to the next."""
_MAX_KEYS = 64


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search has found."""

    keepers: tuple[Any, ...]
    """Other peers that keep the records, nearest first."""
    ours: bool
    """Whether we keep them, too."""
    places: frozenset[Any]
    """Of all peers that it has found, ours included."""
    node: Any
    """The DHT node that has searched: a new one knows nobody yet."""


@dataclass
class _Entry:
    found: Found
    at: float
    looks: int


class Keepers:
    """Remembers the keepers of each key."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def remember(self, key: str, found: Found, look: bool) -> None:
        """A search has ended. ``look``: it belongs to a look, which asks all keepers."""
        before = self._entries.pop(key, None)
        if not found.keepers:
            return
        looks = 1 if look else before.looks if before is not None else LOOKS
        self._entries[key] = _Entry(found, self._clock(), looks)
        if len(self._entries) > _MAX_KEYS:
            self._entries.popitem(last=False)

    def forget(self, key: str) -> None:
        """A keeper was silent."""
        self._entries.pop(key, None)

    def known(self, key: str, near: Collection[Any], node: Any) -> Found | None:
        """What holds still of the last search; None if one is due.

        ``near``: places of the nearest peers that ``node`` has met.
        """
        entry = self._entries.get(key)
        if (
            entry is None
            or entry.found.node is not node
            or self._clock() >= entry.at + FOUND_FOR
            or not entry.found.places.issuperset(near)
        ):
            return None
        return entry.found

    def next_asked(self, key: str, near: Collection[Any], node: Any) -> tuple[Any, ...]:
        """The keepers that a look asks now; empty if it has to search."""
        found = self.known(key, near, node)
        if found is None or (entry := self._entries[key]).looks >= LOOKS:
            return ()
        first, count = (entry.looks - 1) * ASKED, len(found.keepers)
        entry.looks += 1
        return tuple(found.keepers[(first + one) % count] for one in range(min(ASKED, count)))
