"""The donor's side of Fetch: a joiner waits for its turn, then receives the pieces that it asks
for.

    enter ──► position 3, 2, 1 ──► opened, manifest ──► (wanted ──► chunks)*

A turn ends for a joiner that takes or asks too slowly and, while others wait, after some time
(fetch/queue.py). A joiner that was served in part queues again, and keeps what it has.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.fetch.queue import Turn, TurnQueue
from lowcomm_node.fetch.readahead import ReadAhead
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.storage.snapshots import Snapshot, Snapshots
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.state import StateForm

CHUNK_BYTES = 256 * 1024
MAX_JOINERS = 2
"""Peers served at once."""
MAX_WAITING = 16
"""Peers that may wait for their turn."""
SHORTEST_TURN, LONGEST_TURN = 60.0, 600.0
"""Bounds, in seconds, of a turn while others wait. It lasts as long as the whole state takes at"""
TURN_RATE = 1_000_000.0
"""this many bytes a second."""
MAX_REQUESTS, REQUEST_BYTES = 64, 64
"""Requests of one joiner that may wait, and bytes of one."""
ENTER_DEADLINE = 10.0
STILL_HERE = 10.0
"""Seconds between two signs of life while a snapshot is being made."""
PATIENCE = 30.0
"""Seconds for a joiner to ask for the next piece, or to take a chunk, plus its time at"""
SLOWEST = 2_000.0
"""this many bytes a second: a quarter of the least ``--max-down``."""


class Giver(ABC):
    """Serves pieces of what lies in a file, to a few joiners at a time."""

    def __init__(
        self,
        size: int,
        up: BandwidthLimit | None = None,
        may: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """``size``: bytes that a turn is long enough for; ``may``: whether a peer is still admitted
        to the run."""
        self._up = up or BandwidthLimit()
        self._may = may
        turn_seconds = min(LONGEST_TURN, max(SHORTEST_TURN, size / TURN_RATE))
        self._queue = TurnQueue(MAX_JOINERS, MAX_WAITING, turn_seconds)

    @property
    def joiners(self) -> int:
        """Peers served now."""
        return self._queue.busy

    @property
    def waiting(self) -> int:
        """Peers that wait for their turn."""
        return len(self._queue) - self._queue.busy

    async def serve(self, peer: str, stream: CalleeStream) -> None:
        """Serve one joiner.

        Raises RetryLater, CheckpointError, ProtocolViolation or LinkLost with the reason of its
        end.
        """
        async with ReadAhead(stream, MAX_REQUESTS, REQUEST_BYTES) as requests:
            await self._serve(peer, stream, requests)

    async def _serve(self, peer: str, stream: CalleeStream, requests: ReadAhead) -> None:
        enter = await self._receive(requests, ENTER_DEADLINE)
        if enter is None or enter.WhichOneof("kind") != "enter":
            raise ProtocolViolation("a fetch begins with enter")
        turn = self._queue.enter(peer, stream.place)
        try:
            async for position in turn.wait_served():
                await self._send(stream, pb.FetchReply(position=position))
            await self._serve_turn(turn, stream, requests, enter.enter.snapshot)
        except asyncio.CancelledError:
            # The queue ends a turn by cancelling its task. Any other cancellation goes first.
            task = asyncio.current_task()
            if not turn.lost or task is None or task.uncancel():
                raise
            raise RetryLater(turn.lost) from None
        finally:
            turn.leave()

    @abstractmethod
    async def _serve_turn(
        self, turn: Turn, stream: CalleeStream, requests: ReadAhead, wanted: bytes
    ) -> None:
        """Serve whoever enters with ``wanted``, from the beginning of its turn."""

    async def _serve_pieces(
        self,
        turn: Turn,
        stream: CalleeStream,
        requests: ReadAhead,
        path: Path,
        places: Sequence[tuple[int, int]],
    ) -> None:
        """``places``: where each piece begins in the file, and its size."""
        largest = max(size for _, size in places)
        while True:
            request = await self._receive(requests, PATIENCE + largest / SLOWEST)
            if request is None:
                return
            wanted = request.wanted
            if request.WhichOneof("kind") != "wanted" or wanted.piece >= len(places):
                raise ProtocolViolation(f"there is no piece {wanted.piece}")
            start, size = places[wanted.piece]
            if wanted.offset >= size:
                raise ProtocolViolation(f"byte {wanted.offset} of a piece of {size} bytes")
            await self._send_file(turn, stream, path, start, wanted.offset, size)

    async def _send_file(
        self, turn: Turn, stream: CalleeStream, path: Path, start: int, offset: int, size: int
    ) -> None:
        """Bytes ``offset`` to ``size`` of what begins at ``start``."""
        with _opened(path) as descriptor:
            while offset < size:
                # A removal takes effect in the middle of a transfer, too.
                if not self._may(turn.peer):
                    raise CheckpointError("This run does not take you any more.")
                count = min(size - offset, self._up.piece(CHUNK_BYTES))
                with turn.ours():
                    data = await asyncio.to_thread(os.pread, descriptor, count, start + offset)
                    if not data:
                        raise CheckpointError("The file is damaged: ask another peer.")
                    await self._up.pass_(len(data))
                await self._send(
                    stream, pb.FetchReply(chunk=pb.Chunk(offset=offset, data=data)), len(data)
                )
                turn.took(len(data))
                offset += len(data)

    async def _send(self, stream: CalleeStream, reply: pb.FetchReply, size: int = 0) -> None:
        try:
            async with asyncio.timeout(PATIENCE + size / SLOWEST):
                await stream.send(reply)
        except TimeoutError:
            raise LinkLost("takes what it asked for too slowly") from None

    async def _receive(self, requests: ReadAhead, seconds: float) -> pb.FetchRequest | None:
        try:
            async with asyncio.timeout(seconds):
                return await requests.receive()
        except TimeoutError:
            raise LinkLost("asks for nothing") from None


class Donor(Giver):
    """Serves snapshots to joiners."""

    def __init__(
        self,
        form: StateForm,
        snapshots: Snapshots,
        up: BandwidthLimit | None = None,
        may: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """See `Giver`."""
        super().__init__(form.size, up, may)
        self._places = [
            (start, piece.size) for start, piece in zip(form.offsets, form.pieces, strict=True)
        ]
        self._snapshots = snapshots

    async def _serve_turn(
        self, turn: Turn, stream: CalleeStream, requests: ReadAhead, wanted: bytes
    ) -> None:
        async with self._snapshot(turn, stream, wanted) as snapshot:
            opened = pb.Opened(
                snapshot=snapshot.name, size=(snapshot.path / "manifest").stat().st_size
            )
            await self._send(stream, pb.FetchReply(opened=opened))
            if wanted != snapshot.name:
                await self._send_file(turn, stream, snapshot.path / "manifest", 0, 0, opened.size)
            await self._serve_pieces(turn, stream, requests, snapshot.path / "state", self._places)

    @asynccontextmanager
    async def _snapshot(
        self, turn: Turn, stream: CalleeStream, wanted: bytes
    ) -> AsyncIterator[Snapshot]:
        """Context that holds a snapshot.

        Making one of a large model takes a while: the joiner gets signs of life meanwhile.
        """
        async with AsyncExitStack() as stack:
            using = asyncio.ensure_future(stack.enter_async_context(self._snapshots.use(wanted)))
            try:
                with turn.ours():
                    while not (await asyncio.wait({using}, timeout=STILL_HERE))[0]:
                        await self._send(stream, pb.FetchReply(position=0))
                yield await using
            finally:
                using.cancel()
                await asyncio.gather(using, return_exceptions=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
