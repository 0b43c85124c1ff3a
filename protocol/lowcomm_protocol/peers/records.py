"""Signed records of peers, and credentials of callers.

A record is accepted only if its peer has signed it, its life is not too long, and every field is
within bounds. Nothing in a record is used before that.
"""

import ipaddress
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import Reason, RecordError, VersionError
from lowcomm_protocol.identity import SIGNATURE_BYTES, Identity, verify
from lowcomm_protocol.messages import exchange_pb2 as pb

MAX_RECORD_BYTES = 2048
"""Longest: 1840 bytes, with a name, an invite, eight IPv6 addresses and four relays."""
MAX_ADDRESSES = 8
MAX_ENTRY_POINTS = 4
MAX_CREDENTIAL_BYTES = 1024
MAX_CLAIM_BYTES = 512
MAX_MULTIADDRESS = 256
"""Characters of an entry point."""
MAX_NAME = 32
"""Characters of a peer's name, and of its release."""
MAX_LOSS = 1000.0
MAX_COUNT = 2**53
MAX_LIFE = 600.0
"""Longest life of a record in seconds; otherwise anybody could store one for centuries."""
MAX_CLOCK_SKEW = 60.0
DIGEST_BYTES = 32
CREDENTIAL_LIFE = 60.0
"""Seconds for which a credential is valid, before and after its time of issue."""
_RECORD, _CREDENTIAL = "peer record", "credential"
# No names: the owner of a name could aim all readers of a record at any host, and later at another.
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")

_COPIED = ("peer_id", "certificate", "swarm_step", "steps", "tokens_per_second", "stage", "claim")
"""Fields that are the same in `PeerInfo` and in its message."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


def sign(identity: Identity, purpose: str, message: Message) -> bytes:
    """A message with its signature, serialized."""
    payload = message.SerializeToString()
    signature = identity.sign(purpose, payload)
    return pb.SignedRecord(payload=payload, signature=signature).SerializeToString()


def read_signed(
    data: bytes, kind: type[AnyMessage], what: str, most_bytes: int
) -> tuple[pb.SignedRecord, AnyMessage]:
    """Decode what `sign` gave; the signature is still to be verified. Raises RecordError."""
    if len(data) > most_bytes:
        raise RecordError(
            f"A {what} of {len(data)} bytes is refused: at most {most_bytes}.",
            reason=Reason.TOO_LARGE,
        )
    try:
        signed = pb.SignedRecord.FromString(data)
        message = kind.FromString(signed.payload)
    except DecodeError:
        raise RecordError(f"A {what} that is not a signed message is refused.") from None
    if len(signed.signature) != SIGNATURE_BYTES:
        raise RecordError(f"A {what} with a signature of the wrong length is refused.")
    return signed, message


class Phase(StrEnum):
    """What a peer is doing, as others see it."""

    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHED = "finished"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class SelfReport:
    """What a peer says of itself, for people. Nobody can check it, and no rule uses it."""

    name: str = ""
    """Display name chosen by the owner; at most 32 printable characters."""
    release: str = ""
    """Release of its program."""
    tokens: int = 0
    """Tokens trained on in this run."""
    held_out_loss: float = 0.0
    """Last held-out loss in nats; 0: none yet."""
    exchanges: int = 0
    """Exchanges applied since it started."""


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """The contents of a peer's newest signed record."""

    peer_id: str
    run_id: str
    phase: Phase
    issued: float
    """Unix time, seconds."""
    expires: float
    addresses: tuple[str, ...] = ()
    """``host:port`` of its Exchange service, best first."""
    certificate: bytes = b""
    """Key of its TLS certificate, 32 bytes; empty: it can't be called directly."""
    swarm_step: int = 0
    steps: int = 0
    tokens_per_second: float = 0.0
    stage: int = 0
    entry_points: tuple[str, ...] = ()
    """Multiaddresses of its DHT peer."""
    claim: bytes = b""
    """The claim on its invite, serialized; empty if the run needs none."""
    report: SelfReport = SelfReport()


@dataclass(frozen=True)
class Caller:
    """A caller, as its credential proves."""

    peer_id: str
    nonce: bytes
    """Must be new to the callee."""
    claim: bytes
    """The claim on its invite, serialized, unchecked."""
    issued: float
    """When it was made, by the caller's clock; Unix time, seconds."""


def is_from_future(issued: float, now: float) -> bool:
    """Whether a record was issued too far ahead of Unix time ``now``."""
    return issued > now + MAX_CLOCK_SKEW


def write_record(info: PeerInfo, identity: Identity) -> bytes:
    """Sign and serialize a record. If it is too long, the last addresses are left out."""
    data = _sign_record(info, identity)
    while len(data) > MAX_RECORD_BYTES and (info.addresses or info.entry_points):
        longer = "addresses" if len(info.addresses) >= len(info.entry_points) else "entry_points"
        info = replace(info, **{longer: getattr(info, longer)[:-1]})
        data = _sign_record(info, identity)
    return data


def _sign_record(info: PeerInfo, identity: Identity) -> bytes:
    record = pb.PeerRecord(
        protocol=PROTOCOL_VERSION,
        run_id=bytes.fromhex(info.run_id),
        # Rounded, or a record issued a millisecond after another could carry the same number.
        issued_ms=round(info.issued * 1000),
        expires_ms=int(info.expires * 1000),
        phase=info.phase.value,
        addresses=info.addresses,
        entry_points=info.entry_points,
        report=pb.SelfReport(**vars(info.report)),
        **{name: getattr(info, name) for name in _COPIED},
    )
    return sign(identity, _RECORD, record)


def read_record(data: bytes, now: float) -> PeerInfo:
    """Check a serialized SignedRecord at Unix time ``now``.

    Raises RecordError, VersionError for another protocol version, or SignatureError.
    """
    signed, record = read_signed(data, pb.PeerRecord, _RECORD, MAX_RECORD_BYTES)
    if record.protocol != PROTOCOL_VERSION:
        raise VersionError(
            f"A peer record of protocol {record.protocol} is refused: this is {PROTOCOL_VERSION}."
        )
    verify(record.peer_id, _RECORD, signed.payload, signed.signature)
    _check_times(record, now)
    _check_fields(record)
    return PeerInfo(
        run_id=record.run_id.hex(),
        phase=Phase(record.phase),
        issued=record.issued_ms / 1000,
        expires=record.expires_ms / 1000,
        addresses=tuple(record.addresses),
        entry_points=tuple(record.entry_points),
        report=SelfReport(**{name: getattr(record.report, name) for name in vars(SelfReport())}),
        **{name: getattr(record, name) for name in _COPIED},
    )


def write_credential(
    identity: Identity, callee: str, run_id: str, now: float, nonce: bytes, claim: bytes = b""
) -> bytes:
    """Proof that ``identity`` calls ``callee`` now; ``nonce``: 16 fresh random bytes."""
    credential = pb.Credential(
        caller=identity.peer_id,
        callee=callee,
        run_id=bytes.fromhex(run_id),
        issued_ms=int(now * 1000),
        nonce=nonce,
        claim=claim,
    )
    return sign(identity, _CREDENTIAL, credential)


def read_credential(data: bytes, callee: str, run_id: str, now: float) -> Caller:
    """Check a credential; its caller. Cheap checks come before the signature.

    Raises RecordError if it is malformed, stale or misplaced, SignatureError if it is forged.
    """
    signed, credential = read_signed(data, pb.Credential, _CREDENTIAL, MAX_CREDENTIAL_BYTES)
    if len(credential.nonce) != 16:
        raise RecordError("A credential with a nonce of the wrong length is refused.")
    if credential.callee != callee or credential.run_id.hex() != run_id:
        raise RecordError(
            "A credential that was made for another peer or run is refused.",
            reason=Reason.MISPLACED,
        )
    age = now - credential.issued_ms / 1000
    if abs(age) > CREDENTIAL_LIFE:
        raise RecordError(
            f"A credential more than {CREDENTIAL_LIFE:.0f} s off is refused: set both clocks "
            "right.",
            reason=Reason.EXPIRED if age > 0 else Reason.FROM_FUTURE,
        )
    verify(credential.caller, _CREDENTIAL, signed.payload, signed.signature)
    return Caller(
        credential.caller, credential.nonce, credential.claim, credential.issued_ms / 1000
    )


def _check_times(record: pb.PeerRecord, now: float) -> None:
    issued, expires = record.issued_ms / 1000, record.expires_ms / 1000
    life = expires - issued
    faults = (
        (
            is_from_future(issued, now),
            f"is from {issued - now:.0f} s ahead: set both clocks right",
            Reason.FROM_FUTURE,
        ),
        (expires <= now, f"expired {now - expires:.0f} s ago", Reason.EXPIRED),
        (
            life > MAX_LIFE,
            f"claims a life of {life:.0f} s: at most {MAX_LIFE:.0f}",
            Reason.LIVES_TOO_LONG,
        ),
    )
    for applies, fault, reason in faults:
        if applies:
            raise RecordError(f"The record of {record.peer_id} {fault}.", reason=reason)


def _check_fields(record: pb.PeerRecord) -> None:
    step, claimed = max(record.swarm_step, record.steps), record.report
    certificate, claim = len(record.certificate), len(record.claim)
    addresses, entries = len(record.addresses), len(record.entry_points)
    malformed = [entry for entry in record.entry_points if not _is_entry_point(entry)]
    unreadable = [address for address in record.addresses if not _is_address(address)]
    faults = (
        (len(record.run_id) != 32, f"names a run of {len(record.run_id)} bytes: expected 32"),
        (record.phase not in tuple(Phase), f"has an unknown phase {record.phase[:20]!r}"),
        (certificate not in (0, DIGEST_BYTES), f"names a certificate by {certificate} bytes"),
        (claim > MAX_CLAIM_BYTES, f"holds a claim of {claim} bytes"),
        (
            not 0 <= record.tokens_per_second < math.inf,
            f"claims {record.tokens_per_second} tokens a second",
        ),
        (step >= MAX_COUNT, f"claims step {step}"),
        (
            addresses > MAX_ADDRESSES or entries > MAX_ENTRY_POINTS,
            f"names {addresses} addresses and {entries} entry points: at most {MAX_ADDRESSES} and "
            f"{MAX_ENTRY_POINTS}",
        ),
        (malformed, "names an entry point that is not a multiaddress"),
        (
            unreadable,
            f"names the address {unreadable[:1] and unreadable[0][:80]!r}: expected an IP address "
            "and a port",
        ),
        (
            not is_name(claimed.name) or not is_name(claimed.release),
            f"has a name or release that is not of at most {MAX_NAME} printable characters",
        ),
        (
            max(claimed.tokens, claimed.exchanges) >= MAX_COUNT,
            f"claims {claimed.tokens} tokens and {claimed.exchanges} exchanges",
        ),
        (
            not 0 <= claimed.held_out_loss < MAX_LOSS,  # not a number: neither
            f"claims a held-out loss of {claimed.held_out_loss}",
        ),
    )
    for applies, fault in faults:
        if applies:
            raise RecordError(f"The record of {record.peer_id} {fault}.")


def is_name(text: str) -> bool:
    """Whether a text may be a peer's name: at most 32 characters, which move no cursor."""
    return len(text) <= MAX_NAME and text.isprintable()


def _is_entry_point(text: str) -> bool:
    return len(text) <= MAX_MULTIADDRESS and text.isascii() and text.isprintable()


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 65536:
        return False
    try:
        return ipaddress.ip_address(match[1] or match[2]).version == (6 if match[1] else 4)
    except ValueError:
        return False
