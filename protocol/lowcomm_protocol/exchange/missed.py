"""Outer steps that a member of a group has missed, and takes over from another one.

Where all must hold the same slow weights (``consensus = 0``), a member that missed an exchange
would make all realign, which carries fp32. The means of the last exchanges are small beside that:
members keep them as they travelled, and hand them over. A member that takes the same steps holds
the same bits, the outer momentum included.

A member that claims slow weights which nobody else holds, and can be handed no step, is stranded
where all peers meet in one group. It contributes, but the others do not realign for it: it copies a
state.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from lowcomm_protocol.matching import Offer

KEPT = 4
"""Outer steps of a fragment that a member keeps for others, at most."""
MARK_BYTES = 8
UNKNOWN = bytes(32)
"""In place of the digest of slow weights where a member has failed to take over what it lacks: as
nobody knows it, the member is stranded."""
TRIES = 2
"""Exchanges in which a member may fail so before it says that."""


def kept(coded: int, whole: int) -> int:
    """How many outer steps are kept, of so many bytes each, of a fragment of ``whole`` bytes in
    fp32: with a contribution they are no larger than what a realignment sends."""
    return max(0, min(KEPT, whole // coded - 1))


@dataclass(frozen=True)
class Lacking:
    """Members of a group that lack the last outer steps of most of them, and what they take over:
    the means of those steps, in the bits that they travelled in."""

    steps: Mapping[str, int]
    """How many steps each lacks."""
    donors: Mapping[str, str]
    """Who hands them over to each."""
    stranded: frozenset[str]
    """Members that lack steps which nobody can hand over."""
    slow_digest: bytes
    """Of what they hold then, as most do now."""
    momentum_digest: bytes

    def receivers(self, donor: str) -> tuple[str, ...]:
        """Whom a member hands steps over to."""
        return tuple(peer for peer, other in self.donors.items() if other == donor)


def lacking(offers: Mapping[str, Offer], *, is_whole: bool = False) -> Lacking | None:
    """Who lacks outer steps, by the offers of all members; None where nobody does, or where it
    can't be mended so. ``is_whole``: whether the swarm is no larger than a group.

    Two or more must hold the same, and be at least half of all that are not stranded: the others
    take their word for what they had missed.
    """
    states = {peer: (one.slow_digest, one.momentum_digest) for peer, one in offers.items()}
    counts = Counter(states.values())
    most = max(counts.values())
    if most == len(offers) or most < 2:
        return None
    for state in sorted(state for state, count in counts.items() if count == most):
        found = _led_to(state, states, offers)
        # A liar is alone with what it claims. Others that differ and hold the same are heard.
        is_alone = all(is_whole and counts[states[peer]] == 1 for peer in found.stranded)
        if is_alone and 2 * most >= len(offers) - len(found.stranded):
            return found
    return None


def _led_to(
    state: tuple[bytes, bytes],
    states: Mapping[str, tuple[bytes, bytes]],
    offers: Mapping[str, Offer],
) -> Lacking:
    free = sorted(peer for peer, held in states.items() if held == state)
    # Another one each time: if it fails, the next may not.
    first = max(one.round for one in offers.values()) % len(free)
    free = free[first:] + free[:first]
    steps, donors, stranded = dict[str, int](), dict[str, str](), set[str]()
    for peer in sorted(peer for peer, held in states.items() if held != state):
        mark = state_mark(*states[peer])
        donor = next((one for one in free if mark in offers[one].previous), None)
        if donor is None:
            stranded.add(peer)
            continue
        free.remove(donor)
        previous = offers[donor].previous
        steps[peer], donors[peer] = len(previous) - previous.index(mark), donor
    return Lacking(steps, donors, frozenset(stranded), *state)


def state_mark(slow_digest: bytes, momentum_digest: bytes) -> bytes:
    """What tells one state of a fragment from its other ones, in `MARK_BYTES`."""
    return sha256(slow_digest + momentum_digest).digest()[:MARK_BYTES]
