"""Which record is evicted when a storer is full. Pure: the origin of a record is an argument.

    own         published by ourselves                 never evicted
    answered    its peer has answered us, or called us with its credential, within the last hour
    brought     its own peer stored it here, over a connection that proves its peer id
    told        another peer brought it: one connection can bring thousands

The lowest rank goes first. Among equals the network that holds most bytes loses (a /24 of IPv4, a
/48 of IPv6, or a relay; within it an address or a /64; then the signer of most records), and of its
records the newest goes. So a flood evicts itself, and old records stay. A record keeps its rank and
age as long as it is renewed.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum


class Rank(IntEnum):
    """How well a storer knows the peer of a record."""

    TOLD = 0
    BROUGHT = 1
    ANSWERED = 2
    OWN = 3


@dataclass(frozen=True)
class Bringer:
    """The peer that stores a record here."""

    peer_id: str
    networks: tuple[str, ...]
    """The networks of its connection, narrowest first."""


@dataclass(frozen=True)
class Kept:
    """What is known of a stored value, or of all values under one key."""

    name: Hashable
    size: int
    """Bytes."""
    rank: Rank
    owner: str
    """Its signer."""
    networks: tuple[str, ...]
    since: int
    """Its position in the order of arrival."""

    def renewed(self, by: "Kept") -> "Kept":
        """The entry after a renewal. Storing a record again can't lower its rank."""
        better = by if by.rank > self.rank else self
        return replace(by, rank=better.rank, networks=better.networks, since=self.since)


def first_to_go(entries: Iterable[Kept]) -> Kept | None:
    """The first entry to evict; None if only our own are left."""
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
    # A peer signs one record, but a creator any number of runs.
    signed = Counter(entry.owner for entry in left)
    most = max(signed.values())
    left = [entry for entry in left if signed[entry.owner] == most]
    return max(left, key=lambda entry: entry.since)


def those_to_go(new: Kept, kept: Iterable[Kept], excess: int) -> list[Kept] | None:
    """The entries to evict to free ``excess`` bytes; None if the new one itself has to go."""
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
