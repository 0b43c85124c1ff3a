"""Bytes of what members tell each other beside contents, in the virtual network."""

from typing import Any

from lowcomm_node.sync import frames
from lowcomm_node.sync.link import CHUNK_BYTES
from lowcomm_protocol.errors import MAX_REASON
from lowcomm_protocol.exchange import events
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb


def control_bytes(payload: Any) -> int:
    """Bytes of the frames that carry a message, without contents, gRPC, HTTP/2 and TLS."""
    match payload:
        case Offer():
            return pb.Frame(hello=frames.to_message(payload)).ByteSize()
        case Refusal():
            return frames.refuse(payload).ByteSize()
        case str():
            return pb.Frame(abandon=pb.Abandon(reason=payload[:MAX_REASON])).ByteSize()
        case events.MemberMessage():
            return frames.frame_of(payload).ByteSize()
        case bytes():
            # The frame that announces a content, and what stands before each of its chunks.
            content = pb.Content(size=len(payload), digest=bytes(32))
            last = pb.Frame(chunk=pb.Chunk(offset=len(payload), data=b"-")).ByteSize() - 1
            return pb.Frame(content=content).ByteSize() + last * -(-len(payload) // CHUNK_BYTES)
        case _:
            return 0
