"""The view: the peers that we keep links to, and others that we know by their records alone.

    record ──► passive ── it answers us, and takes the link ──► active ── silent ──► passive
                              it asks us, and there is room ──►

*Active* peers are kept alive, hear from us what is new, and come first in line for exchanges.
*Passive* ones replace those that fail. In a swarm of up to ACTIVE peers all are active, so views
are equal. In larger ones a view is a random part, kept so by what calls carry anyway:

- each call hands over SHUFFLED records of active peers, and the oldest passive ones give way
  (Cyclon, Voulgaris et al. 2005)
- links are mutual, and an active peer that fails is replaced by a passive one that answers
  (HyParView, Leitão et al. 2007)

Keys cost nothing and addresses do. So no place (a network, or a relay) gets more links than its
share of the places that we know, links that have lasted are kept, and one link in LISTED comes
from the DHT, whatever others hand over (Heilman et al. 2015; Bortnikov et al. 2009). No clock:
time is an argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import ceil, inf

ACTIVE = 48
"""Links that a peer looks for."""
SLACK = 8
"""Links beyond these that others may ask for."""
PASSIVE = 208
RENEWED = PASSIVE / 16 / 60.0
"""Passive peers a second that others may replace in a full view."""
SHUFFLED = 6
"""Records that one side of a call hands over."""
OF_PLACE, OF_RELAY = 2, 12
"""Links of one network, and through one relay, where others are known; one of a network where
those of twice ACTIVE are."""
LISTED = 4
"""One link in this number comes from the DHT."""
DISPLACE_EVERY = 1.0
"""Least seconds between two links that give way to a newcomer's."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A peer of the view."""

    places: tuple[str, ...]
    """Networks of its addresses, or its relays."""
    listed: bool
    """Whether the DHT lists it, or others have only handed it over."""
    failed: bool = False
    """Whether it gives way first, since it did not answer."""


class View:
    """The view of one peer; ``seed`` makes its choices differ from those of others."""

    def __init__(self, seed: str, in_cell: Callable[[str], bool] = lambda peer: False) -> None:
        """``in_cell``: whether a peer is of our cell: all of these have links, as far as places
        allow."""
        self.active: dict[str, Neighbour] = {}
        """Oldest links first."""
        self.passive: OrderedDict[str, Neighbour] = OrderedDict()
        """In the order in which they give way."""
        self._seed = seed
        self._in_cell = in_cell
        self._turn = 0
        self._links: dict[str, int] = {}
        """Links by place."""
        self._known: dict[str, int] = {}
        """Passive peers by place."""
        self._places: dict[str, int] = {}
        """Both."""
        self._may_renew, self._counted = float(PASSIVE), -inf
        self._displaced = -inf

    def __contains__(self, peer: str) -> bool:
        return peer in self.active or peer in self.passive

    @property
    def is_partial(self) -> bool:
        """Whether there are more peers than links."""
        return len(self.active) + len(self.passive) > ACTIVE

    @property
    def wanted(self) -> int:
        """Links that we look for, beside those that we have."""
        return max(0, ACTIVE - len(self.active))

    def wants(self, peer: str) -> bool:
        """Whether we look for a link to this peer."""
        return self.wanted > 0 or self._in_cell(peer)

    def learn(
        self, peer: str, places: Sequence[str], now: float, listed: bool, called: bool = False
    ) -> bool:
        """Take in a peer with a valid record. Returns whether it is in the view.

        ``listed``: whether the DHT lists it, or it called us; ``called``: whether it did, so that
        we must know it.
        """
        kept = self.active if peer in self.active else self.passive
        if (known := kept.get(peer)) is not None:
            if listed and not known.listed:
                kept[peer] = replace(known, listed=True)
        else:
            if len(self.passive) >= PASSIVE:
                if not called and not self._may_replace(now):
                    return False
                self.forget(self._weakest_passive())
            self._add_passive(peer, Neighbour(tuple(places), listed))
        return True

    def is_candidate(self, peer: str) -> bool:
        """Whether a passive peer may be asked for a link now."""
        known = self.passive.get(peer)
        if known is None or not self.wants(peer):
            return False
        is_known_well = self._in_cell(peer) or known.listed or self._has_room_for_gossip()
        return not self.is_partial or (
            is_known_well and not self._is_crowded(known.places, self._in_cell(peer))
        )

    def crowd(self, peer: str) -> int:
        """Links to the places of a passive peer: candidates with fewer come first."""
        known = self.passive.get(peer)
        return max((self._links.get(place, 0) for place in known.places), default=0) if known else 0

    def link(self, peer: str, now: float, asked: bool = False, wanted: int = ACTIVE) -> bool:
        """Make a peer of the view active. Returns whether it is.

        ``asked``: it asks for the link, so it may get one of SLACK; ``wanted``: how many links it
        looks for. One that has less than half may get the link of a younger peer: if all might,
        links would only change hands.
        """
        if peer in self.active:
            return True
        known = self.passive.get(peer)
        if known is None:
            return False
        in_cell = self._in_cell(peer)
        is_crowded = self.is_partial and self._is_crowded(known.places, in_cell)
        if is_crowded or len(self.active) >= ACTIVE + (SLACK if asked else 0):
            displaced = None
            if in_cell or (asked and wanted > ACTIVE // 2):
                displaced = self._weakest(now, known.places if is_crowded else (), in_cell)
            if displaced is None:
                return False
            self._displaced = now
            self.unlink(displaced)
        self.forget(peer)
        self.active[peer] = replace(known, failed=False)
        self._count(self._links, known.places, 1)
        return True

    def unlink(self, peer: str, failed: bool = False) -> None:
        """Make an active peer passive; one that has ``failed`` gives way first."""
        known = self.active.pop(peer, None)
        if known is not None:
            self._count(self._links, known.places, -1)
            self._add_passive(peer, known)
        if failed and peer in self.passive:
            self.passive[peer] = replace(self.passive[peer], failed=True)
            self.passive.move_to_end(peer, last=False)
        while len(self.passive) > PASSIVE:
            self.forget(next(iter(self.passive)))

    def forget(self, peer: str) -> None:
        """Remove a peer from the view."""
        for kept, counts in ((self.active, self._links), (self.passive, self._known)):
            if (known := kept.pop(peer, None)) is not None:
                self._count(counts, known.places, -1)

    def sample(self, but: str) -> list[str]:
        """Active peers to hand over to another one."""
        peers, lot = list(self.active), int.from_bytes(self._lots()(""))
        count = min(SHUFFLED + 1, len(peers))
        for place in range(count):  # the beginning of a permutation
            lot, other = divmod(lot, len(peers) - place)
            peers[place], peers[place + other] = peers[place + other], peers[place]
        return [peer for peer in peers[:count] if peer != but][:SHUFFLED]

    # rules

    def _add_passive(self, peer: str, known: Neighbour) -> None:
        self.passive[peer] = known
        self._count(self._known, known.places, 1)

    def _count(self, counts: dict[str, int], places: Sequence[str], change: int) -> None:
        for place in places:
            for counted in (counts, self._places):
                number = counted.get(place, 0) + change
                if number:
                    counted[place] = number
                else:
                    del counted[place]

    def _may_replace(self, now: float) -> bool:
        """Whether one more passive peer may be replaced now; counts it."""
        back = max(0.0, now - self._counted) * RENEWED
        self._may_renew, self._counted = min(float(PASSIVE // 4), self._may_renew + back), now
        if self._may_renew < 1.0:
            return False
        self._may_renew -= 1.0
        return True

    def _weakest_passive(self) -> str:
        """A passive peer that failed, or else the oldest of the place that has most of them."""
        first, most = next(iter(self.passive)), max(self._known.values(), default=0)
        if most <= 1 or self.passive[first].failed:
            return first
        return next(
            peer
            for peer, known in self.passive.items()
            if any(self._known[place] == most for place in known.places)
        )

    def _is_crowded(self, places: Sequence[str], in_cell: bool) -> bool:
        """Whether one of these places has its share of our links."""
        share, of_place = ceil((ACTIVE + SLACK) / max(1, len(self._places))), OF_PLACE
        if len(self._places) >= 2 * ACTIVE:
            of_place = 1  # so that few networks fill no views, however often they ask
        if in_cell:
            of_place = OF_PLACE  # beyond it groups would form without a part of the cell
        return any(
            self._links.get(place, 0) >= max(of_place if "/" in place else OF_RELAY, share)
            for place in places
        )

    def _has_room_for_gossip(self) -> bool:
        handed_over = sum(not known.listed for known in self.active.values())
        return handed_over < ACTIVE - ACTIVE // LISTED

    def _weakest(self, now: float, crowded: Sequence[str], in_cell: bool) -> str | None:
        """The link that gives way to a newcomer: of the younger half, or for one of our cell of all
        but the oldest third; where most others are, and in the same places if these are crowded."""
        if now - self._displaced < DISPLACE_EVERY:
            return None
        older, lots = len(self.active) // (3 if in_cell else 2), self._lots()
        younger = [
            one
            for one in list(self.active)[older:]
            if {*crowded} <= {*self.active[one].places} and not self._in_cell(one)
        ]

        def strength(peer: str) -> tuple[int, bytes]:
            crowd = max(
                (self._links.get(place, 0) for place in self.active[peer].places), default=0
            )
            return -crowd, lots(peer)

        weakest = min(younger, key=strength, default=None)
        # A link that has its network to itself gives way to none that asks, but of its cell: who
        # asks most would have them all.
        return weakest if crowded or in_cell or (weakest and strength(weakest)[0] < -1) else None

    def _lots(self) -> "Lots":
        self._turn += 1
        return Lots(f"{self._seed}/{self._turn}/")


@dataclass(frozen=True)
class Lots:
    """Draws a number for each peer."""

    seed: str

    def __call__(self, peer: str) -> bytes:
        return sha256(f"{self.seed}{peer}".encode()).digest()
