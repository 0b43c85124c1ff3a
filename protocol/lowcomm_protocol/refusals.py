"""Counts refusals by reason, for ``status``.

Only counts are kept, never what was refused, so a flood of refusals costs no memory.
"""

from collections import Counter
from enum import StrEnum


class Reason(StrEnum):
    """Why a record, a call or a connection is refused."""

    TOO_LARGE = "too-large"
    MALFORMED = "malformed"
    OTHER_VERSION = "other-version"
    BAD_SIGNATURE = "bad-signature"
    EXPIRED = "expired"
    FROM_FUTURE = "from-the-future"
    LIVES_TOO_LONG = "lives-too-long"
    MISPLACED = "misplaced"
    """Signed for another peer, run or place than the one that it appeared under."""
    REPLAYED = "replayed"
    MISSING = "missing"
    """A call without a credential."""
    TOO_MANY = "too-many"
    OTHER_CERTIFICATE = "other-certificate"
    """A peer presents another certificate than the one in its signed record."""
    NOT_INVITED = "not-invited"
    INVITE_EXPIRED = "invite-expired"
    INVITE_USED_UP = "invite-used-up"
    NOT_LISTED = "not-listed"
    REMOVED = "removed"
    NO_WORK = "no-work"
    """No proof of work, or too little, in a run that asks for one."""


class What(StrEnum):
    """What is refused."""

    RECORD = "record"
    """From the DHT or a peer, or to be stored here."""
    CALL = "call"
    CONNECTION = "connection"


class Refusals:
    """Counts refusals, for all rooms that refuse."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[What, Reason]] = Counter()

    def count(self, what: What, reason: Reason) -> None:
        """Count one refusal."""
        self._counts[what, reason] += 1

    def counts(self) -> dict[str, int]:
        """The counts, such as ``{"call.replayed": 2}``, sorted by name."""
        return {f"{what}.{reason}": count for (what, reason), count in sorted(self._counts.items())}
