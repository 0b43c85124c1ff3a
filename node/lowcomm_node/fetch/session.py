"""Our session with one peer that gives us a file: wait for our turn, then take piece after piece.

A broken stream is reopened, and goes on at the byte that it had reached.
"""

import asyncio
from collections import deque
from hashlib import sha256
from time import monotonic
from typing import Protocol

import grpc

from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.fetch.replies import ATTEMPTS, MOST_POSITION, RETRY_PAUSE, Replies
from lowcomm_node.fetch.wanted import RunFile
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CallerStream
from lowcomm_node.storage.partial_file import PartialFile
from lowcomm_protocol.errors import ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import DIGEST_BYTES, count_pieces, digest_of_pieces

AHEAD = 2
"""Pieces asked for in advance, so that the link does not idle."""
IDLE = 1.0
"""Seconds between two looks for something to ask for."""
_REFUSED = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Receiver(Protocol):
    """What the sessions of one file share."""

    file: RunFile
    channels: Channels
    down: BandwidthLimit

    async def open(self, size: int, digests: tuple[bytes, ...]) -> PartialFile:
        """The file, once its size and the digests of its pieces are known."""
        ...

    def take(self, peer: str) -> int | None:
        """A piece to ask a peer for."""
        ...

    def give_back(self, peer: str, index: int) -> None:
        """A piece that has not come."""
        ...

    def received(self, count: int) -> None:
        """Count bytes that have come."""
        ...


class Session:
    """One peer, and what it has given of a piece so far."""

    def __init__(self, receiver: Receiver, peer: PeerInfo) -> None:
        self.peer = peer
        self.position: int | None = None
        """In its queue; None: unknown yet."""
        self.served: float | None = None
        self.preparing = False
        self.bytes_received = 0
        self._receiver = receiver
        self._name = peer.peer_id
        self._asked: deque[int] = deque()
        self._begun = bytearray()
        """Of the first piece that is asked for."""

    async def run(self) -> None:
        """Take pieces until none is missing.

        Raises LinkLost, RetryLater, CheckpointError, ProtocolViolation, DiskFull.
        """
        failures = 0
        try:
            while True:
                before = self.bytes_received
                try:
                    return await self._session()
                except LinkLost:
                    # A peer that has given anything gets all its attempts again.
                    failures = 1 if self.bytes_received > before else failures + 1
                    if failures == ATTEMPTS:
                        raise
                    self.position = self.served = None
                    await asyncio.sleep(RETRY_PAUSE)
        finally:
            for index in self._asked:
                self._receiver.give_back(self._name, index)

    async def _session(self) -> None:
        stub = await self._receiver.channels.stub(self.peer)
        call = stub.File(metadata=self._receiver.channels.metadata(self._name))
        stream = CallerStream(call)
        try:
            enter = pb.Enter(snapshot=self._receiver.file.sha256)
            await stream.send(pb.FetchRequest(enter=enter))
            replies = Replies(stream, self._receiver.down, self._took)
            size = await self._opened(replies)
            if self._receiver.file.size is None:
                await self._take_whole(stream, replies, size)
                return
            into = await self._receiver.open(size, await self._digests(replies, size))
            await self._take_pieces(stream, replies, into)
            await stream.close()
        except LinkLost:
            if call.done() and await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise RetryLater(in_words(await call.details() or "is busy")) from None
            if call.done() and await call.code() in _REFUSED:
                raise CheckpointError(in_words(await call.details() or "refuses us")) from None
            raise
        finally:
            stream.cancel()

    async def _opened(self, replies: Replies) -> int:
        """Wait for our turn; the size of the file."""
        most = MOST_POSITION
        while True:
            reply = await replies.waiting(self.position)
            if reply.WhichOneof("kind") == "opened":
                break
            if reply.WhichOneof("kind") != "position" or not 0 < reply.position <= most:
                raise ProtocolViolation("sent something else before it was our turn")
            most = self.position = reply.position
        self.position, self.served = None, monotonic()
        file, opened = self._receiver.file, reply.opened
        if opened.snapshot != file.sha256 or not file.takes(opened.size):
            raise ProtocolViolation(f"offers another file than {file.name}")
        return opened.size

    async def _digests(self, replies: Replies, size: int) -> tuple[bytes, ...]:
        file, count = self._receiver.file, count_pieces(size)
        if file.is_one_piece:
            return (file.sha256,)
        listed = bytearray()
        await replies.read(listed, count * DIGEST_BYTES)
        digests = tuple(
            bytes(listed[start : start + DIGEST_BYTES])
            for start in range(0, len(listed), DIGEST_BYTES)
        )
        if digest_of_pieces(digests) != file.pieces:
            raise ProtocolViolation(f"tells digests that are not those of {file.name}")
        return digests

    async def _take_whole(self, stream: CallerStream, replies: Replies, size: int) -> None:
        """Take a file whose specification does not tell its size: nothing that this peer says of it
        counts beyond this session."""
        file, self._begun = self._receiver.file, self._begun[:size]
        if len(self._begun) < size:
            await self._ask(stream, 0, len(self._begun))
            await replies.read(self._begun, size)
        if await asyncio.to_thread(lambda: sha256(self._begun).digest()) != file.sha256:
            raise ProtocolViolation(f"sent another file than {file.name}")
        into = await self._receiver.open(size, (file.sha256,))
        if into.missing:
            await asyncio.to_thread(into.put, 0, self._begun)

    async def _take_pieces(self, stream: CallerStream, replies: Replies, into: PartialFile) -> None:
        for index in self._asked:  # of the stream before
            await self._ask(stream, index, len(self._begun) if index == self._asked[0] else 0)
        while into.missing:
            while (
                len(self._asked) < AHEAD and (index := self._receiver.take(self._name)) is not None
            ):
                self._asked.append(index)
                await self._ask(stream, index, 0)
            if not self._asked:
                await asyncio.sleep(IDLE)
                continue
            start, stop = into.bounds(self._asked[0])
            await replies.read(self._begun, stop - start)
            index, data = self._asked.popleft(), self._begun
            self._begun = bytearray()
            if not await asyncio.to_thread(into.fits, index, data):
                self._receiver.give_back(self._name, index)
                raise ProtocolViolation(f"sent a wrong piece of {self._receiver.file.name}")
            if index in into.missing:
                await asyncio.to_thread(into.put, index, data)

    async def _ask(self, stream: CallerStream, index: int, offset: int) -> None:
        wanted = pb.Wanted(piece=index, offset=offset)
        await stream.send(pb.FetchRequest(wanted=wanted))

    def _took(self, count: int) -> None:
        self.bytes_received += count
        self._receiver.received(count)
