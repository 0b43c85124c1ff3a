"""One stream to one member of an exchange: our contribution goes out, theirs comes in.

Both are bytes in slots of shared memory. What comes in is checked before it is used: size against the plan before the first
byte is read, order and bounds of every chunk, digest of the whole, and then by the trainer, which decodes it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.stream import Stream
from lowcomm_node.trainer.interface import Again
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
        self._size = self._offset = 0
        self._again: Again | None = None
        self._whole = self._resent = False

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
        least: int,
        on_content: Callable[[int, bool], Awaitable[Again | None]],
        on_resend: Callable[[bytes], None],
        on_confirm: Callable[[bytes], None],
    ) -> None:
        """Read frames until the other end has confirmed; its content must have ``least`` bytes and fit ``into``.

        ``on_content`` gets the size of a content that has arrived whole, and whether it is what was asked for again;
        what it returns is asked for. ``on_resend`` gets what the other end asks for again, once at most.

        Raises LinkLost if the stream breaks off or the peer gives up, ProtocolViolation if it sends what is not allowed.
        """
        confirmed = False
        while (frame := await self.stream.receive()) is not None:
            match frame.WhichOneof("kind"):
                case "content":
                    self._begin(frame.content, into, least)
                case "chunk":
                    if self._take(frame.chunk):
                        await self._ask_again(await on_content(self._size, self._again is not None))
                        if confirmed:
                            return
                case "resend":
                    if self._resent:
                        raise ProtocolViolation("asked for our contribution a third time")
                    self._resent = True
                    on_resend(frame.resend.blocks)
                case "confirm":
                    if confirmed or not (self._whole or self._again):
                        raise ProtocolViolation("confirmed before its contribution had come")
                    on_confirm(frame.confirm.members)
                    confirmed = True
                    if self._whole:
                        return  # else only what we have asked for again is still to come
                case "abandon":
                    raise LinkLost(f"gave up: {frame.abandon.reason[:200]}")
                case other:
                    raise ProtocolViolation(f"sent {other!r} where a contribution was expected")
        raise LinkLost("ended the stream")

    async def _ask_again(self, again: Again | None) -> None:
        if again is not None:
            self._again, self._into, self._whole = again, None, False
            await self.send(pb.Frame(resend=pb.Resend(blocks=again.blocks)))

    def _begin(self, content: pb.Content, into: memoryview, least: int) -> None:
        if self._into is not None:
            raise ProtocolViolation("began a second contribution")
        most = len(into)
        if self._again is not None:
            least = most = self._again.size
        if not least <= content.size <= most or len(content.digest) != 32:
            raise ProtocolViolation(f"announced {content.size} bytes where {least} to {most} are due")
        self._into, self._digest, self._size = into, content.digest, content.size
        self._offset, self._hash = 0, sha256()

    def _take(self, chunk: pb.Chunk) -> bool:
        """Take in one chunk; whether the contribution is whole now."""
        if self._into is None:
            raise ProtocolViolation("sent a chunk before its contribution was announced")
        end = self._offset + len(chunk.data)
        if chunk.offset != self._offset or not chunk.data or end > self._size:
            raise ProtocolViolation(f"sent a chunk of {len(chunk.data)} bytes at {chunk.offset}, out of place")
        self._into[chunk.offset : end] = chunk.data
        self._hash.update(chunk.data)
        self.bytes_received += len(chunk.data)
        self._offset = end
        if end < self._size:
            return False
        if self._hash.digest() != self._digest:
            raise ProtocolViolation("sent a contribution that does not match its checksum")
        self._whole = True
        return True
