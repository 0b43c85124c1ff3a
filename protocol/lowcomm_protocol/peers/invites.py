"""Invites and removals: how a run's creator admits peers of unknown ids, and removes peers.

    creator ── Invite: run, key, expiry, uses, signed; with the key's secret it is a *token* ──►
               joiner
    joiner  ── Claim: "this peer came by this invite at this time", signed by the invite's key ──►
               in its record and calls
    any     ── checks both signatures with nothing but the creator's peer id

The secret stays with the holders of the token: an overheard claim is valid for no other peer. The
name of an invite is its key, as a peer id. Removals are one numbered list, signed by the creator;
the highest number holds. It names keys of peers and of invites, and never expires: a list that
lapsed would bring everybody back.
"""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import base58
from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import AdmissionError, Reason, RecordError, SignatureError
from lowcomm_protocol.identity import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_of,
    verify,
)
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import MAX_CLAIM_BYTES, read_signed, sign

MAX_USES = 1024
MAX_TOKEN_LENGTH = 600
"""Characters. Decoding base58 takes time quadratic in the length."""
_PREFIX = "invite"
_INVITE, _CLAIM = "invite", "claim on an invite"


@dataclass(frozen=True)
class Invite:
    """An invite, as its creator signed it."""

    run_id: str
    key: bytes
    """Ed25519 public key, 32 bytes."""
    expires: float
    """Unix time, seconds. Peers that came by it are out then: a claim's time proves nothing."""
    uses: int
    """How many peers may come by it."""
    peer_id: str
    """The only peer that may use it; empty: any."""
    signed: pb.SignedInvite = field(repr=False)

    @cached_property
    def invite_id(self) -> str:
        """Its name, by which the creator can revoke it."""
        return peer_id_of(self.key)

    def verify(self, creator: str) -> None:
        """Raise SignatureError unless the creator of a run signed it."""
        verify(creator, _INVITE, self.signed.payload, self.signed.signature)

    def check_for(self, run_id: str, peer_id: str, now: float) -> None:
        """Raise AdmissionError unless it is for this run and peer, and valid at ``now``."""
        if self.run_id != run_id:
            raise AdmissionError(
                f"The invite is for another run ({self.run_id[:12]}): ask the creator of this one.",
                reason=Reason.MISPLACED,
            )
        if self.peer_id not in ("", peer_id):
            raise AdmissionError(
                f"The invite is for {self.peer_id} alone, not for {peer_id}: ask for one of your "
                "own.",
                reason=Reason.MISPLACED,
            )
        if self.expires <= now:
            raise AdmissionError(
                f"The invite expired {now - self.expires:.0f} s ago: ask the run's creator for "
                "another.",
                reason=Reason.INVITE_EXPIRED,
            )


@dataclass(frozen=True)
class Token:
    """An invite with the secret that makes claims. Its holder can admit peers."""

    invite: Invite
    secret: bytes = field(repr=False)

    def text(self) -> str:
        """The text that a person pastes; about 260 characters."""
        message = pb.InviteToken(invite=self.invite.signed, secret=self.secret)
        return _PREFIX + base58.b58encode_check(message.SerializeToString()).decode()

    def claim(self, peer_id: str, now: float) -> "Claim":
        """The claim of one peer at Unix time ``now``."""
        claimed_ms = int(now * 1000)
        statement = _statement(self.invite.key, claimed_ms, peer_id)
        signature = Identity(self.secret).sign(_CLAIM, statement)
        message = pb.Claim(invite=self.invite.signed, claimed_ms=claimed_ms, signature=signature)
        return Claim(self.invite, claimed_ms, peer_id, signature, message.SerializeToString())


@dataclass(frozen=True)
class Claim:
    """One use of an invite by one peer."""

    invite: Invite
    claimed_ms: int
    """Unix time, milliseconds."""
    peer_id: str
    """The peer that came by it. It is not part of the message, whose signature covers it."""
    signature: bytes = field(repr=False)
    data: bytes = field(repr=False)
    """The serialized Claim, as it came."""

    @property
    def rank(self) -> tuple[int, str]:
        """If there are more claims than uses, the lowest in this order count."""
        return self.claimed_ms, self.peer_id

    def verify(self, creator: str) -> None:
        """Raise SignatureError unless ``creator`` signed the invite and its key the claim."""
        self.invite.verify(creator)
        statement = _statement(self.invite.key, self.claimed_ms, self.peer_id)
        verify(self.invite.invite_id, _CLAIM, statement, self.signature)


def issue_invite(
    creator: Identity, run_id: str, secret: bytes, expires: float, uses: int = 1, peer_id: str = ""
) -> Token:
    """Sign an invite, for ``peer_id`` alone if given; ``secret``: 32 fresh random bytes.

    Raises AdmissionError.
    """
    if not 1 <= uses <= MAX_USES:
        raise AdmissionError(f"An invite has 1 to {MAX_USES} uses, not {uses}.")
    invite = pb.Invite(
        run_id=bytes.fromhex(run_id),
        key=Identity(secret).public_key,
        expires_ms=int(expires * 1000),
        uses=uses,
        peer_id=peer_id,
    )
    signed = pb.SignedInvite.FromString(sign(creator, _INVITE, invite))
    return Token(_read_invite(signed), secret)


def read_token(text: str) -> Token:
    """Read a pasted token, unverified. Raises AdmissionError if it is incomplete."""
    text = "".join(text.split())  # mail programs break long lines
    try:
        if not text.startswith(_PREFIX) or len(text) > MAX_TOKEN_LENGTH:
            raise ValueError
        message = pb.InviteToken.FromString(base58.b58decode_check(text.removeprefix(_PREFIX)))
        token = Token(_read_invite(message.invite), message.secret)
        if Identity(token.secret).public_key != token.invite.key:
            raise ValueError
    except (ValueError, DecodeError, SignatureError, AdmissionError):
        raise AdmissionError(
            f"This is not an invite ({len(text)} characters): paste the whole text of the invite.",
            reason=Reason.MALFORMED,
        ) from None
    return token


def read_claim(data: bytes, peer_id: str) -> Claim:
    """Read the claim that ``peer_id`` shows, unverified. Raises AdmissionError."""
    if len(data) > MAX_CLAIM_BYTES:
        raise AdmissionError(
            f"A claim of {len(data)} bytes is refused: at most {MAX_CLAIM_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    try:
        message = pb.Claim.FromString(data)
    except DecodeError:
        message = pb.Claim()
    if len(message.signature) != SIGNATURE_BYTES:
        raise AdmissionError("A claim that can't be read is refused.", reason=Reason.MALFORMED)
    return Claim(_read_invite(message.invite), message.claimed_ms, peer_id, message.signature, data)


def _read_invite(signed: pb.SignedInvite) -> Invite:
    try:
        message = pb.Invite.FromString(signed.payload)
        if message.peer_id:
            public_key_of(message.peer_id)
    except (DecodeError, SignatureError):
        message = pb.Invite()
    lengths = len(message.run_id), len(message.key), len(signed.signature)
    if lengths != (32, KEY_BYTES, SIGNATURE_BYTES) or not 1 <= message.uses <= MAX_USES:
        raise AdmissionError(
            "An invite that can't be read, or has a field out of bounds, is refused.",
            reason=Reason.MALFORMED,
        )
    expires = message.expires_ms / 1000
    return Invite(message.run_id.hex(), message.key, expires, message.uses, message.peer_id, signed)


def _statement(key: bytes, claimed_ms: int, peer_id: str) -> bytes:
    return key + claimed_ms.to_bytes(8, "big") + peer_id.encode()


MAX_REMOVED = 512
MAX_REMOVALS_BYTES = 20 * 1024
_PURPOSE = "removal list"


@dataclass(frozen=True)
class Removals:
    """The peers and invites that a creator has removed."""

    version: int = 0
    keys: frozenset[bytes] = frozenset()
    """Public keys."""
    run_id: str = ""
    data: bytes = field(default=b"", repr=False)
    """The serialized SignedRemovalList; empty if no peer was ever removed."""

    @cached_property
    def ids(self) -> frozenset[str]:
        """Peer ids, and names of invites; computed on demand."""
        return frozenset(peer_id_of(key) for key in self.keys)

    @property
    def order(self) -> tuple[int, bytes]:
        """Of two lists the higher counts; the digest decides between two of one number."""
        return self.version, sha256(self.data).digest() if self.data else b""


def write_removals(creator: Identity, run_id: str, version: int, ids: frozenset[str]) -> Removals:
    """Sign a list. Raises RecordError if it is too long or removes the creator, SignatureError."""
    if len(ids) > MAX_REMOVED:
        raise RecordError(
            f"{len(ids)} removed peers and invites are too many: at most {MAX_REMOVED}. Begin a "
            "new run, or take back the invites by which they came."
        )
    if creator.peer_id in ids:
        raise RecordError("The creator of a run can't be removed from it.")
    keys = frozenset(public_key_of(name) for name in ids)
    removals = pb.RemovalList(run_id=bytes.fromhex(run_id), version=version, keys=sorted(keys))
    return Removals(version, keys, run_id, sign(creator, _PURPOSE, removals))


def read_removals(data: bytes, creator: str) -> Removals:
    """Check a serialized list. Raises RecordError, or SignatureError for another signer."""
    signed, message = read_signed(data, pb.RemovalList, _PURPOSE, MAX_REMOVALS_BYTES)
    if (
        len(message.run_id) != 32
        or not 1 <= message.version < 2**53
        or len(message.keys) > MAX_REMOVED
        or any(len(key) != KEY_BYTES for key in message.keys)
    ):
        raise RecordError("A removal list with a field out of bounds is refused.")
    verify(creator, _PURPOSE, signed.payload, signed.signature)
    return Removals(message.version, frozenset(message.keys), message.run_id.hex(), data)
