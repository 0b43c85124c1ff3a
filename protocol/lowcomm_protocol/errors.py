"""Errors and reasons of refusals. The node adds its own errors in ``lowcomm_node.errors``."""

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


class What(StrEnum):
    """What is refused."""

    RECORD = "record"
    """From the DHT or a peer, or to be stored here."""
    CALL = "call"
    CONNECTION = "connection"


class Refusals:
    """Counts refusals by reason, for ``status``; a flood of them costs no memory."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[What, Reason]] = Counter()

    def count(self, what: What, reason: Reason) -> None:
        """Count one refusal."""
        self._counts[what, reason] += 1

    def counts(self) -> dict[str, int]:
        """The counts, such as ``{"call.replayed": 2}``, sorted by name."""
        return {f"{what}.{reason}": count for (what, reason), count in sorted(self._counts.items())}


class Offence(StrEnum):
    """What a peer did to another, by severity (peers/trust.py)."""

    STUMBLE = "stumble"
    """Happens to honest peers, too: ``Trust.stumbled``."""
    LIGHT = "light"
    HEAVY = "heavy"


MAX_REASON = 200
"""Characters of a reason that another peer gives, or gives cause for."""


def in_words(reason: str) -> str:
    """A printable reason of another peer, whose text is untrusted."""
    return "".join(char if char.isprintable() else " " for char in reason[:MAX_REASON])


class LowcommError(Exception):
    """Any error that lowcomm raises on purpose; ``reason``: how a refusal is counted."""

    reason = Reason.MALFORMED

    def __init__(self, *args: object, reason: Reason | None = None) -> None:
        super().__init__(*args)
        if reason is not None:
            self.reason = reason


class SpecError(LowcommError):
    """A run specification that is not valid, or settings that do not work together."""


class VersionError(LowcommError):
    """A peer, record or run specification of another protocol version."""

    reason = Reason.OTHER_VERSION


class SignatureError(LowcommError):
    """A signature, fingerprint or peer id that does not match."""

    reason = Reason.BAD_SIGNATURE


class RecordError(LowcommError):
    """A record that is malformed, stale, or claims too long a life."""


class AdmissionError(LowcommError):
    """A peer that may not take part in the run: not listed, not invited, or removed."""

    reason = Reason.NOT_INVITED


class PlanError(LowcommError):
    """A fragment plan that can't be made, or that does not fit a model."""


class CodecError(LowcommError):
    """Bytes or a vector that a codec can't take."""


class ImplausibleError(LowcommError):
    """A valid contribution that no honest peer sends; ``deed``: charged to its sender."""

    def __init__(self, message: str, deed: Offence | None = Offence.HEAVY) -> None:
        super().__init__(message)
        self.deed = deed


class ProtocolViolation(LowcommError):
    """A peer did what the protocol does not allow; the message quotes nothing of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message[:MAX_REASON])
