"""A joiner's session with one donor: wait for our turn, then take piece after piece.

enter ──► position 3, 2, 1 ──► opened, manifest ──► (wanted ──► chunks)*
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import grpc

from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.fetch.download import Download, Source
from lowcomm_node.fetch.replies import ATTEMPTS, MOST_POSITION, RETRY_PAUSE, Replies
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CallerStream
from lowcomm_protocol.errors import ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.state import Manifest, Piece, name_of, read_manifest

AHEAD_BYTES = 1024 * 1024
"""Bytes of pieces asked for in advance, so that the link does not idle."""
OPEN_DEADLINE = 900.0
"""Seconds for a donor to make a snapshot, while it sends signs of life."""
LATER = 20.0
"""Seconds before a donor is asked again that was busy, slow, or of another version."""
TICK = 0.25
_REFUSED = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)


@dataclass(frozen=True)
class Asked:
    """A piece under way. ``audit``: we have it already, and compare."""

    piece: Piece
    audit: bool = False


Plausible = Callable[[PeerInfo, int], Awaitable[bool]]
"""Whether a donor's snapshot may be of this swarm step."""


class Joiner(Protocol):
    """What the sessions of one joiner share."""

    channels: Channels
    download: Download
    down: BandwidthLimit
    bytes_received: int
    plausible: Plausible

    def received(self, size: int) -> None:
        """Count received bytes."""
        ...

    def took(self, peer: str, seconds: float) -> None:
        """A piece has come, ``seconds`` after it was awaited."""
        ...

    def disputed(self, peer: str) -> None:
        """A donor's piece has nothing in common with another's."""
        ...

    def changed(self) -> None:
        """Wake whoever waits for changes."""
        ...

    async def wait_changed(self, seconds: float) -> None:
        """Wait until something has changed, or for ``seconds``."""
        ...


class TurnOver(RetryLater):
    """Others wait at a donor that has served us for long: we queue again."""


class DonorSession:
    """Our session with one donor."""

    def __init__(self, joiner: Joiner, donor: PeerInfo) -> None:
        self.donor = donor
        self.position: int | None = None
        """In its queue; 0: it is our turn; None: unknown yet."""
        self.served: float | None = None
        self.bytes_received = 0
        self.since = monotonic()
        """Time of the last position, or of the last bytes."""
        self.began: float | None = None
        """Since when we wait for the current piece."""
        self.idle = False
        """It could give, but there is nothing to ask for."""
        self._joiner = joiner
        self._download = joiner.download
        self._known: tuple[bytes, Manifest] | None = None
        self._partial: tuple[bytes, Asked, bytearray] | None = None
        """The received part of a piece when the stream broke, and its snapshot."""

    @property
    def preparing(self) -> bool:
        """Whether it makes a snapshot for us."""
        return self.position == 0 and self.served is None

    async def run(self) -> None:
        """Take pieces until nothing is left.

        Raises LinkLost, RetryLater, CheckpointError, ProtocolViolation, DiskFull.
        """
        if self._download.base is not None:
            self._known = (
                name_of(self._download.base.to_bytes(self._download.form)),
                self._download.base,
            )
        failures = 0
        while True:
            before = self._joiner.bytes_received
            try:
                await self._session()
                return
            except TurnOver:
                if self._joiner.bytes_received == before:
                    raise
                self.position = None
                await asyncio.sleep(RETRY_PAUSE)
            except LinkLost:
                # A donor that has given anything gets all its attempts again.
                failures = 1 if self._joiner.bytes_received > before else failures + 1
                if failures == ATTEMPTS:
                    raise
                self.position = None
                await asyncio.sleep(RETRY_PAUSE)

    async def _session(self) -> None:
        stub = await self._joiner.channels.stub(self.donor)
        call = stub.Fetch(metadata=self._joiner.channels.metadata(self.donor.peer_id))
        stream = CallerStream(call)
        source: Source | None = None
        try:
            await stream.send(
                pb.FetchRequest(enter=pb.Enter(snapshot=self._known[0] if self._known else b""))
            )
            replies = Replies(stream, self._joiner.down, self._received)
            name, manifest = await self._opened(replies)
            self._known = (name, manifest)
            source = self._download.open(self.donor.peer_id, manifest)
            self._joiner.changed()
            await self._take_pieces(stream, replies, source, name)
            await stream.close()
        except LinkLost:
            if call.done() and await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise (TurnOver if self.position == 0 else RetryLater)(
                    in_words(await call.details() or "is busy")
                ) from None
            if call.done() and await call.code() in _REFUSED:
                raise CheckpointError(in_words(await call.details() or "refuses us")) from None
            raise
        finally:
            stream.cancel()
            self.began = self.served = None
            self.idle = False
            if source is not None:
                self._download.close_source(source)
            self._joiner.changed()

    async def _opened(self, replies: Replies) -> tuple[bytes, Manifest]:
        """Wait for our turn; returns the snapshot that it begins with."""
        most, ours = MOST_POSITION, monotonic()
        while True:
            reply = await replies.waiting(self.position)
            kind = reply.WhichOneof("kind")
            if kind == "opened":
                break
            if kind != "position" or reply.position > most:
                raise ProtocolViolation(
                    f"sent {kind or 'nothing'} before it was our turn, or a position that grew"
                )
            ours = ours if self.position == 0 else monotonic()
            if not reply.position and monotonic() - ours > OPEN_DEADLINE:
                raise RetryLater("takes too long to make a snapshot")
            most = self.position = reply.position
            self.since = monotonic()
        self.position, self.served = 0, monotonic()
        name, form = reply.opened.snapshot, self._download.form
        if self._known is not None and self._known[0] == name:
            return self._known
        if not 0 < reply.opened.size <= form.largest_manifest:
            raise ProtocolViolation(
                f"a manifest of {reply.opened.size} bytes: at most {form.largest_manifest} are "
                "needed"
            )
        data = bytearray()
        await replies.read(data, reply.opened.size)
        if name_of(bytes(data)) != name:
            raise ProtocolViolation("a manifest that does not match its digest")
        manifest = read_manifest(bytes(data), form)
        if not await self._joiner.plausible(self.donor, manifest.swarm_step):
            raise ProtocolViolation(
                f"a snapshot of swarm step {manifest.swarm_step}, which nobody else is near"
            )
        return name, manifest

    async def _take_pieces(
        self, stream: CallerStream, replies: Replies, source: Source, name: bytes
    ) -> None:
        asked: deque[Asked] = deque()
        partial = self._partial
        self._partial = None
        if partial is not None and partial[0] != name:
            partial = None
        while True:
            await self._ask_ahead(stream, source, asked, partial)
            self.idle = not asked
            if not asked:
                if self._download.is_complete() or source.out:
                    return
                await self._joiner.wait_changed(TICK)
                if monotonic() - self.since > LATER:
                    raise RetryLater(
                        "has nothing that we miss: its state is of another version, or others give "
                        "the rest"
                    )
                continue
            self.began = monotonic()
            data = bytearray(partial[2]) if partial and partial[1] == asked[0] else bytearray()
            partial = None
            try:
                await replies.read(data, asked[0].piece.size)
            except LinkLost:
                self._partial = (name, asked[0], data)
                raise
            one = asked.popleft()
            self._joiner.took(self.donor.peer_id, monotonic() - self.began)
            if not one.audit:
                await self._download.put(source, one.piece, data)
            elif not await self._download.compare(source, one.piece, data):
                self._joiner.disputed(self.donor.peer_id)
            self._joiner.changed()

    async def _ask_ahead(
        self,
        stream: CallerStream,
        source: Source,
        asked: deque[Asked],
        partial: tuple[bytes, Asked, bytearray] | None,
    ) -> None:
        # Under an owner's limit the link is busy anyway. At most a sixteenth, so that no donor gets
        # all of a small state.
        ahead = (
            min(AHEAD_BYTES, self._download.form.size // 16)
            if self._joiner.down.rate is None
            else 0
        )
        while not asked or sum(one.piece.size for one in asked) < ahead:
            offset = 0
            if (
                not asked
                and partial is not None
                and not partial[1].audit
                and self._download.claim(source, partial[1].piece)
            ):
                one, offset = partial[1], len(partial[2])
            elif (piece := self._download.audit(source)) is not None:
                one = Asked(piece, audit=True)
            elif (piece := self._download.take(source)) is not None:
                one = Asked(piece)
            else:
                return
            asked.append(one)
            await stream.send(
                pb.FetchRequest(wanted=pb.Wanted(piece=one.piece.index, offset=offset))
            )

    def _received(self, count: int) -> None:
        self.since = monotonic()
        self.bytes_received += count
        self._joiner.received(count)
