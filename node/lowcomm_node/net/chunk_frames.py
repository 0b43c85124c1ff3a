"""Frames with a chunk, read and written without protobuf, which copies their bytes three times at
each end.

    2A  length  [08  offset]  12  length  bytes        varints; no offset where it is 0

That is what protobuf writes. Whatever else it would read is left to it.
"""

from dataclasses import dataclass
from typing import Literal

from lowcomm_protocol.messages import exchange_pb2 as pb

FRAME, OFFSET, DATA = b"\x2a", b"\x08", b"\x12"
"""Field 5 of `Frame`, and fields 1 and 2 of `Chunk`."""
SWAP = "/lowcomm.v1.Exchange/Swap"
"""The call whose frames these are."""
MOST_DIGITS = 9
"""Bytes of a varint below 2**63."""


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """In place of a `Frame` with a `Chunk`; it can be asked for what our code asks those."""

    offset: int
    data: memoryview
    """Of a frame that is sent, it must not change until then."""

    @property
    def chunk(self) -> "ChunkFrame":
        """Offset and data."""
        return self

    def WhichOneof(self, group: str) -> Literal["chunk"]:  # noqa: N802 - as messages have it
        """See Frame."""
        return "chunk"

    def ByteSize(self) -> int:  # noqa: N802
        """See Frame."""
        return len(self._head()) + len(self.data)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """See Frame: the same bytes."""
        return b"".join((self._head(), self.data))

    def whole(self) -> pb.Frame:
        """The message."""
        return pb.Frame.FromString(self.SerializeToString())

    def _head(self) -> bytes:
        offset = OFFSET + _varint(self.offset) if self.offset else b""
        inner = offset + DATA + _varint(len(self.data)) if self.data else offset
        return FRAME + _varint(len(inner) + len(self.data)) + inner


AnyFrame = pb.Frame | ChunkFrame


def write_frame(frame: AnyFrame) -> bytes:
    """The bytes of a frame."""
    return frame.SerializeToString()


def read_frame(data: bytes) -> AnyFrame:
    """A frame; raises DecodeError for bytes that are none."""
    return _chunk_of(data) or pb.Frame.FromString(data)


def _chunk_of(data: bytes) -> ChunkFrame | None:
    if not data.startswith(FRAME):
        return None
    length, at = _number(data, 1)
    if at + length != len(data):
        return None
    offset = 0
    if data.startswith(OFFSET, at):
        offset, at = _number(data, at + 1)
    if not data.startswith(DATA, at):
        return None
    length, at = _number(data, at + 1)
    if at + length != len(data):
        return None
    return ChunkFrame(offset, memoryview(data)[at:])


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends; -1 where there is none that is short enough."""
    value = 0
    for shift, digit in enumerate(data[at : at + MOST_DIGITS]):
        value |= (digit & 0x7F) << 7 * shift
        if digit < 0x80:
            return value, at + shift + 1
    return -1, at


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
