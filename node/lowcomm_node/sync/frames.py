"""What members of a group tell each other, as frames, and back; nothing of a frame is used before
it is checked here.

In full, a roll and a held grow with the group, and so everything that a member tells grows with its
square. In brief, both are bits and marks. Earlier peers read only the full forms: an offer with a
``slice_digest`` says that its sender reads both."""

from collections.abc import Sequence

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group import MAX_PEER_ID
from lowcomm_protocol.exchange.tally import DIGEST_BYTES, MARK_BYTES, SALT_BYTES, mark
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP


def roll(peers: Sequence[str], slice_: Sequence[str] = ()) -> pb.Frame:
    """The frame that tells whom we hold streams with; in brief if they are all in the ``slice_``
    that both ends see."""
    if slice_ and set(peers) <= set(slice_):
        return pb.Frame(roll=pb.Roll(slice=_bits([peer in peers for peer in slice_])))
    return pb.Frame(roll=pb.Roll(peers=peers))


def members(peers: Sequence[str], roll: Sequence[str]) -> pb.Frame:
    """The frame that names a list of members, all of them in our ``roll``."""
    return pb.Frame(members=pb.Members(peers=sum(1 << roll.index(peer) for peer in peers)))


def held(digests: Sequence[bytes], salt: bytes = b"") -> pb.Frame:
    """The frame that tells which means we hold; in brief with a ``salt``, of `SALT_BYTES` that
    nobody can have known."""
    if not salt:
        return pb.Frame(held=pb.Held(digests=digests))
    marks = b"".join(mark(salt, digest) or bytes(MARK_BYTES) for digest in digests)
    return pb.Frame(held=pb.Held(salt=salt, marks=marks))


def commit(shards: Sequence[bool], heard: Sequence[bool], brief: bool = False) -> pb.Frame:
    """The frame that tells which shards we would apply, and whose helds we know of."""
    if not brief:
        return pb.Frame(commit=pb.Commit(shards=shards, heard=heard))
    told = pb.Commit(members=len(shards), applied=_bits(shards), known=_bits(heard))
    return pb.Frame(commit=told)


def read_roll(message: pb.Roll, slice_: Sequence[str] = ()) -> tuple[str, ...]:
    """The peers of a roll; ``slice_``: what both ends see, if they see the same. Raises
    ProtocolViolation if it is not in form."""
    if message.slice:
        if message.peers or message.slice >= 1 << len(slice_):
            raise ProtocolViolation("sent a roll by places in a slice that is not ours")
        return _at(slice_, message.slice)
    _count("peers", len(message.peers))
    peers = tuple(message.peers)
    if not all(0 < len(peer) <= MAX_PEER_ID for peer in peers):
        raise ProtocolViolation(f"sent a peer id that does not have 1 to {MAX_PEER_ID} characters")
    if list(peers) != sorted(set(peers)):
        raise ProtocolViolation("sent peers that are not sorted, or one of them twice")
    return peers


def read_members(message: pb.Members, roll: Sequence[str]) -> tuple[str, ...]:
    """The peers of a list of members, by the sender's ``roll``. Raises ProtocolViolation if it is
    not in form."""
    if not 0 < message.peers < 1 << len(roll):
        raise ProtocolViolation(f"named members {message.peers:#b} of a roll of {len(roll)}")
    return _at(roll, message.peers)


def read_held(message: pb.Held) -> tuple[tuple[bytes, ...], bytes]:
    """The digests that a member holds, or marks and their salt. Raises ProtocolViolation if they
    are not in form."""
    if message.salt:
        return _read_marks(message), message.salt
    _count("digests", len(message.digests))
    digests = tuple(message.digests)
    if not all(len(digest) in (0, DIGEST_BYTES) for digest in digests):
        raise ProtocolViolation(f"sent a digest that has neither {DIGEST_BYTES} bytes nor none")
    return digests, b""


def read_commit(message: pb.Commit) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which shards a member would apply, and of whom it has heard. Raises ProtocolViolation if it
    is not in form."""
    if message.members:
        return _read_brief_commit(message)
    _count("shards", len(message.shards))
    if len(message.shards) != len(message.heard):
        raise ProtocolViolation(
            f"committed to {len(message.shards)} shards of {len(message.heard)} members"
        )
    return tuple(message.shards), tuple(message.heard)


def _read_marks(message: pb.Held) -> tuple[bytes, ...]:
    number, rest = divmod(len(message.marks), MARK_BYTES)
    _count("marks", number)
    if rest or message.digests or len(message.salt) != SALT_BYTES:
        raise ProtocolViolation(f"sent marks that do not have {MARK_BYTES} bytes each, or no salt")
    marks = (message.marks[k * MARK_BYTES : (k + 1) * MARK_BYTES] for k in range(number))
    return tuple(one if any(one) else b"" for one in marks)


def _read_brief_commit(message: pb.Commit) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    count = message.members
    _count("shards", count)
    if message.shards or message.heard or max(message.applied, message.known) >= 1 << count:
        raise ProtocolViolation(f"committed to other shards than those of {count} members")
    return _flags(count, message.applied), _flags(count, message.known)


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << place for place, flag in enumerate(flags) if flag)


def _flags(count: int, bits: int) -> tuple[bool, ...]:
    return tuple(bool(bits >> place & 1) for place in range(count))


def _at(peers: Sequence[str], bits: int) -> tuple[str, ...]:
    return tuple(peer for place, peer in enumerate(peers) if bits >> place & 1)


def _count(what: str, number: int) -> None:
    if not 1 <= number <= MAX_GROUP:
        raise ProtocolViolation(f"sent {number} {what}, where a group has 1 to {MAX_GROUP}")
