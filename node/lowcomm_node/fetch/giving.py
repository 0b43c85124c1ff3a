"""The giving end: files of the run and snapshots of our state, piece by piece, to peers in turn.

    enter ──► position 3, 2, 1 ──► opened, list ──► (wanted ──► chunks)*

A peer names a digest, never a path. All contents share one queue (queue.py).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.fetch.engine import CHUNK_BYTES, MAX_REQUESTS, SILENCE
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.queue import TurnQueue
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.storage.snapshots import Snapshots
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.state import StateForm

REQUEST_BYTES = 64  # bytes of a request at most
ENTER_DEADLINE = 10.0
SLOWEST = 2_000.0  # bytes that buy a peer another second, to ask or to read
STILL_HERE = 10.0  # seconds between two signs of life while a snapshot is being made


@dataclass(frozen=True)
class Content:
    """A file or a snapshot, as it is given in one turn."""

    opened: pb.Opened
    listing: bytes
    """Precedes the pieces."""
    path: Path
    place: Callable[[int], tuple[int, int]]
    """Where a piece begins in the file, and its size; (0, 0): there is no such piece."""


class PieceServer:
    """Gives pieces to peers of the run: of files, and of our state after ``serve_state``."""

    def __init__(
        self,
        files: VerifiedFiles,
        up: BandwidthLimit | None = None,
        may: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """``may``: whether a peer is still admitted to the run."""
        self.turns = TurnQueue()
        self.files = files
        self._up = up or BandwidthLimit()
        self._may = may
        self._state: tuple[StateForm, Snapshots] | None = None

    def serve_state(self, form: StateForm, snapshots: Snapshots) -> None:
        """Give our state, too."""
        self._state = form, snapshots

    async def serve(self, peer: str, stream: CalleeStream) -> None:
        """Serve one stream. Raises NodeError or ProtocolViolation with the reason of its end."""
        requests: asyncio.Queue[pb.FetchRequest | None] = asyncio.Queue()  # _read bounds it
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(_read(stream, requests))
                first = await _receive(requests, ENTER_DEADLINE)
                if first is None or first.WhichOneof("kind") != "enter":
                    raise ProtocolViolation("a fetch begins with enter")
                kind = first.enter.WhichOneof("content") or "state"
                # Waiting for a turn would be in vain.
                if kind == "state" and self._state is None:
                    raise RetryLater("has no state to hand over yet: ask another peer, or later.")
                if kind == "file" and self.files.find(first.enter.file) is None:
                    raise RetryLater("does not have it yet")
                turn = self.turns.enter(peer, kind, stream.place)
                ending = group.create_task(turn.wait_over())
                try:
                    async for position in self.turns.wait_served(turn):
                        await _send(stream, pb.FetchReply(position=position))
                    async with self._content(first.enter, stream) as content:
                        self.turns.begin(turn)
                        await self._give(peer, stream, requests, content)
                finally:
                    self.turns.leave(turn)
                reading.cancel()
                ending.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _give(
        self,
        peer: str,
        stream: CalleeStream,
        requests: asyncio.Queue[pb.FetchRequest | None],
        content: Content,
    ) -> None:
        await _send(stream, pb.FetchReply(opened=content.opened))
        for start in range(0, len(content.listing), CHUNK_BYTES):
            await self._send_chunk(stream, start, content.listing[start : start + CHUNK_BYTES])
        file, size = await asyncio.to_thread(os.open, content.path, os.O_RDONLY), 0
        try:
            while (request := await _receive(requests, SILENCE + size / SLOWEST)) is not None:
                piece, offset = request.wanted.piece, request.wanted.offset
                start, size = content.place(piece)
                if request.WhichOneof("kind") != "wanted" or offset >= size:
                    raise ProtocolViolation(f"byte {offset} of piece {piece}")
                while offset < size:
                    # A removal takes effect in the middle of a transfer, too.
                    if not self._may(peer):
                        raise CheckpointError("This run does not take you any more.")
                    count = min(size - offset, self._up.piece(CHUNK_BYTES))
                    data = await asyncio.to_thread(os.pread, file, count, start + offset)
                    if not data:
                        raise CheckpointError("The file is damaged: ask another peer.")
                    await self._send_chunk(stream, offset, data)
                    offset += len(data)
        finally:
            os.close(file)

    async def _send_chunk(self, stream: CalleeStream, offset: int, data: bytes) -> None:
        await self._up.pass_(len(data))
        await _send(stream, pb.FetchReply(chunk=pb.Chunk(offset=offset, data=data)), len(data))

    @asynccontextmanager
    async def _content(self, enter: pb.Enter, stream: CalleeStream) -> AsyncIterator[Content]:
        """Context that holds a file or a snapshot; while one is made, we show that we live."""
        if enter.WhichOneof("content") == "file":
            if (file := self.files.find(enter.file)) is None:
                raise RetryLater("does not have it any more")
            listing = b"".join(file.digests) if len(file.digests) > 1 else b""
            yield Content(
                pb.Opened(name=enter.file, size=file.size), listing, file.path, file.place
            )
            return
        assert self._state is not None
        form, snapshots = self._state
        offsets, pieces = form.offsets, form.pieces

        def place(index: int) -> tuple[int, int]:
            return (offsets[index], pieces[index].size) if index < len(pieces) else (0, 0)

        async with AsyncExitStack() as stack:
            using = asyncio.ensure_future(stack.enter_async_context(snapshots.use(enter.state)))
            try:
                while not (await asyncio.wait({using}, timeout=STILL_HERE))[0]:
                    await _send(stream, pb.FetchReply(position=0))
                snapshot = await using
                manifest = (snapshot.path / "manifest").read_bytes()
                opened = pb.Opened(name=snapshot.name, size=len(manifest))
                listing = b"" if enter.state == snapshot.name else manifest
                yield Content(opened, listing, snapshot.path / "state", place)
            finally:
                using.cancel()
                await asyncio.gather(using, return_exceptions=True)


async def _read(stream: CalleeStream, requests: asyncio.Queue[pb.FetchRequest | None]) -> None:
    """Read requests as they come, whatever their handler does meanwhile.

    gRPC buffers megabytes of a stream that nobody reads: peers that wait for their turn could fill
    our memory with that. Raises LinkLost, ProtocolViolation.
    """
    while (request := await stream.receive()) is not None:
        if (size := request.ByteSize()) > REQUEST_BYTES or requests.qsize() >= MAX_REQUESTS:
            raise ProtocolViolation(
                f"a request of {size} bytes, or more than {MAX_REQUESTS} requests at once, where "
                f"{REQUEST_BYTES} bytes are enough"
            )
        requests.put_nowait(request)
    requests.put_nowait(None)


async def _receive(
    requests: asyncio.Queue[pb.FetchRequest | None], seconds: float
) -> pb.FetchRequest | None:
    try:
        async with asyncio.timeout(seconds):
            return await requests.get()
    except TimeoutError:
        raise LinkLost("asks for nothing") from None


async def _send(stream: CalleeStream, reply: pb.FetchReply, size: int = 0) -> None:
    try:
        async with asyncio.timeout(SILENCE + size / SLOWEST):
            await stream.send(reply)
    except TimeoutError:
        raise LinkLost("takes what it asked for too slowly") from None
