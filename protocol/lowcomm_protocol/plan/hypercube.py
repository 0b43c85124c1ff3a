"""hypercube: one permutation for a cycle of log2(n) rounds.

In round r of a cycle the peer at place k meets the one at place ``k xor 2**r``. After a cycle
everybody has met, directly or through others, the weights of all (exactly, where n is a power of
two).
"""

from lowcomm_protocol.plan.pairing import Line, Meeting, Pairing


class Hypercube(Pairing):
    """See the file."""

    def partner(self, meeting: Meeting, me: str) -> str | None:
        """See Pairing."""
        rounds = max(1, (len(meeting.peers) - 1).bit_length())
        cycle, level = divmod(meeting.round, rounds)
        return mirrored(meeting.line(cycle), me, 1 << level)


def mirrored(line: Line, me: str, bit: int) -> str | None:
    """The peer across ``bit`` from ``me``.

    Those who have none there make pairs among themselves, in order.
    """
    place = line.places[me]
    if place ^ bit < len(line.peers):
        return line.peers[place ^ bit]
    left = [peer for other, peer in enumerate(line.peers) if other ^ bit >= len(line.peers)]
    place = left.index(me) ^ 1
    return left[place] if place < len(left) else None


PAIRING = Hypercube()
