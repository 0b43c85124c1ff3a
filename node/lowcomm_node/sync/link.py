"""One stream to one member of an exchange: contents go out, contents come in.

Both are bytes in slots of shared memory. What comes in is checked before it is used: size against
the plan before the first byte is read, order and bounds of every chunk, digest of the whole, and
then by the trainer, which decodes it.

    PairLink     each end sends its whole contribution, and parts of it again on request
    GroupLink    each end sends one share and one mean, and what a group has to agree on
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from time import monotonic
from typing import ClassVar

from blake3 import blake3

from lowcomm_node.errors import LinkLost, PeerGaveUp, TooSlow
from lowcomm_node.net.bandwidth import Arrival, Bandwidth, Turns
from lowcomm_node.net.stream import ChunkFrame, Stream
from lowcomm_node.system.tasks import Stages, in_time
from lowcomm_protocol.errors import MAX_REASON, ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb

CHUNK_BYTES = 1024 * 1024
"""The most that a receiver takes. Less costs more: in each chunk gRPC, the event loop and TLS begin
anew."""
EXPECTED_BYTES = 256 * 1024
"""Of a chunk, for our limit on what comes in; a larger one is paid for afterwards."""
LEAST_CHUNK, FREE_CHUNKS = 1024, 64
"""Chunks of a content have so many bytes on average, but for the first few: each costs us as much
work as a large one."""
PACE = 2.0
"""Times as long as at an even pace a content may take: half of it must have come when all of its
time is over, and of the rest of the time the same holds."""
PATIENCE = 0.25
"""Share of its time in which nothing of a content need come."""
SLACK = 1.5
"""Times as long as it has taken so far a content gets to come whole."""
MEASURED_FROM = 1.0
"""Seconds after which the part of a content that has come tells how fast the line is."""
PARTS = {
    pb.WHOLE: "contribution",
    pb.SHARE: "share",
    pb.MEAN: "mean",
    pb.MISSED: "missed",
    pb.SLOW: "slow weights",
}
REPEATED = {"members", "contribution"}
"""What one end may send more than once."""


class Incoming:
    """A content that comes in: chunk by chunk into its place, at least ``least`` bytes and no more
    than fit there."""

    def __init__(self, content: pb.Content, into: memoryview, least: int) -> None:
        if not least <= content.size <= len(into) or len(content.digest) != 32:
            raise ProtocolViolation(
                f"announced {content.size} bytes where {least} to {len(into)} are due"
            )
        self.part, self.size, self.digest = content.part, content.size, content.digest
        self.come = 0
        """Bytes that have come."""
        self._into, self._hash = into, blake3()
        self._chunks_left = FREE_CHUNKS + content.size // LEAST_CHUNK

    @property
    def whole(self) -> bool:
        """Whether all has come."""
        return self.come == self.size

    def take(self, chunk: pb.Chunk | ChunkFrame) -> int:
        """Take in one chunk; its bytes. Raises ProtocolViolation if it is out of place, or if the
        whole is not what was announced."""
        data = chunk.data  # once: protobuf copies it each time
        end = self.come + len(data)
        if chunk.offset != self.come or not data or end > self.size:
            raise ProtocolViolation(
                f"sent a chunk of {len(data)} bytes at {chunk.offset}, out of place"
            )
        self._chunks_left -= 1
        if self._chunks_left < 0:
            raise ProtocolViolation(
                f"sent a contribution of {self.size} bytes in pieces of less than {LEAST_CHUNK}"
            )
        self._into[self.come : end] = data
        self._hash.update(data)
        self.come = end
        if self.whole and self._hash.digest() != self.digest:
            raise ProtocolViolation("sent a contribution that does not match its checksum")
        return len(data)


class ContentLink:
    """Moves contents over one stream and counts payload bytes where they enter and leave it."""

    IN_TURN: ClassVar[bool] = False
    """Whether contents wait while another fills our line. Of a group all members wait for us."""
    LAST: ClassVar[str]
    """The frame that ends what the other end has to say."""
    _NEXT: ClassVar[dict[str, set[str]]]
    """What may come after what."""

    def __init__(
        self,
        peer: str,
        stream: Stream,
        bandwidth: Bandwidth | None = None,
        time_left: Callable[[], float] = lambda: inf,
        usual: float = inf,
        on_slow: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``time_left``: seconds that there are now until what comes in must have come;
        ``usual``: those that it gets unless it comes evenly and needs more; ``on_slow`` gets
        the seconds more that it needs, where they are more than there are."""
        self.peer = peer
        self.stream = stream
        self._bandwidth = bandwidth or Bandwidth()
        self._time_left = time_left
        self._usual = usual
        self._on_slow = on_slow
        self.bytes_sent = 0
        self.bytes_received = 0
        self.stages = Stages()
        self.awaits_more = False
        """Whether a content is due that was asked for again."""
        # One writer at a time, in the order of asking: a stream takes no two writes at once, and
        # what we tell may be due while our contribution is still on its way.
        self._writing = asyncio.Lock()
        self._given_up = asyncio.Event()
        for limit in (self._bandwidth.up, self._bandwidth.down):
            limit.exchanged()  # text leaves the line while contents are coded
        self._turns = self._bandwidth.turns if self.IN_TURN else Turns()
        self._incoming: Incoming | None = None
        self._arrival: Arrival | None = None
        self._announced = 0.0
        """When what comes in was announced."""
        self._rates: list[float] = []
        """Bytes a second of the slowest content so far."""
        self._sending = self._receiving = 0.0
        """Seconds that contents took so far, each way."""
        self._needs = 0.0
        """Seconds that what comes in takes, as the last of it that came tells."""

    def _coming(self, now: float) -> tuple[Incoming, float] | None:
        """The content that still comes, and its seconds so far, if they tell how fast the line
        is."""
        incoming, waited = self._incoming, now - self._announced
        if incoming is None or incoming.whole or not incoming.come or waited <= MEASURED_FROM:
            return None
        return incoming, waited

    def rate(self, now: float) -> float | None:
        """Bytes a second at which contents came, the slowest, one that still comes included; None
        if that can't be known."""
        coming = self._coming(now)
        rates = [] if coming is None else [coming[0].come / coming[1]]
        return min([*rates, *self._rates], default=None)

    def line(self, now: float) -> float | None:
        """Seconds that contents took, either way, what came again included; of one that still
        comes, those that it would take. None if that can't be known."""
        receiving = self._receiving
        if (coming := self._coming(now)) is not None:
            incoming, waited = coming
            receiving += waited * incoming.size / incoming.come
        return max(self._sending, receiving) or None

    @property
    def share_come(self) -> float:
        """How much of what was announced last has come."""
        return 0.0 if self._incoming is None else self._incoming.come / max(1, self._incoming.size)

    async def send(self, frame: pb.Frame) -> None:
        """Send one frame, after all that was to be sent before. Raises LinkLost."""
        async with self._writing:
            await self.stream.send(frame)

    async def send_content(self, data: memoryview, digest: bytes, part: pb.Part = pb.WHOLE) -> None:
        """Send coded values and their BLAKE3 digest. Raises LinkLost."""
        async with self._writing, self._turns.take(len(data), self._given_up) as turn:
            if self._given_up.is_set():
                raise LinkLost("was given up before its turn had come")
            content = pb.Content(size=len(data), digest=digest, part=part)
            await self.stream.send(pb.Frame(content=content))
            offset, began = 0, monotonic()
            while offset < len(data):
                size = min(self._turns.piece, self._bandwidth.up.piece(CHUNK_BYTES))
                piece = data[offset : offset + size]
                self._bandwidth.up.exchanged()
                await self._bandwidth.up.pass_(len(piece))
                await self.stream.send(ChunkFrame(offset, piece))
                turn.sent(len(piece))
                self.bytes_sent += len(piece)
                offset += len(piece)
            self.stages.add("send", monotonic() - began)
            self._sending += monotonic() - began

    async def send_abandon(self, reason: str) -> None:
        """Tell why we give up, also where our content waits for its turn. Raises LinkLost."""
        self._given_up.set()
        await self.send(pb.Frame(abandon=pb.Abandon(reason=reason[:MAX_REASON])))

    async def close(self) -> None:
        """Say that we have no more to say, after all that was to be sent before, and let the other
        end read it."""
        async with self._writing:
            await self.stream.close()

    async def read(
        self,
        place: Callable[[pb.Content], Awaitable[tuple[memoryview, int]]],
        on_content: Callable[[Incoming], Awaitable[None]],
        on_frame: Callable[[pb.Frame], None],
    ) -> None:
        """Read frames until the other end has said its last, and nothing more is awaited.

        ``place`` tells where a content goes, which must fit there, and the fewest bytes that it may
        have; ``on_content`` gets it when it has arrived whole, ``on_frame`` gets every other frame,
        still to be checked. All are called in the order in which the other end has sent, each after
        the one before is done.

        Raises LinkLost if the stream breaks off or the peer gives up, ProtocolViolation if it sends
        what is not allowed."""
        last, came = "", set[str]()
        while self.LAST not in came or self.awaits_more:
            if (frame := await self._receive()) is None:
                raise LinkLost("ended the stream")
            kind = frame.WhichOneof("kind")
            if kind == "abandon":
                raise PeerGaveUp(f"gave up: {in_words(frame.abandon.reason)}")
            if kind == "chunk":
                if whole := self._take(frame.chunk):
                    await on_content(whole)
                continue
            what = (
                PARTS.get(frame.content.part, "content") if kind == "content" else kind or "nothing"
            )
            is_between = self._incoming is None or self._incoming.whole
            is_new = what in REPEATED or what not in came
            if not (is_between and is_new and what in self._NEXT[last]):
                raise ProtocolViolation(
                    f"sent {what!r} after {last or 'hello'!r}, where it is not due"
                )
            last = what
            came.add(what)
            if kind == "content":
                self._expect(Incoming(frame.content, *await place(frame.content)))
            else:
                on_frame(frame)

    async def _receive(self) -> pb.Frame | None:
        """The next frame, once the owner's limit allows it; None when the other end has no more to
        say."""
        if self._arrival is not None:
            await self._arrival.make_room()
        seconds = self._patience
        if seconds == inf:
            return await self.stream.receive()
        why = "sends its contribution too slowly for the deadline"
        async with in_time(max(0.0, seconds), why, TooSlow):
            return await self.stream.receive()

    @property
    def _patience(self) -> float:
        """Seconds until more of what comes in must have come.

        At x % of its time, x/2 % of it must have. A content that came fast and then stalls has no
        longer than usual, whatever its sender has asked for.
        """
        if self._incoming is None or self._incoming.whole:
            return inf
        waited = monotonic() - self._announced
        time = min(waited + self._time_left(), max(self._usual, PACE * self._needs))
        return time * min(1.0, max(PATIENCE, PACE * self.share_come)) - waited

    def _expect(self, incoming: Incoming) -> None:
        self._bandwidth.down.exchanged()
        self._incoming, self._announced, self._needs = incoming, monotonic(), 0.0
        self._arrival = Arrival(self._bandwidth.down, incoming.size, EXPECTED_BYTES)

    def _take(self, chunk: pb.Chunk | ChunkFrame) -> Incoming | None:
        """Take in one chunk; its content if that is whole now."""
        if self._incoming is None or self._arrival is None:
            raise ProtocolViolation("sent a chunk before its contribution was announced")
        self._bandwidth.down.exchanged()
        size = self._incoming.take(chunk)
        self.bytes_received += size
        self._arrival.took(size)
        if not self._incoming.whole:
            waited = monotonic() - self._announced
            self._needs = waited / self.share_come
            left = SLACK * self._needs - waited
            if waited > MEASURED_FROM and left > self._time_left():
                self._on_slow(left)
            return None
        seconds = max(1e-3, monotonic() - self._announced)
        self.stages.add("receive", seconds)
        self._receiving += seconds
        self._rates = [min([self._incoming.size / seconds, *self._rates])]
        return self._incoming


class PairLink(ContentLink):
    """The stream of a pair."""

    IN_TURN = True
    LAST = "confirm"
    # A contribution comes twice at most: the driver refuses what it has not asked for again.
    _NEXT: ClassVar[dict[str, set[str]]] = {
        "": {"contribution"},
        "contribution": {"contribution", "resend", "confirm"},
        "resend": {"contribution", "confirm"},
        "confirm": {"contribution"},
    }


class GroupLink(ContentLink):
    """The stream between two members of a group."""

    LAST = "commit"
    # A mean is left out by a member that could not make it in time.
    _NEXT: ClassVar[dict[str, set[str]]] = {
        "": {"roll"},
        "roll": {"members"},
        "members": {"members", "missed", "share"},
        "missed": {"share"},
        "share": {"mean", "held"},
        "mean": {"held"},
        "held": {"commit"},
    }
