"""Whom the creator of a run has removed: one numbered list, signed, the highest number holds.

A list names keys of peers and of invites; who came by a removed invite is out as well. It has no
expiry: a list that lapsed would bring everybody back.
"""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.identity import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_of,
    verify,
)
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.refusals import Reason

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
        """Peer ids, and the names of invites.

        Computed on demand, since lists of other runs are stored but not used.
        """
        return frozenset(peer_id_of(key) for key in self.keys)

    @property
    def order(self) -> tuple[int, bytes]:
        """Of two lists the higher counts.

        Two lists of one number, which an honest creator never signs, are ordered by digest, so that
        all peers agree.
        """
        return self.version, sha256(self.data).digest() if self.data else b""


def write_removals(creator: Identity, run_id: str, version: int, ids: frozenset[str]) -> Removals:
    """Sign a list.

    Raises RecordError if it is too long, or would remove the creator, SignatureError for a wrong
    id.
    """
    if len(ids) > MAX_REMOVED:
        raise RecordError(
            f"{len(ids)} removed peers and invites are too many: at most {MAX_REMOVED}. Begin a "
            "new run, or take back the invites by which they came."
        )
    if creator.peer_id in ids:
        raise RecordError("The creator of a run can't be removed from it.")
    keys = frozenset(public_key_of(name) for name in ids)
    payload = pb.RemovalList(
        run_id=bytes.fromhex(run_id), version=version, keys=sorted(keys)
    ).SerializeToString()
    signed = pb.SignedRemovalList(payload=payload, signature=creator.sign(_PURPOSE, payload))
    return Removals(version, keys, run_id, signed.SerializeToString())


def read_removals(data: bytes, creator: str) -> Removals:
    """Check a serialized list.

    Raises RecordError if it is malformed, SignatureError if ``creator`` has not signed it.
    """
    if len(data) > MAX_REMOVALS_BYTES:
        raise RecordError(
            f"A removal list of {len(data)} bytes is refused: at most {MAX_REMOVALS_BYTES}.",
            reason=Reason.TOO_LARGE,
        )
    try:
        signed = pb.SignedRemovalList.FromString(data)
        message = pb.RemovalList.FromString(signed.payload)
    except DecodeError:
        raise RecordError(
            "A removal list that is not a SignedRemovalList message is refused."
        ) from None
    if (
        len(message.run_id) != 32
        or len(signed.signature) != SIGNATURE_BYTES
        or not 1 <= message.version < 2**53
        or len(message.keys) > MAX_REMOVED
        or any(len(key) != KEY_BYTES for key in message.keys)
    ):
        raise RecordError("A removal list with a field out of bounds is refused.")
    verify(creator, _PURPOSE, signed.payload, signed.signature)
    return Removals(message.version, frozenset(message.keys), message.run_id.hex(), data)
