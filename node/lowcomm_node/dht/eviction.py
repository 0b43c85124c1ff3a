"""Which record gives way where a storer has no more room. Pure: who brought what is an argument.

    own         what we publish ourselves               never gives way
    answered    its peer has answered us, or called us with its credential, within the last hour
    brought     its own peer stored it here, over a connection that proves its peer id
    told        somebody else brought it: one connection can bring thousands

The lowest of these goes first. Of equals the network that holds the most bytes gives way (a /24 of
IPv4, a /48 of IPv6, or a relay; within it an address or a /64; then whoever signed most), and there
the newest record: so a flood pushes out itself, and who has been here for long stays. A record
keeps its rank and age as long as it is renewed.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum


class Rank(IntEnum):
    """How much a storer knows of the peer that a record speaks of."""

    TOLD = 0
    BROUGHT = 1
    ANSWERED = 2
    OWN = 3


@dataclass(frozen=True)
class Bringer:
    """Who stores a record here."""

    peer_id: str
    networks: tuple[str, ...]
    """Where its connection comes from, the narrowest first."""


@dataclass(frozen=True)
class Kept:
    """What is known of a stored value, or of all values under one key."""

    name: Hashable
    size: int
    """Bytes."""
    rank: Rank
    owner: str
    """Who signed it."""
    networks: tuple[str, ...]
    since: int
    """In which order it came."""

    def renewed(self, by: "Kept") -> "Kept":
        """The same after its owner has renewed it: nobody can lower its rank by storing it
        again."""
        better = by if by.rank > self.rank else self
        return replace(by, rank=better.rank, networks=better.networks, since=self.since)


def first_to_go(entries: Iterable[Kept]) -> Kept | None:
    """The entry that gives way before all others; None if there is none but our own."""
    left = [entry for entry in entries if entry.rank < Rank.OWN]
    if not left:
        return None
    lowest = min(entry.rank for entry in left)
    left = [entry for entry in left if entry.rank == lowest]
    for holder_of in (_widest, _narrowest):
        held = Counter[str]()
        for entry in left:
            held[holder_of(entry)] += entry.size
        most = max(held.values())
        left = [entry for entry in left if held[holder_of(entry)] == most]
    # Each peer signs one record, a creator as many runs as it likes
    signed = Counter(entry.owner for entry in left)
    most = max(signed.values())
    left = [entry for entry in left if signed[entry.owner] == most]
    return max(left, key=lambda entry: entry.since)


def those_to_go(new: Kept, kept: Iterable[Kept], excess: int) -> list[Kept] | None:
    """What gives way so that ``excess`` bytes become free; None if the new one has to."""
    left, gone, freed = list(kept), list[Kept](), 0
    while freed < excess:
        first = first_to_go([*left, new])
        if first is None or first is new:
            return None
        left.remove(first)
        gone.append(first)
        freed += first.size
    return gone


def _widest(entry: Kept) -> str:
    return entry.networks[-1] if entry.networks else ""


def _narrowest(entry: Kept) -> str:
    return entry.networks[0] if entry.networks else ""
