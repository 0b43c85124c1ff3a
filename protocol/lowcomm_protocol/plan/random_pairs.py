"""random: a permutation for each round.

Its first peer meets the second, the third the fourth (NoLoCo, section 3).
"""

from lowcomm_protocol.plan.hypercube import mirrored
from lowcomm_protocol.plan.pairing import Meeting, Pairing


class RandomPairs(Pairing):
    """See the file."""

    def partner(self, meeting: Meeting, me: str) -> str | None:
        """See Pairing."""
        return mirrored(meeting.line(meeting.round), me, 1)


PAIRING = RandomPairs()
