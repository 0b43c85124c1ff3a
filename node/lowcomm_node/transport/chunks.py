"""Frames on their way between gRPC and us. Those with a chunk, nearly all bytes of an exchange,
pass around protobuf, which would copy each of them three times.

The bytes on the wire are the same. What is not the shortest form of a chunk is left to protobuf.
"""

from typing import cast

from grpc import aio

from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

_CHUNK = 0x2A
"""Field 5 of a Frame, with a length."""
_OFFSET, _DATA = 0x08, 0x12
"""Fields 1 and 2 of a Chunk."""
_MOST_DIGITS = 9
"""Of a number of 63 bits, seven bits each."""


def chunk_frame(offset: int, data: memoryview) -> pb.Frame:
    """A frame with a chunk. ``data`` is copied when the frame is sent, and must stay until then."""
    return cast("pb.Frame", ChunkFrame(offset, data, len(_head(offset, len(data))) + len(data)))


class ChunkFrame:
    """What of a ``pb.Frame`` with a chunk is used, and of that chunk."""

    __slots__ = ("data", "offset", "size")

    def __init__(self, offset: int, data: memoryview, size: int) -> None:
        """``size``: bytes of the whole frame."""
        self.offset = offset
        self.data = data
        self.size = size

    @property
    def chunk(self) -> "ChunkFrame":
        """The chunk."""
        return self

    def WhichOneof(self, group: str) -> str:  # noqa: N802 - as protobuf names it
        """What a frame holds."""
        return "chunk"

    def ByteSize(self) -> int:  # noqa: N802
        """Bytes on the wire."""
        return self.size


def exchange_stub(channel: aio.Channel) -> ExchangeStub:
    """The service at the other end of a channel."""
    stub = ExchangeStub(channel)
    stub.Swap = channel.stream_stream("/lowcomm.v1.Exchange/Swap", write_frame, read_frame)
    return stub


def write_frame(frame: pb.Frame | ChunkFrame) -> bytes:
    """A frame as it travels."""
    if isinstance(frame, ChunkFrame):
        return b"".join((_head(frame.offset, len(frame.data)), frame.data))
    return frame.SerializeToString()


def read_frame(data: bytes) -> pb.Frame:
    """A frame that came. Raises DecodeError if it is none."""
    return cast("pb.Frame", _read_chunk(data)) or pb.Frame.FromString(data)


def _head(offset: int, size: int) -> bytes:
    """What stands before the data of a chunk."""
    inner = (bytes((_OFFSET,)) + _digits(offset) if offset else b"") + (
        bytes((_DATA,)) + _digits(size) if size else b""
    )
    return bytes((_CHUNK,)) + _digits(len(inner) + size) + inner


def _digits(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_chunk(data: bytes) -> ChunkFrame | None:
    """The chunk in a frame that has the form of `_head`; None for any other frame."""
    if not data or data[0] != _CHUNK:
        return None
    size, at = _number(data, 1)
    if size < 0 or at + size != len(data):
        return None
    offset = 0
    if at < len(data) and data[at] == _OFFSET:
        offset, at = _number(data, at + 1)
    if offset < 0 or at >= len(data) or data[at] != _DATA:
        return None
    size, at = _number(data, at + 1)
    if size < 0 or at + size != len(data):
        return None
    return ChunkFrame(offset, memoryview(data)[at:], len(data))


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; -1 if there is none of 63 bits."""
    number = 0
    for place, digit in enumerate(data[at : at + _MOST_DIGITS]):
        number |= (digit & 0x7F) << 7 * place
        if digit < 0x80:
            return number, at + place + 1
    return -1, at
