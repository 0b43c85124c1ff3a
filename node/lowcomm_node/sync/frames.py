"""What members of a group tell each other, as frames, and back; nothing of a frame is used before
it is checked here."""

from collections.abc import Sequence

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group.machine import MAX_PEER_ID
from lowcomm_protocol.exchange.group.tally import DIGEST_BYTES
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP


def roll(peers: Sequence[str]) -> pb.Frame:
    """The frame that tells whom we hold streams with."""
    return pb.Frame(roll=pb.Roll(peers=peers))


def members(peers: Sequence[str], roll: Sequence[str]) -> pb.Frame:
    """The frame that names a list of members, all of them in our ``roll``."""
    return pb.Frame(members=pb.Members(peers=sum(1 << roll.index(peer) for peer in peers)))


def held(digests: Sequence[bytes]) -> pb.Frame:
    """The frame that tells which means we hold."""
    return pb.Frame(held=pb.Held(digests=digests))


def commit(shards: Sequence[bool], heard: Sequence[bool]) -> pb.Frame:
    """The frame that tells which shards we would apply, and whose helds we know of."""
    return pb.Frame(commit=pb.Commit(shards=shards, heard=heard))


def read_roll(message: pb.Roll) -> tuple[str, ...]:
    """The peers of a roll. Raises ProtocolViolation if it is not in form."""
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
    return tuple(peer for place, peer in enumerate(roll) if message.peers >> place & 1)


def read_held(message: pb.Held) -> tuple[bytes, ...]:
    """The digests that a member holds. Raises ProtocolViolation if they are not in form."""
    _count("digests", len(message.digests))
    digests = tuple(message.digests)
    if not all(len(digest) in (0, DIGEST_BYTES) for digest in digests):
        raise ProtocolViolation(f"sent a digest that has neither {DIGEST_BYTES} bytes nor none")
    return digests


def read_commit(message: pb.Commit) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which shards a member would apply, and of whom it has heard. Raises ProtocolViolation if it
    is not in form."""
    _count("shards", len(message.shards))
    if len(message.shards) != len(message.heard):
        raise ProtocolViolation(
            f"committed to {len(message.shards)} shards of {len(message.heard)} members"
        )
    return tuple(message.shards), tuple(message.heard)


def _count(what: str, number: int) -> None:
    if not 1 <= number <= MAX_GROUP:
        raise ProtocolViolation(f"sent {number} {what}, where a group has 1 to {MAX_GROUP}")
