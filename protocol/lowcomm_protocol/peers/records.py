"""Signed records of peers, and credentials of callers.

A record is accepted only if its peer has signed it, its life is not too long, and every field is
within bounds. Nothing in a record is used before that.
"""

import ipaddress
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from google.protobuf.message import DecodeError

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import Reason, RecordError, VersionError
from lowcomm_protocol.identity import SIGNATURE_BYTES, Identity, verify
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.invites import MAX_CLAIM_BYTES

MAX_RECORD_BYTES = 2048
"""The longest that a node writes has 1840: a name, an invite, eight IPv6 addresses and four relays.
Most have 330 to 1200."""
MAX_ADDRESSES = 8
MAX_ENTRY_POINTS = 4
MAX_CREDENTIAL_BYTES = 1024
MAX_MULTIADDRESS = 256
"""Characters of an entry point."""
MAX_NAME = 32
"""Characters of the name that a peer's owner chose, and of its release."""
MAX_LOSS = 1000.0
MAX_LIFE = 600.0
"""Longest life of a record in seconds; otherwise anybody could store one for centuries."""
MAX_CLOCK_SKEW = 60.0
DIGEST_BYTES = 32
CREDENTIAL_LIFE = 60.0
"""Seconds for which a credential is valid, before and after its time of issue."""
_RECORD, _CREDENTIAL = "peer record", "credential"
# No names: the owner of a name could aim all readers of a record at any host, and later at another.
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")


class Phase(StrEnum):
    """What a peer is doing, as others see it."""

    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHED = "finished"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a peer tells people of itself. Nobody can check it, and no rule uses it."""

    name: str = ""
    """That its owner chose; at most 32 printable characters."""
    release: str = ""
    """Of its program."""
    tokens: int = 0
    """Trained on in this run."""
    held_out_loss: float = 0.0
    """Its last, in nats; 0: none yet."""
    exchanges: int = 0
    """Applied since it started."""


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
    told: Told = Told()


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


def next_issue(now: float, last: float) -> float:
    """The time of issue of a peer's next record at Unix time ``now``; ``last``: that of its last.

    The later of two records wins, so no record is issued before the last, even if the clock was
    set back a little. A last record that others would refuse as from the future counts for nothing:
    the clock was ahead when it was issued.
    """
    return now if is_from_future(last, now) else max(now, last + 0.001)


def is_from_future(issued: float, now: float) -> bool:
    """Whether a record was issued too far ahead of Unix time ``now``."""
    return issued > now + MAX_CLOCK_SKEW


def write_record(info: PeerInfo, identity: Identity) -> bytes:
    """Sign a record; returns the serialized SignedRecord.

    If it is too long, the last addresses are left out.
    """
    data = _sign_record(info, identity)
    while len(data) > MAX_RECORD_BYTES and (info.addresses or info.entry_points):
        longer = "addresses" if len(info.addresses) >= len(info.entry_points) else "entry_points"
        info = replace(info, **{longer: getattr(info, longer)[:-1]})
        data = _sign_record(info, identity)
    return data


def _sign_record(info: PeerInfo, identity: Identity) -> bytes:
    payload = pb.PeerRecord(
        protocol=PROTOCOL_VERSION,
        run_id=bytes.fromhex(info.run_id),
        peer_id=info.peer_id,
        # Rounded, or a record issued a millisecond after another could carry the same number.
        issued_ms=round(info.issued * 1000),
        expires_ms=int(info.expires * 1000),
        phase=info.phase.value,
        addresses=info.addresses,
        certificate=info.certificate,
        swarm_step=info.swarm_step,
        steps=info.steps,
        tokens_per_second=info.tokens_per_second,
        stage=info.stage,
        entry_points=info.entry_points,
        claim=info.claim,
        told=pb.Told(**vars(info.told)),
    ).SerializeToString()
    return pb.SignedRecord(
        payload=payload, signature=identity.sign(_RECORD, payload)
    ).SerializeToString()


def read_record(data: bytes, now: float) -> PeerInfo:
    """Check a serialized SignedRecord at Unix time ``now`` (seconds).

    Raises RecordError if it is malformed, expired or lives too long, VersionError if it is of
    another protocol version, SignatureError if its peer has not signed it.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(
            f"A peer record of {len(data)} bytes is refused: at most {MAX_RECORD_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    signed, record = pb.SignedRecord(), pb.PeerRecord()
    try:
        signed.ParseFromString(data)
        record.ParseFromString(signed.payload)
    except DecodeError:
        raise RecordError("A peer record that is not a SignedRecord message is refused.") from None
    if record.protocol != PROTOCOL_VERSION:
        raise VersionError(
            f"A peer record of protocol {record.protocol} is refused: this is {PROTOCOL_VERSION}."
        )
    verify(record.peer_id, _RECORD, signed.payload, signed.signature)
    _check_times(record, now)
    _check_fields(record)
    return PeerInfo(
        peer_id=record.peer_id,
        run_id=record.run_id.hex(),
        phase=Phase(record.phase),
        issued=record.issued_ms / 1000,
        expires=record.expires_ms / 1000,
        addresses=tuple(record.addresses),
        certificate=record.certificate,
        swarm_step=record.swarm_step,
        steps=record.steps,
        tokens_per_second=record.tokens_per_second,
        stage=record.stage,
        entry_points=tuple(record.entry_points),
        claim=record.claim,
        told=Told(
            name=record.told.name,
            release=record.told.release,
            tokens=record.told.tokens,
            held_out_loss=record.told.held_out_loss,
            exchanges=record.told.exchanges,
        ),
    )


def write_credential(
    identity: Identity, callee: str, run_id: str, now: float, nonce: bytes, claim: bytes = b""
) -> bytes:
    """Proof that ``identity`` calls ``callee`` in this run at Unix time ``now``.

    ``nonce``: 16 fresh random bytes.
    """
    payload = pb.Credential(
        caller=identity.peer_id,
        callee=callee,
        run_id=bytes.fromhex(run_id),
        issued_ms=int(now * 1000),
        nonce=nonce,
        claim=claim,
    ).SerializeToString()
    return pb.SignedCredential(
        payload=payload, signature=identity.sign(_CREDENTIAL, payload)
    ).SerializeToString()


def read_credential(data: bytes, callee: str, run_id: str, now: float) -> Caller:
    """Check a credential; returns the caller. Cheap checks come before the signature.

    Raises RecordError if it is malformed, stale or meant for another peer, SignatureError if it is
    forged.
    """
    if len(data) > MAX_CREDENTIAL_BYTES:
        raise RecordError(
            f"A credential of {len(data)} bytes is refused: at most {MAX_CREDENTIAL_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    signed, credential = pb.SignedCredential(), pb.Credential()
    try:
        signed.ParseFromString(data)
        credential.ParseFromString(signed.payload)
    except DecodeError:
        raise RecordError(
            "A credential that is not a SignedCredential message is refused."
        ) from None
    if len(signed.signature) != SIGNATURE_BYTES or len(credential.nonce) != 16:
        raise RecordError("A credential with a signature or nonce of the wrong length is refused.")
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
    if is_from_future(issued, now):
        raise RecordError(
            f"The record of {record.peer_id} is from {issued - now:.0f} s ahead: set both clocks "
            "right.",
            reason=Reason.FROM_FUTURE,
        )
    if expires <= now:
        raise RecordError(
            f"The record of {record.peer_id} expired {now - expires:.0f} s ago.",
            reason=Reason.EXPIRED,
        )
    if expires - issued > MAX_LIFE:
        life = expires - issued
        raise RecordError(
            f"The record of {record.peer_id} claims a life of {life:.0f} s: at most "
            f"{MAX_LIFE:.0f}.",
            reason=Reason.LIVES_TOO_LONG,
        )


def _check_fields(record: pb.PeerRecord) -> None:
    if len(record.run_id) != 32:
        raise RecordError(
            f"The record of {record.peer_id} names a run of {len(record.run_id)} bytes: expected "
            "32."
        )
    if record.phase not in tuple(Phase):
        raise RecordError(
            f"The record of {record.peer_id} tells of an unknown phase {record.phase[:20]!r}."
        )
    if len(record.certificate) not in (0, DIGEST_BYTES):
        raise RecordError(
            f"The record of {record.peer_id} names a certificate by {len(record.certificate)} "
            "bytes."
        )
    if len(record.claim) > MAX_CLAIM_BYTES:
        raise RecordError(
            f"The record of {record.peer_id} holds a claim of {len(record.claim)} bytes."
        )
    if not math.isfinite(record.tokens_per_second) or record.tokens_per_second < 0:
        raise RecordError(
            f"The record of {record.peer_id} claims {record.tokens_per_second} tokens a second."
        )
    if max(record.swarm_step, record.steps) >= 2**53:
        raise RecordError(
            f"The record of {record.peer_id} claims step {max(record.swarm_step, record.steps)}."
        )
    if len(record.addresses) > MAX_ADDRESSES or len(record.entry_points) > MAX_ENTRY_POINTS:
        raise RecordError(
            f"The record of {record.peer_id} names {len(record.addresses)} addresses and "
            f"{len(record.entry_points)} entry points: at most {MAX_ADDRESSES} and "
            f"{MAX_ENTRY_POINTS}."
        )
    if any(
        len(entry) > MAX_MULTIADDRESS or not (entry.isascii() and entry.isprintable())
        for entry in record.entry_points
    ):
        raise RecordError(
            f"The record of {record.peer_id} names an entry point that is not a multiaddress."
        )
    for address in record.addresses:
        _check_address(address, record.peer_id)
    _check_told(record.told, record.peer_id)


def is_name(text: str) -> bool:
    """Whether a peer may call itself so: at most 32 characters, all printable, so that it neither
    moves a cursor nor turns the direction of the text around it."""
    return len(text) <= MAX_NAME and text.isprintable()


def _check_told(told: pb.Told, peer_id: str) -> None:
    if not is_name(told.name) or not is_name(told.release):
        raise RecordError(
            f"The record of {peer_id} tells a name or release that is not of at most {MAX_NAME} "
            "printable characters."
        )
    if max(told.tokens, told.exchanges) >= 2**53:
        raise RecordError(
            f"The record of {peer_id} tells of {told.tokens} tokens and {told.exchanges} exchanges."
        )
    if not 0 <= told.held_out_loss < MAX_LOSS:  # not a number: neither
        raise RecordError(
            f"The record of {peer_id} tells of a held-out loss of {told.held_out_loss}."
        )


def _check_address(address: str, peer_id: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 65536 or not _is_number(match[1], match[2]):
        raise RecordError(
            f"The record of {peer_id} names the address {address[:80]!r}: expected an IP address "
            "and a port."
        )


def _is_number(long: str | None, short: str | None) -> bool:
    try:
        return ipaddress.ip_address(long or short or "").version == (6 if long else 4)
    except ValueError:
        return False
