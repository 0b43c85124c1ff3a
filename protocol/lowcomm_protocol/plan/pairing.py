"""What a strategy of pairing is, and the permutations that it may draw from.

All peers whose views are equal draw the same permutation: it sorts the hashes of peer ids. Peers
whose views differ in one peer still agree on the order of the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

KEPT = 32
"""Permutations that are remembered: a peer asks again for one in each round of a cycle."""


@dataclass(frozen=True)
class Line:
    """A permutation of peers."""

    peers: tuple[str, ...]
    places: dict[str, int]
    """Of each peer in ``peers``."""


@dataclass(frozen=True)
class Meeting:
    """One sync of a fragment, as one peer sees it."""

    seed: int
    """Of the run."""
    fragment: int
    round: int
    peers: frozenset[str]
    """All that may meet, oneself included."""

    def line(self, number: int) -> Line:
        """The permutation number ``number`` of these peers for this fragment."""
        return _line(self.seed, self.fragment, number, self.peers)


class Pairing(ABC):
    """Whom a peer meets first. Peers with equal views must choose each other."""

    @abstractmethod
    def partner(self, meeting: Meeting, me: str) -> str | None:
        """The partner of ``me``; None for the one that is left over."""


def order(seed: int, fragment: int, number: int, peers: Iterable[str]) -> list[str]:
    """The permutation number ``number`` of ``peers`` for one fragment, the same at every peer."""
    prefix = f"{seed}/{fragment}/{number}/".encode()
    return sorted(set(peers), key=lambda peer: sha256(prefix + peer.encode()).digest())


@lru_cache(maxsize=KEPT)
def _line(seed: int, fragment: int, number: int, peers: frozenset[str]) -> Line:
    line = tuple(order(seed, fragment, number, peers))
    return Line(line, {peer: place for place, peer in enumerate(line)})
