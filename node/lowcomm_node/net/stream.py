"""The two ends of a ``Swap`` or ``Fetch`` stream behind one interface, and frames with a chunk.

protobuf copies the bytes of a chunk three times at each end, so these frames are read and written
here:

    2A  length  [08  offset]  12  length  bytes        varints; no offset where it is 0

That is what protobuf writes. Whatever else it would read is left to it.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import varint
from lowcomm_node.net.traffic import Meter
from lowcomm_node.system.tasks import in_time
from lowcomm_protocol.errors import ProtocolViolation, in_words
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
        return "chunk"

    def ByteSize(self) -> int:  # noqa: N802
        return len(self._head()) + len(self.data)

    def SerializeToString(self) -> bytes:  # noqa: N802
        return b"".join((self._head(), self.data))

    def _head(self) -> bytes:
        offset = OFFSET + varint(self.offset) if self.offset else b""
        inner = offset + DATA + varint(len(self.data)) if self.data else offset
        return FRAME + varint(len(inner) + len(self.data)) + inner


AnyFrame = pb.Frame | ChunkFrame


write_frame = methodcaller("SerializeToString")
"""The bytes of a frame."""


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


_END: Any = getattr(aio, "EOF")  # noqa: B009 - compiled: a type checker does not see it
CLOSE_DEADLINE = 5.0
"""Seconds for the last frame to reach the other end."""
TAKE_DEADLINE = 180.0
"""Seconds for a caller to take a chunk or the end of its call. At the least --max-down, a chunk of
a snapshot takes 66."""
_NO_FRAME = "sent bytes that are no frame"
_GONE = (aio.UsageError, aio.InternalError, aio.BaseError, RuntimeError)


class CallerStream:
    """The caller's end. Its methods raise LinkLost when the stream is gone or was dropped by us."""

    def __init__(self, call: Any, meter: Meter | None = None) -> None:
        self._call = call
        self._meter = meter or Meter()

    async def send(self, frame: Message | ChunkFrame) -> None:
        """Send one frame; waits while the other end does not read."""
        await self._wait(self._call.write(frame))
        self._meter.up.add(frame.ByteSize())

    async def receive(self) -> Any:
        """The next frame, a `ChunkFrame` for bytes of a content; None when the other end has
        finished. Raises ProtocolViolation if it is invalid."""
        frame = await self._wait(self._call.read())
        if frame is _END:
            if await self._call.code() is not grpc.StatusCode.OK:
                raise LinkLost(await self._why(None))
            return None
        if frame is None:  # what gRPC makes of bytes that it can't parse
            raise ProtocolViolation(_NO_FRAME)
        self._meter.down.add(frame.ByteSize())
        return frame

    async def close(self) -> None:
        """Finish sending, and let the other end read to the end."""
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self._call.done_writing()
                while await self._call.read() is not _END:
                    pass
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            self.cancel()
        except asyncio.CancelledError:
            if _we_are_cancelled():
                raise

    def cancel(self) -> None:
        self._call.cancel()
        # Where a write has failed while a frame of the other end lies unread, gRPC takes the call
        # for done and leaves it open until its deadline; there is no public way to end it.
        self._call._cython_call.cancel("the stream was dropped")

    async def _wait(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise LinkLost(await self._why(error)) from None
        except asyncio.CancelledError:
            if _we_are_cancelled():
                raise
            raise LinkLost("the stream was dropped") from None

    async def _why(self, error: Exception | None) -> str:
        if isinstance(error, aio.AioRpcError):
            code, detail = error.code(), error.details()
        elif self._call.done():
            code, detail = await self._call.code(), await self._call.details()
        else:
            return "the stream broke off"
        return explain(code, detail)


class CalleeStream:
    """The end that was called; like a ``CallerStream``."""

    def __init__(self, context: Any, meter: Meter | None = None, place: str = "") -> None:
        """``place``: the key of the caller's quotas."""
        self._context = context
        self._meter = meter or Meter()
        self.place = place
        self.dropped = asyncio.Event()
        """Set when this end is cancelled."""

    async def send(self, frame: Message | ChunkFrame) -> None:
        try:
            async with in_time(TAKE_DEADLINE, f"the caller took nothing for {TAKE_DEADLINE:.0f} s"):
                await self._context.write(frame)
        except _GONE:
            raise LinkLost("the caller has gone") from None
        self._meter.up.add(frame.ByteSize())

    async def receive(self) -> Any:
        try:
            frame = await self._context.read()
        except _GONE:
            raise LinkLost("the caller has gone") from None
        except DecodeError:
            raise ProtocolViolation(_NO_FRAME) from None
        if frame is _END:
            return None
        self._meter.down.add(frame.ByteSize())
        return frame

    async def close(self) -> None:
        # The handler returns after this, which ends our side.
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                while await self.receive() is not None:
                    pass
        except (LinkLost, ProtocolViolation, TimeoutError):
            return

    def cancel(self) -> None:
        # The handler notices, and aborts the call.
        self.dropped.set()


Stream = CallerStream | CalleeStream


def _we_are_cancelled() -> bool:
    """Whether a CancelledError concerns the running task, and not a call cancelled by another
    task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


_IN_WORDS = {
    grpc.StatusCode.OK: "ended the stream",
    grpc.StatusCode.UNAVAILABLE: "can't be reached",
    grpc.StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    grpc.StatusCode.CANCELLED: "ended the stream",
    grpc.StatusCode.UNAUTHENTICATED: "does not accept who we are",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "is busy",
    # What gRPC itself says with these helps nobody who does not know its code.
    grpc.StatusCode.INTERNAL: "broke the connection off",
    grpc.StatusCode.UNKNOWN: "failed on its side",
    grpc.StatusCode.UNIMPLEMENTED: "does not know this call: it runs another release",
}


def explain(code: grpc.StatusCode, detail: str | None) -> str:
    """A gRPC status in words that a volunteer understands."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (detail or ""):
        return "failed: a message was too large"
    refused = f"refused the call: {in_words(detail[:120])}" if detail else "refused the call"
    return _IN_WORDS.get(code, refused)
