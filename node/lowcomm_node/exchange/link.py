"""One stream to one member of an exchange: our contribution goes out, theirs comes in.

Both are bytes in slots of shared memory. What comes in is checked before it is used: size against the plan before the first
byte is read, order and bounds of every chunk, digest of the whole, and then by the trainer, which decodes it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.stream import Stream
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb

CHUNK_BYTES = 256 * 1024


class Link:
    """Moves contents over one stream and counts payload bytes where they enter and leave it."""

    def __init__(self, peer: str, stream: Stream) -> None:
        self.peer = peer
        self.stream = stream
        self.bytes_sent = 0
        self.bytes_received = 0
        # One writer at a time, in the order of asking: a stream takes no two writes at once, and a confirmation may be
        # due while our contribution is still on its way.
        self._writing = asyncio.Lock()
        self._into: memoryview | None = None
        self._digest = b""
        self._hash = sha256()

    async def send(self, frame: pb.Frame) -> None:
        """Send one frame, after all that was to be sent before. Raises LinkLost."""
        async with self._writing:
            await self.stream.send(frame)

    async def send_content(self, data: memoryview, digest: bytes) -> None:
        """Send our coded contribution. Raises LinkLost."""
        async with self._writing:
            await self.stream.send(pb.Frame(content=pb.Content(size=len(data), digest=digest)))
            for offset in range(0, len(data), CHUNK_BYTES):
                piece = bytes(data[offset : offset + CHUNK_BYTES])
                await self.stream.send(pb.Frame(chunk=pb.Chunk(offset=offset, data=piece)))
                self.bytes_sent += len(piece)

    async def send_confirm(self, members: bytes) -> None:
        """Tell whose contributions we hold. Raises LinkLost."""
        await self.send(pb.Frame(confirm=pb.Confirm(members=members)))

    async def send_abandon(self, reason: str) -> None:
        """Tell why we give up. Raises LinkLost."""
        await self.send(pb.Frame(abandon=pb.Abandon(reason=reason[:200])))

    async def read(
        self,
        into: memoryview,
        on_content: Callable[[], Awaitable[None]],
        on_confirm: Callable[[bytes], None],
    ) -> None:
        """Read frames until the other end has confirmed; its content must fill ``into`` exactly.

        Raises LinkLost if the stream breaks off or the peer gives up, ProtocolViolation if it sends what is not allowed.
        """
        while (frame := await self.stream.receive()) is not None:
            match frame.WhichOneof("kind"):
                case "content":
                    self._begin(frame.content, into)
                case "chunk":
                    if self._take(frame.chunk):
                        await on_content()
                case "confirm":
                    on_confirm(frame.confirm.members)
                    return  # a confirmation is the last thing that a member says
                case "abandon":
                    raise LinkLost(f"gave up: {frame.abandon.reason[:200]}")
                case other:
                    raise ProtocolViolation(f"sent {other!r} where a contribution was expected")
        raise LinkLost("ended the stream")

    def _begin(self, content: pb.Content, into: memoryview) -> None:
        if self._into is not None:
            raise ProtocolViolation("began a second contribution")
        if content.size != len(into) or len(content.digest) != 32:
            raise ProtocolViolation(f"announced {content.size} bytes where the plan has {len(into)}")
        self._into, self._digest = into, content.digest

    def _take(self, chunk: pb.Chunk) -> bool:
        """Take in one chunk; whether the contribution is whole now."""
        if self._into is None:
            raise ProtocolViolation("sent a chunk before its contribution was announced")
        end = self.bytes_received + len(chunk.data)
        if chunk.offset != self.bytes_received or not chunk.data or end > len(self._into):
            raise ProtocolViolation(f"sent a chunk of {len(chunk.data)} bytes at {chunk.offset}, out of place")
        self._into[chunk.offset : end] = chunk.data
        self._hash.update(chunk.data)
        self.bytes_received = end
        if end < len(self._into):
            return False
        if self._hash.digest() != self._digest:
            raise ProtocolViolation("sent a contribution that does not match its checksum")
        return True
