"""The giving end: files, text and snapshots of our state, piece by piece, to peers in turn.

    enter ──► position 3, 2, 1 ──► opened, list ──► (wanted ──► chunks)*

A peer names a digest, never a path. Files and states share one fair queue. Packed text has another,
and gives way to exchanges. Identities are free, so places are shared by address, not by peer id:

    enter     an address may hold half of the places at most, its network two thirds
    order     one peer of each address before a second of any; then by arrival
    turns     while others wait, a turn ends after some time, the longest first

A peer that loses its turn may enter again, and keeps what it has. It has one place for each kind of
content, so that it can fetch a tokenizer and a state at once, and each text of a run.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic

from lowcomm_node.errors import CheckpointError, RetryLater
from lowcomm_node.fetch.engine import CHUNK_BYTES, MAX_REQUESTS, SILENCE
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.net.bandwidth import LEAST_PIECE, BandwidthLimit
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.storage.snapshots import Snapshots
from lowcomm_node.system.quota import OF_FEW, Shares, prefixes_of
from lowcomm_node.system.tasks import in_time
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.sections import DIGEST_BYTES
from lowcomm_protocol.state import StateForm

REQUEST_BYTES = 64  # bytes of a request at most
ENTER_DEADLINE = 10.0
SLOWEST = 2_000.0  # bytes that buy a peer another second to ask for the next
STILL_HERE = 10.0  # seconds between two signs of life while a snapshot is being made
MOST_SERVED, MOST_READERS = 2, 4  # peers served at once, and those that get text beside them
MOST_WAITING = 30  # peers that may wait for their turn
TURN_SECONDS = 60.0  # length of a turn while others wait, from when its content is open
NETWORK_WEIGHT = 4
"""Peers of one /24 (IPv4) or /48 (IPv6) that weigh as much as one of a single address."""
LOOK_SECONDS = 1.0  # between two looks, while others wait, whether a served peer must go


class GivingTurn:
    """A peer's place in the queue."""

    def __init__(self, peer: str, kind: str, place: str) -> None:
        self.peer = peer
        self.kind = kind
        self.place = place
        self.began: float | None = None
        """When it was first served; infinity while its content is being prepared."""
        self._over = asyncio.Event()
        self._reason = ""

    async def wait_over(self) -> None:
        """Raise RetryLater with the reason as soon as the turn is over."""
        await self._over.wait()
        raise RetryLater(self._reason)

    def end(self, reason: str) -> None:
        """End the stream of this turn, for a reason."""
        self._reason = reason
        self._over.set()


class TurnQueue:
    """Queue with one place for each peer and kind of content, kept over a broken stream."""

    def __init__(
        self,
        served: int = MOST_SERVED,
        waiting: int = MOST_WAITING,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._served = served
        self._places = served + waiting
        self._shares = Shares(OF_FEW)
        self._turns: list[GivingTurn] = []
        """In the order of arrival; those that have begun are served."""
        self._moved = asyncio.Event()

    @property
    def serving(self) -> int:
        """Turns that are served."""
        return sum(turn.began is not None for turn in self._turns)

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._turns) - self.serving

    def enter(self, peer: str, kind: str, place: str) -> GivingTurn:
        """Take a place; ``kind``: of the content; ``place``: the address that the peer comes from.

        Raises RetryLater if there is none for that address.
        """
        turn, taken = GivingTurn(peer, kind, place), len(self._turns)
        for number, former in enumerate(self._turns):
            if (former.peer, former.kind) == (peer, kind):  # entering again makes no turn longer
                turn.place, turn.began = former.place, former.began
                self._turns[number] = turn
                former.end("You have come again: your former stream ends.")
                return turn
        if taken >= self._places or not self._shares.has_room(place, self._places - taken):
            raise RetryLater(f"{taken} peers are served or wait here: ask another peer, or later.")
        self._shares.take(place)
        self._turns.append(turn)
        self._advance()
        return turn

    def position(self, turn: GivingTurn) -> int:
        """Its place among those that wait, from 1; 0 while it is served."""
        return 0 if turn.began is not None else self._order().index(turn) + 1

    async def wait_served(self, turn: GivingTurn) -> AsyncIterator[int]:
        """Its position, at once and whenever it falls, until it is served."""
        last = self._places + 1
        while position := self.position(turn):
            # It may grow when a peer of another address enters; that is not reported.
            if position < last:
                last = position
                yield position
            self.press()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._moved.wait()

    def leave(self, turn: GivingTurn) -> None:
        """Free a place, unless another stream of the same peer has it."""
        if turn in self._turns:
            self._turns.remove(turn)
            self._shares.give_back(turn.place)
            self._advance()

    def begin(self, turn: GivingTurn) -> None:
        """The content of a served turn is open: its time runs."""
        turn.began = min(self._clock(), turn.began or inf)

    def press(self) -> None:
        """While others wait: end the longest turn, if it has lasted long enough."""
        began = [(turn.began, turn) for turn in self._turns if turn.began is not None]
        since, turn = min(began, key=lambda item: item[0], default=(inf, None))
        if turn is not None and self.waiting and self._clock() - since > TURN_SECONDS:
            turn.end("Your turn is over, and others wait: come again.")
            self.leave(turn)

    def _advance(self) -> None:
        while self.waiting and self.serving < self._served:
            self._order()[0].began = inf
        self._moved.set()
        self._moved = asyncio.Event()

    def _order(self) -> list[GivingTurn]:
        """Waiting turns in the order of service."""
        served = [turn.place for turn in self._turns if turn.began is not None]
        held = Counter(prefix for place in served for prefix in prefixes_of(place))
        loads: dict[GivingTurn, float] = {}
        for turn in self._turns:
            if turn.began is None:
                prefixes = prefixes_of(turn.place)
                loads[turn] = max(held[prefixes[0]], held[prefixes[-1]] / NETWORK_WEIGHT)
                held.update(prefixes)
        return sorted(loads, key=lambda turn: loads[turn])


@dataclass(frozen=True)
class Content:
    """A file or a snapshot, as it is given in one turn."""

    opened: pb.Opened
    listing: bytes
    """Precedes the pieces."""
    path: Path
    place: Callable[[int], tuple[int, int]]
    """Offset and size of a piece in the file; (0, 0): there is no such piece."""
    giving: Callable[[int, int], AbstractAsyncContextManager[None]] = lambda *_: nullcontext()
    """Context in which a piece is here, and some bytes of it are given."""
    gives_way: bool = False
    """Whether exchanges go before it."""


class PieceServer:
    """Gives pieces to peers of the run: of files, and of our state."""

    def __init__(
        self,
        files: VerifiedFiles,
        up: BandwidthLimit | None = None,
        may: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """``may``: whether a peer is still admitted to the run."""
        self.turns = TurnQueue()
        self.text_turns = TurnQueue(MOST_READERS)
        self.files = files
        self.packs: dict[bytes, PackStore] = {}
        """Packed text of the run, by the digest of its list."""
        self._up = up or BandwidthLimit()
        self._may = may
        self.state: tuple[StateForm, Snapshots] | None = None
        """Our state, once there is one to give."""

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
                if kind == "state" and self.state is None:
                    raise RetryLater("has no state to hand over yet: ask another peer, or later.")
                if kind == "file" and self.files.find(first.enter.file) is None:
                    raise RetryLater("does not have it yet")
                turns = self.turns
                if kind == "pack":
                    store = self.packs.get(first.enter.pack)
                    if store is None or not any(store.here()):
                        raise RetryLater("has nothing of it yet")
                    turns, kind = self.text_turns, f"pack {store.part.pieces}"
                turn = turns.enter(peer, kind, stream.place)
                ending = group.create_task(turn.wait_over())
                try:
                    async for position in turns.wait_served(turn):
                        await stream.send(pb.FetchReply(position=position))
                    async with self._content(first.enter, stream) as content:
                        turns.begin(turn)
                        await self._give(peer, stream, requests, content)
                finally:
                    turns.leave(turn)
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
        await stream.send(pb.FetchReply(opened=content.opened))
        for start in range(0, len(content.listing), CHUNK_BYTES):
            await self._send_chunk(stream, start, content.listing[start : start + CHUNK_BYTES])
        file, size = await asyncio.to_thread(os.open, content.path, os.O_RDONLY), 0
        try:
            while (request := await _receive(requests, SILENCE + size / SLOWEST)) is not None:
                wanted = request.wanted
                start, size = content.place(wanted.piece)
                if request.WhichOneof("kind") != "wanted" or wanted.offset >= size:
                    raise ProtocolViolation(f"byte {wanted.offset} of piece {wanted.piece}")
                end = min(size, wanted.offset + (wanted.size or size))
                async with content.giving(wanted.piece, end - wanted.offset):
                    await self._send_piece(peer, stream, file, start, wanted.offset, end, content)
        finally:
            os.close(file)

    async def _send_piece(
        self, peer: str, stream: CalleeStream, file: int, start: int, offset: int, end: int,
        content: Content,
    ) -> None:  # fmt: skip
        """Send bytes of a piece that begins at ``start`` of an open file."""
        while offset < end:
            # A removal takes effect in the middle of a transfer, too.
            if not self._may(peer):
                raise CheckpointError("This run does not take you any more.")
            count = min(end - offset, self._up.piece(CHUNK_BYTES))
            if content.gives_way:
                await self._up.give_way()
                count = min(count, LEAST_PIECE if self._up.is_busy else count)
            data = await asyncio.to_thread(os.pread, file, count, start + offset)
            if not data:
                raise CheckpointError("The file is damaged: ask another peer.")
            await self._send_chunk(stream, offset, data)
            offset += len(data)

    async def _send_chunk(self, stream: CalleeStream, offset: int, data: bytes) -> None:
        await self._up.pass_(len(data))
        await stream.send(pb.FetchReply(chunk=pb.Chunk(offset=offset, data=data)))

    @asynccontextmanager
    async def _content(self, enter: pb.Enter, stream: CalleeStream) -> AsyncIterator[Content]:
        """Context that holds a file or a snapshot; while one is made, we show that we live."""
        if enter.WhichOneof("content") == "file":
            if (file := self.files.find(enter.file)) is None:
                raise RetryLater("does not have it any more")
            listing = b"" if enter.listed or len(file.digests) == DIGEST_BYTES else file.digests
            yield Content(
                pb.Opened(name=enter.file, size=file.size), listing, file.path, file.place
            )
            return
        if (store := self.packs.get(enter.pack)) is not None:
            name, size, count = enter.pack, store.part.piece_bytes, store.part.piece_count
            opened = pb.Opened(name=name, size=store.part.size, here=store.here())

            def within(index: int) -> tuple[int, int]:
                return (index * size, size) if index < count else (0, 0)

            listing = b"" if enter.listed else store.file.digests
            yield Content(opened, listing, store.path, within, store.giving, True)
            return
        assert self.state is not None
        form, snapshots = self.state
        offsets, pieces = form.offsets, form.pieces

        def place(index: int) -> tuple[int, int]:
            return (offsets[index], pieces[index].size) if index < len(pieces) else (0, 0)

        async with AsyncExitStack() as stack:
            using = asyncio.ensure_future(stack.enter_async_context(snapshots.use(enter.state)))
            try:
                while not (await asyncio.wait({using}, timeout=STILL_HERE))[0]:
                    await stream.send(pb.FetchReply(position=0))
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
    async with in_time(seconds, "asks for nothing"):
        return await requests.get()
