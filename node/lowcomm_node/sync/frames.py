"""What members of a group tell each other, as frames, and back; nothing of a frame is used before
it is checked here."""

from collections.abc import Sequence

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group import MAX_PEER_ID
from lowcomm_protocol.exchange.tally import MARK_BYTES, SALT_BYTES, mark
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP


def roll(peers: Sequence[str], slice_: Sequence[str] = ()) -> pb.Frame:
    """The frame that says whom we hold streams with; by their places if they are all in the
    ``slice_`` that both ends see."""
    if slice_ and set(peers) <= set(slice_):
        return pb.Frame(roll=pb.Roll(slice=_bits([peer in peers for peer in slice_])))
    return pb.Frame(roll=pb.Roll(peers=peers))


def members(peers: Sequence[str], roll: Sequence[str]) -> pb.Frame:
    """The frame that names a list of members, all of them in our ``roll``."""
    return pb.Frame(members=pb.Members(peers=sum(1 << roll.index(peer) for peer in peers)))


def held(digests: Sequence[bytes], salt: bytes) -> pb.Frame:
    """The frame that says which means we hold; ``salt``: `SALT_BYTES` that nobody can have known.

    Digests themselves would make what a member sends grow with the square of its group.
    """
    marks = b"".join(mark(salt, digest) or bytes(MARK_BYTES) for digest in digests)
    return pb.Frame(held=pb.Held(salt=salt, marks=marks))


def commit(shards: Sequence[bool], heard: Sequence[bool]) -> pb.Frame:
    """The frame that says which shards we would apply, and whose helds we know of."""
    bits = pb.Commit(members=len(shards), applied=_bits(shards), known=_bits(heard))
    return pb.Frame(commit=bits)


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
    """The marks of the means that a member holds, and their salt. Raises ProtocolViolation if they
    are not in form."""
    number, rest = divmod(len(message.marks), MARK_BYTES)
    _count("marks", number)
    if rest or len(message.salt) != SALT_BYTES:
        raise ProtocolViolation(f"sent marks that do not have {MARK_BYTES} bytes each, or no salt")
    marks = (message.marks[k * MARK_BYTES : (k + 1) * MARK_BYTES] for k in range(number))
    return tuple(one if any(one) else b"" for one in marks), message.salt


def read_commit(message: pb.Commit) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which shards a member would apply, and of whom it has heard. Raises ProtocolViolation if it
    is not in form."""
    count = message.members
    _count("shards", count)
    if max(message.applied, message.known) >= 1 << count:
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
