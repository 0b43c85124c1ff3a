"""What members tell each other beside contents, as messages of the virtual network."""

from typing import Any

from lowcomm_node.sync import frames
from lowcomm_node.sync.link import CHUNK_BYTES
from lowcomm_protocol.errors import MAX_REASON
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange import pair as pairs
from lowcomm_protocol.exchange.tally import SALT_BYTES
from lowcomm_protocol.messages import exchange_pb2 as pb

SALT = bytes(SALT_BYTES)


def words_of(effect: base.Effect) -> tuple[str, str, Any] | None:
    """To whom an effect tells something, the kind of the message, and its payload; None for other
    effects."""
    match effect:
        case pairs.SendConfirm(peer=peer, members=members):
            return peer, "confirm", members
        case groups.SendRoll(peer=peer, roll=roll):
            return peer, "roll", roll
        case groups.SendMembers(peer=peer, members=members):
            return peer, "members", members
        case groups.SendHeld(peer=peer, held=held):
            return peer, "held", held
        case groups.SendCommit(peer=peer, shards=shards, heard=heard):
            return peer, "commit", (shards, heard)
        case _:
            return None


def event_of(peer: str, kind: str, payload: Any) -> Any:
    """The event that such a message of a peer is."""
    match kind:
        case "confirm":
            return pairs.Confirmed(peer=peer, members=payload)
        case "roll":
            return groups.RollCame(peer=peer, roll=payload)
        case "members":
            return groups.MembersCame(peer=peer, members=payload)
        case "held":
            return groups.HeldCame(peer=peer, held=payload)
        case "commit":
            shards, heard = payload
            return groups.CommitCame(peer=peer, shards=shards, heard=heard)
        case _:
            raise AssertionError(f"nobody understands {kind!r}")


def control_bytes(kind: str, payload: Any) -> int:
    """Bytes of the frames that carry a message, less those of contents themselves: what gRPC,
    HTTP/2 and TLS add is not counted.

    Members of a group are taken to see the same slice.
    """
    match kind:
        case "hello":
            return pb.Frame(hello=frames.to_message(payload)).ByteSize()
        case "accept":
            return pb.Frame(accept=frames.to_message(payload)).ByteSize()
        case "refuse":
            return frames.refuse(payload).ByteSize()
        case "abandon":
            return pb.Frame(abandon=pb.Abandon(reason=payload[:MAX_REASON])).ByteSize()
        case "confirm":
            return pb.Frame(confirm=pb.Confirm(members=payload)).ByteSize()
        case "roll":
            return frames.roll(payload, payload).ByteSize()
        case "members":
            return frames.members(payload, payload).ByteSize()
        case "held":
            return frames.held(payload, SALT).ByteSize()
        case "commit":
            return frames.commit(*payload).ByteSize()
        case "content" | "again" | "resend" | "shard" | "mean" | "missed":
            return _around(len(payload))
        case _:
            return 0


def _around(size: int) -> int:
    """The frame that announces a content, and what stands before each of its chunks."""
    content = pb.Content(size=size, digest=bytes(32))
    last = pb.Frame(chunk=pb.Chunk(offset=size, data=b"-")).ByteSize() - 1
    return pb.Frame(content=content).ByteSize() + last * -(-size // CHUNK_BYTES)
