"""Pairing of two machines by a code that one shows and the owner types at the other.

    lender                                             head, over TLS without a certificate
    Hello: name, key, nonce                         -> has TLS that certificate?
    is the proof that of the code?                  <- Proposal: name, key, nonce, proof
    Consent: proof                                  -> is the proof that of the code?

A proof is an HMAC under the code over both certificates and both nonces. A machine in the middle
shows certificates of its own, so the proofs that pass through it fit neither end. Guesses made
offline would have to go through 80 bits.
"""

import hmac
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError, LinkLost
from lowcomm_node.household.machines import (
    Hex32,
    Household,
    Key,
    Machine,
    Name,
    Strict,
    certificate_der,
)

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's: no letter looks like a digit."""
CHARACTERS, GROUP = 16, 4
LIFE = 600.0
"""Seconds for which a code holds."""
MAX_TRIES = 10
"""Wrong proofs, after which a code holds no longer."""
M = TypeVar("M", bound=Strict)


class Hello(Strict):
    """The beginning of a lender that shows a code."""

    name: Name
    key: Key
    nonce: Hex32


class Proposal(Hello):
    """The answer of a head."""

    proof: Hex32


class Consent(Strict):
    """The lender's proof."""

    proof: Hex32


def read(kind: type[M], line: bytes) -> M:
    """A message. Raises LinkLost, which quotes nothing of it."""
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        raise LinkLost(f"sent what is no {kind.__name__.lower()}") from None


def draw_code() -> str:
    """A new code, in groups."""
    groups = CHARACTERS // GROUP
    return "-".join("".join(secrets.choice(ALPHABET) for _ in range(GROUP)) for _ in range(groups))


def read_code(text: str) -> str:
    """A code as its owner types it. Raises ConfigError."""
    plain = text.upper().translate(str.maketrans("OIL", "011", " -\t"))
    if len(plain) != CHARACTERS or not set(plain) <= set(ALPHABET):
        raise ConfigError(
            f"A code has {CHARACTERS} letters and digits, such as {draw_code()}: type the one that "
            "`lowcomm-node lend --pair` shows."
        )
    return plain


def proofs(code: str, hello: Hello, key: str, nonce: str) -> tuple[str, str]:
    """The proofs of head and lender; ``key`` and ``nonce``: of the head."""
    ends = (sha256(certificate_der(one)).digest() for one in (hello.key, key))
    text = b"".join(ends) + bytes.fromhex(hello.nonce + nonce)

    def prove(side: bytes) -> str:
        return hmac.new(
            code.encode(), b"lowcomm pairing\0" + side + b"\0" + text, sha256
        ).hexdigest()

    return prove(b"head"), prove(b"lender")


def make_hello(household: Household) -> Hello:
    """The beginning of this machine as a lender."""
    return Hello(name=household.name, key=household.key, nonce=secrets.token_hex(32))


class Codes:
    """The code that a lender shows. Times are seconds of one clock."""

    def __init__(self, show: Callable[[str], object]) -> None:
        """``show``: gets each new code."""
        self._show = show
        self._code, self._ends, self._tries = "", 0.0, 0

    def is_shown(self, now: float) -> bool:
        """Whether a code holds."""
        return bool(self._code) and now < self._ends and self._tries < MAX_TRIES

    def renew(self, now: float) -> None:
        """Show a new code."""
        code = draw_code()
        self._code, self._ends, self._tries = read_code(code), now + LIFE, 0
        self._show(code)

    def check(self, hello: Hello, line: bytes, now: float) -> tuple[Machine, Consent]:
        """The head that answers a hello, and our proof. Raises LinkLost, and counts a wrong one."""
        proposal = read(Proposal, line)
        if not self.is_shown(now):
            raise LinkLost("came too late: the code holds no longer")
        expected, proof = proofs(self._code, hello, proposal.key, proposal.nonce)
        if not hmac.compare_digest(proposal.proof, expected):
            self._tries += 1
            raise LinkLost("has another code")
        self._code = ""
        return Machine(name=proposal.name, key=proposal.key), Consent(proof=proof)


def propose(household: Household, code: str, hello: Hello) -> tuple[Proposal, str]:
    """A head's proposal under a code that was typed, and the proof that a lender answers."""
    nonce = secrets.token_hex(32)
    proof, expected = proofs(code, hello, household.key, nonce)
    return Proposal(name=household.name, key=household.key, nonce=nonce, proof=proof), expected
