"""Proof of work: what an identity costs in an open run whose creator asks for it (``work = BITS``).

    proof = week (4 bytes) | nonce (8 bytes), big-endian
    scrypt("lowcomm/work" 00 | run id | public key | week,
           salt = nonce, N = 1024, r = 8, p = 1, 32 bytes)
    must begin with BITS zero bits

Weeks are counted in UTC from 1970-01-01 00:00, a Thursday. A proof is good in its week and for
OVERLAP after it, so that nobody drops out when the week ends. To find one takes 2**BITS hashes on
average; to check one takes a single hash.

Why scrypt with 1 MiB: a graphics card computes SHA-256 some 10,000 times as fast as a core does
from Python, so what costs a volunteer a minute would cost a stranger with a card nothing. Scrypt
narrows that to some hundreds, because each hash has to move two megabytes: they fit the cache of a
core, and thousands of them do not fit that of a card (SECURITY.md has the numbers, and what is only
reckoned).
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from lowcomm_protocol.errors import AdmissionError, Reason
from lowcomm_protocol.identity import public_key_of

WEEK = 604_800.0
OVERLAP = 86_400.0
"""Seconds that a proof stays valid after its week."""
EARLY = 60.0
"""Seconds that a proof may precede its week, for clocks that differ."""
MAX_BITS = 16
"""The most that a creator may ask for: 65,536 hashes, minutes of one core."""
PROOF_BYTES = 12
MAX_PROVED = 8192
MAX_FRESH = 100
"""Proofs hashed per second: invalid ones must not take more than a third of a core."""
_N, _R, _P = 1024, 8, 1
_MEMORY = 4 * 1024**2


@dataclass(frozen=True)
class Proof:
    """What a peer shows."""

    week: int
    nonce: int

    def to_bytes(self) -> bytes:
        """As sent in records and credentials."""
        return self.week.to_bytes(4, "big") + self.nonce.to_bytes(8, "big")


def week_of(now: float) -> int:
    """The number of the week of Unix time ``now``."""
    return int(now // WEEK)


def zero_bits(run_id: str, peer_id: str, proof: Proof) -> int:
    """The number of leading zero bits of a proof's hash. Takes one hash."""
    statement = (
        b"lowcomm/work\0"
        + bytes.fromhex(run_id)
        + public_key_of(peer_id)
        + proof.week.to_bytes(4, "big")
    )
    salt = proof.nonce.to_bytes(8, "big")
    digest = hashlib.scrypt(statement, salt=salt, n=_N, r=_R, p=_P, maxmem=_MEMORY, dklen=32)
    return 256 - int.from_bytes(digest, "big").bit_length()


def read_proof(data: bytes) -> Proof:
    """Decode a proof. Raises AdmissionError if it is none."""
    if not data:
        raise AdmissionError(
            "This run asks for a proof of work, and none was shown: a node finds one by itself "
            "when it joins.",
            reason=Reason.NO_WORK,
        )
    if len(data) != PROOF_BYTES:
        raise AdmissionError(
            f"A proof of work has {PROOF_BYTES} bytes, not {len(data)}.", reason=Reason.MALFORMED
        )
    return Proof(int.from_bytes(data[:4], "big"), int.from_bytes(data[4:], "big"))


def is_good_in(week: int, now: float) -> bool:
    """Whether a proof of this week is valid at Unix time ``now``."""
    return week * WEEK - EARLY <= now < (week + 1) * WEEK + OVERLAP


class Proofs:
    """Checks proofs with a bounded cache: each is shown with every record and call."""

    def __init__(self) -> None:
        self._good: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()
        self._second = 0
        self._fresh = 0

    def check(self, data: bytes, run_id: str, peer_id: str, bits: int, now: float) -> None:
        """Raise AdmissionError unless a proof is valid for this run and peer at Unix time
        ``now``."""
        proof = read_proof(data)
        if not is_good_in(proof.week, now):
            early = proof.week * WEEK > now
            raise AdmissionError(
                f"The proof of work of {peer_id} is for week {proof.week}, and this is week "
                f"{week_of(now)}: "
                f"{'set both clocks right' if early else 'it has to find another'}.",
                reason=Reason.FROM_FUTURE if early else Reason.EXPIRED,
            )
        key = (run_id, peer_id, data)
        if key not in self._good:
            self._hash(proof, run_id, peer_id, bits, now)
            self._good[key] = None
            if len(self._good) > MAX_PROVED:
                self._good.popitem(last=False)

    def _hash(self, proof: Proof, run_id: str, peer_id: str, bits: int, now: float) -> None:
        if int(now) != self._second:
            self._second = int(now)
            self._fresh = 0
        if self._fresh >= MAX_FRESH:
            raise AdmissionError(
                f"More than {MAX_FRESH} proofs of work came within a second: show it again in a "
                "moment.",
                reason=Reason.TOO_MANY,
            )
        self._fresh += 1
        found = zero_bits(run_id, peer_id, proof)
        if found < bits:
            raise AdmissionError(
                f"The proof of work of {peer_id} has {found} of {bits} bits: it is refused.",
                reason=Reason.NO_WORK,
            )
