"""Whom to meet: the order of candidates, and whether to accept an offer, with the reason.

All peers whose views are equal draw the same permutation: it sorts the hashes of peer ids. Groups
are consecutive slices of it. In pairs a strategy (``sync.pairing``) draws the partner:

    hypercube   one permutation for a cycle of log2(n) rounds. In round r of a cycle the peer at
                place k meets the one at place ``k xor 2**r``. After a cycle everybody has met,
                directly or through others, the weights of all (exactly, where n is a power of two)
    random      a permutation for each round: its first peer meets the second, the third the fourth
                (NoLoCo, section 3)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import overload

from lowcomm_protocol.spec.names import PAIRINGS


class Refusal(StrEnum):
    """Why an offer is refused; the value travels and is shown."""

    BUSY = "busy"
    CROSSED = "crossed"
    TOO_SOON = "too-soon"
    FULL = "full"
    TOO_SLOW = "too-slow"
    NOT_TRAINING = "not-training"
    OTHER_PROTOCOL = "other-protocol"
    OTHER_RUN = "other-run"
    OTHER_PLAN = "other-plan"
    OTHER_CODEC = "other-codec"
    UNKNOWN_FRAGMENT = "unknown-fragment"
    IMPLAUSIBLE_STEP = "implausible-step"
    NOT_ALLOWED = "not-allowed"
    NOT_TRUSTED = "not-trusted"


REFUSAL_TEXT: dict[Refusal, str] = {
    Refusal.BUSY: "is busy with this fragment",
    Refusal.CROSSED: "has called us at the same moment",
    Refusal.TOO_SOON: "has merged this fragment a few steps ago",
    Refusal.FULL: "its buffer is full",
    Refusal.TOO_SLOW: "would wait too long: its steps and limits on traffic or ours need more"
    " seconds than an exchange may take there",
    Refusal.NOT_TRAINING: "is not training now",
    Refusal.OTHER_PROTOCOL: "speaks another protocol version",
    Refusal.OTHER_RUN: "takes part in another run",
    Refusal.OTHER_PLAN: "cuts the model in another way",
    Refusal.OTHER_CODEC: "uses another codec",
    Refusal.UNKNOWN_FRAGMENT: "does not know this fragment",
    Refusal.IMPLAUSIBLE_STEP: "does not believe our swarm step",
    Refusal.NOT_ALLOWED: "does not know us yet",
    Refusal.NOT_TRUSTED: "leaves us out for a while, after a contribution that it could not use",
}


@dataclass(frozen=True)
class Offer:
    """What one side brings to an exchange, checked for size and type."""

    protocol: int
    run_id: str
    plan: str
    codec: str
    fragment: int
    round: int
    swarm_step: int
    steps: int
    tokens: int
    version: int
    slow_digest: bytes
    seconds: int = 0
    """Needed to the end of a step, for coding, and for contents within the limits of its line."""
    momentum_digest: bytes = b""
    previous: tuple[bytes, ...] = ()
    """In a group: `state_mark` before each of its last outer steps, the oldest first."""


KEPT = 32
"""Permutations that are remembered: a peer asks again for one in each round of a cycle."""


@dataclass(frozen=True)
class PeerOrder:
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

    def line(self, number: int) -> PeerOrder:
        """The permutation number ``number`` of these peers for this fragment."""
        return _line(self.seed, self.fragment, number, self.peers)


Pairing = Callable[[Meeting, str], str | None]
"""Whom a peer meets first: its partner, or None for the one that is left over. Peers with equal
views must choose each other."""


class Candidates(Sequence[str]):
    """The partner, then everybody else in an order of ``me`` alone, drawn on demand."""

    def __init__(self, meeting: Meeting, me: str, partner: str | None) -> None:
        self._meeting = meeting
        self._me = me
        self._partner = partner

    def __len__(self) -> int:
        return len(self._meeting.peers) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if index == 0 and self._partner is not None:
            return self._partner
        return self._all[index]

    @cached_property
    def _all(self) -> list[str]:
        partner = [] if self._partner is None else [self._partner]
        others = self._meeting.peers.difference((self._me, *partner))
        where = f"{self._meeting.fragment}/{self._meeting.round}"
        return partner + sorted(
            others, key=lambda peer: sha256(f"{self._me}/{peer}/{where}".encode()).digest()
        )


def candidates(
    seed: int,
    fragment: int,
    round_: int,
    me: str,
    peers: Iterable[str],
    group: int,
    pairing: str = "hypercube",
) -> Sequence[str]:
    """Peers that ``me`` should meet, best first.

    In pairs (``group`` = 2) the partner by ``pairing``, then the others in an order of our own. In
    larger groups the rest of our slice; a group of 1 meets nobody.
    """
    meeting = Meeting(seed, fragment, round_, _shared(frozenset((me, *peers))))
    if group == 2:
        partner: Pairing = PAIRINGS[pairing]
        return Candidates(meeting, me, partner(meeting, me))
    line = meeting.line(round_)
    place = line.places[me]
    start = place - place % group
    return [peer for peer in line.peers[start : start + group] if peer != me]


def consider(
    theirs: Offer, ours: Offer, fragments: int, hindrances: Iterable[tuple[bool, Refusal]]
) -> Refusal | None:
    """Whether we accept an offer: None, or the first reason against it; ``hindrances``: those of
    this moment, each with whether it applies."""
    reasons = (
        (theirs.protocol != ours.protocol, Refusal.OTHER_PROTOCOL),
        (theirs.run_id != ours.run_id, Refusal.OTHER_RUN),
        (theirs.plan != ours.plan, Refusal.OTHER_PLAN),
        (theirs.codec != ours.codec, Refusal.OTHER_CODEC),
        (theirs.fragment >= fragments, Refusal.UNKNOWN_FRAGMENT),
        *hindrances,
    )
    return next((refusal for applies, refusal in reasons if applies), None)


def must_realign(ours: Offer, others: Iterable[Offer]) -> bool:
    """Whether slow weights differ that should be equal; every member sees it alike."""
    return any(theirs.slow_digest != ours.slow_digest for theirs in others)


def keeps_momentum(ours: Offer, others: Iterable[Offer]) -> bool:
    """Whether a realignment leaves the outer momentum as it is: all say that theirs is the same.

    Only then do they hold equal bits afterwards. Where a member has missed an outer step it
    differs, and so all begin with zeros.
    """
    return bool(ours.momentum_digest) and all(
        theirs.momentum_digest == ours.momentum_digest for theirs in others
    )


def wins_crossing(me: str, other: str) -> bool:
    """Of two calls that cross, the one of the smaller peer id goes on."""
    return me < other


def lot(where: str, peer: str) -> bytes:
    """What a peer has drawn somewhere: all see the same."""
    return sha256(f"{where}/{peer}".encode()).digest()


def order(seed: int, fragment: int, number: int, peers: Iterable[str]) -> list[str]:
    """The permutation number ``number`` of ``peers`` for one fragment, the same at every peer."""
    prefix = f"{seed}/{fragment}/{number}/".encode()
    return sorted(set(peers), key=lambda peer: sha256(prefix + peer.encode()).digest())


@lru_cache(maxsize=KEPT)
def _shared(peers: frozenset[str]) -> frozenset[str]:
    # Thousands of simulated peers that know all would hold a copy each.
    return peers


@lru_cache(maxsize=KEPT)
def _line(seed: int, fragment: int, number: int, peers: frozenset[str]) -> PeerOrder:
    line = tuple(order(seed, fragment, number, peers))
    return PeerOrder(line, {peer: place for place, peer in enumerate(line)})


def hypercube(meeting: Meeting, me: str) -> str | None:
    """The partner across the corners of a hypercube, a dimension each round."""
    rounds = max(1, (len(meeting.peers) - 1).bit_length())
    cycle, level = divmod(meeting.round, rounds)
    return mirrored(meeting.line(cycle), me, 1 << level)


def random_pairs(meeting: Meeting, me: str) -> str | None:
    """The neighbour in a permutation of each round."""
    return mirrored(meeting.line(meeting.round), me, 1)


def mirrored(line: PeerOrder, me: str, bit: int) -> str | None:
    """The peer across ``bit`` from ``me``; those who have none there make pairs, in order."""
    place = line.places[me]
    if place ^ bit < len(line.peers):
        return line.peers[place ^ bit]
    left = [peer for other, peer in enumerate(line.peers) if other ^ bit >= len(line.peers)]
    place = left.index(me) ^ 1
    return left[place] if place < len(left) else None
