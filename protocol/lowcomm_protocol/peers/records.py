"""Signed records of peers, and credentials of callers.

A record is accepted only if its peer has signed it, its life is not too long, and every field is
within bounds. Nothing in a record is used before that.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import Reason, RecordError, VersionError
from lowcomm_protocol.identity import SIGNATURE_BYTES, Identity, verify
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.document import expected_in_words

MAX_RECORD_BYTES = 2048
"""Longest: 1960 bytes, with a name, an invite, eight IPv6 addresses, four relays and 16 pieces; a
sample of text is left out where it does not fit."""
MAX_ADDRESSES = 8
MAX_ENTRY_POINTS = 4
MAX_CREDENTIAL_BYTES = 1024
MAX_CLAIM_BYTES = 512
MAX_MULTIADDRESS = 256
"""Characters of an entry point."""
MAX_NAME = 32
"""Characters of a peer's name, and of its release."""
MAX_SAMPLE = 160
"""Bytes of text that a peer's model wrote, in UTF-8."""
MAX_LOSS = 1000.0
MAX_COUNT = 2**53
MAX_CLAIMS, PIECE_CLAIM_BYTES = 16, 7
"""Claims on pieces of packed text in a record, and bytes of one (``reading.py``)."""
MAX_LIFE = 600.0
"""Longest life of a record in seconds; otherwise anybody could store one for centuries."""
MAX_CLOCK_SKEW = 60.0
DIGEST_BYTES = 32
CREDENTIAL_LIFE = 60.0
"""Seconds for which a credential is valid, before and after its time of issue."""
_RECORD, _CREDENTIAL = "peer record", "credential"
# No names: the owner of a name could aim all readers of a record at any host, and later at another.
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")

_COPIED = (
    *("peer_id", "phase", "addresses", "entry_points", "certificate", "claim"),
    *("swarm_step", "steps", "tokens_per_second", "reading", "gives_text"),
)
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


def is_name(text: str) -> bool:
    """Whether a text may be a peer's name: at most 32 characters, which move no cursor."""
    return len(text) <= MAX_NAME and text.isprintable()


def as_sample(text: str) -> str:
    """The beginning of what a model wrote, as a record may carry it: one line of 160 bytes."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line.encode()[:MAX_SAMPLE].decode(errors="ignore")


def is_sample(text: str) -> bool:
    """Whether a record may carry a text as written by a model."""
    return text.isprintable() and len(text.encode()) <= MAX_SAMPLE


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


def _are_claims(data: bytes) -> bool:
    count, rest = divmod(len(data), PIECE_CLAIM_BYTES)
    return count <= MAX_CLAIMS and not rest


def _checked(holds: Callable[[Any], bool], expected: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


Name = Annotated[str, _checked(is_name, f"at most {MAX_NAME} printable characters")]
Sample = Annotated[str, _checked(is_sample, f"at most {MAX_SAMPLE} bytes of printable text")]
Address = Annotated[str, _checked(_is_address, "an IP address and a port")]
EntryPoint = Annotated[str, _checked(_is_entry_point, "a multiaddress")]
Certificate = Annotated[bytes, _checked(lambda key: len(key) in (0, DIGEST_BYTES), "32 bytes")]
Count = Annotated[int, Field(lt=MAX_COUNT)]
Loss = Annotated[float, Field(ge=0, lt=MAX_LOSS, allow_inf_nan=False)]
Claims = Annotated[bytes, _checked(_are_claims, "claims on pieces")]


class Phase(StrEnum):
    """What a peer is doing, as others see it."""

    JOINING = "joining"
    SYNCING = "syncing"
    TRAINING = "training"
    SERVING = "serving"
    """Gives packed text, and never trains."""
    PAUSED = "paused"
    FINISHED = "finished"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class SelfReport:
    """What a peer says of itself, for people. Nobody can check it, and no rule uses it."""

    name: Name = ""
    """Display name chosen by the owner; at most 32 printable characters."""
    release: Name = ""
    """Release of its program."""
    tokens: Count = 0
    """Tokens trained on in this run."""
    held_out_loss: Loss = 0.0
    """Last held-out loss in nats; 0: none yet."""
    exchanges: Count = 0
    """Exchanges applied since it started."""
    sample: Sample = ""
    """Text that its model wrote; empty unless its owner shows it."""
    sample_step: Count = 0
    """Swarm step at which it was written."""


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """The contents of a peer's newest signed record, with the figures of its newest pulse."""

    peer_id: str
    run_id: Annotated[str, Field(min_length=64, max_length=64)]
    phase: Phase
    issued: float
    """Unix time, seconds."""
    expires: float
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)] = ()
    """``host:port`` of its Exchange service, best first."""
    certificate: Certificate = b""
    """Key of its TLS certificate, 32 bytes; empty: it can't be called directly."""
    swarm_step: Count = 0
    steps: Count = 0
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    entry_points: Annotated[tuple[EntryPoint, ...], Field(max_length=MAX_ENTRY_POINTS)] = ()
    """Multiaddresses of its DHT peer."""
    claim: Annotated[bytes, Field(max_length=MAX_CLAIM_BYTES)] = b""
    """The claim on its invite, serialized; empty if the run needs none."""
    reading: Claims = b""
    """Pieces of packed text that it reads or will read next (``reading.read_claims``)."""
    gives_text: bool = False
    """Whether it has the whole of the run's packed text."""
    report: SelfReport = SelfReport()
    as_of: float = 0.0
    """When the figures were issued, where a pulse brought them: Unix time, seconds."""
    bits: int = 0
    """Depth of its shard, as its pulse says."""


_PEER_INFO = TypeAdapter(PeerInfo)


def is_from_future(issued: float, now: float) -> bool:
    """Whether a record was issued too far ahead of Unix time ``now``."""
    return issued > now + MAX_CLOCK_SKEW


def write_record(info: PeerInfo, identity: Identity) -> bytes:
    """Sign and serialize a record. If it is too long, the sample is left out, then the last
    addresses."""
    data = _sign_record(info, identity)
    if len(data) > MAX_RECORD_BYTES and info.report.sample:
        return write_record(replace(info, report=replace(info.report, sample="")), identity)
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
    fields = {name: getattr(record, name) for name in _COPIED} | {
        "run_id": record.run_id.hex(),
        "issued": record.issued_ms / 1000,
        "expires": record.expires_ms / 1000,
        "report": {name: getattr(record.report, name) for name in vars(SelfReport())},
    }
    try:
        return _PEER_INFO.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, value = ".".join(map(str, first["loc"])), repr(first["input"])[:80]
        raise RecordError(
            f"The record of {record.peer_id} has {field} = {value}: {expected_in_words(first)}."
        ) from None


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


def read_credential(data: bytes, callee: str, run_id: str, now: float) -> pb.Credential:
    """Check a credential, but not its claim. Cheap checks come before the signature.

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
    return credential


def _check_times(record: pb.PeerRecord, now: float) -> None:
    issued, expires = record.issued_ms / 1000, record.expires_ms / 1000
    life = expires - issued
    if is_from_future(issued, now):
        fault, reason = f"is from {issued - now:.0f} s ahead: set both clocks right", "FROM_FUTURE"
    elif expires <= now:
        fault, reason = f"expired {now - expires:.0f} s ago", "EXPIRED"
    elif life > MAX_LIFE:
        fault, reason = f"claims a life of {life:.0f} s: at most {MAX_LIFE:.0f}", "LIVES_TOO_LONG"
    else:
        return
    raise RecordError(f"The record of {record.peer_id} {fault}.", reason=Reason[reason])
