"""The taking end: pieces of a file or of a state, from several peers at once.

``Fetch`` has a ``PeerSession`` with each of a few peers. A session waits for its turn, then takes
missing pieces one after the other, so fast peers give more. What is missing, and whether what comes
is right, is up to a ``Download``.

A peer that lies is not asked again. A broken stream is reopened, and continues at the byte that it
had reached. A peer may keep us in its queue for as long as it likes, so a session that brings next
to nothing gives way as soon as another peer can be asked, the one that was asked least recently
first. Each time, it may take twice as long as before: a long queue of an honest peer ends, too.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

import grpc
from cachetools import TTLCache

from lowcomm_node.errors import CheckpointError, DiskFull, LinkLost, RetryLater
from lowcomm_node.net.bandwidth import LEAST_PIECE, Arrival, BandwidthLimit, Use
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CallerStream
from lowcomm_node.system.tasks import in_time
from lowcomm_node.system.units import rate
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

MOST_SESSIONS = 3  # peers that serve us, or have us in their queue
CHUNK_BYTES = 256 * 1024
AHEAD_BYTES = 1024 * 1024
"""Bytes of pieces that a peer is asked for in advance, so that the link does not idle."""
AHEAD_SECONDS = 0.01
"""Seconds that answers may wait in queues of the line where a content gives way."""
MAX_REQUESTS = 128  # requests of one peer that may wait at a giver
SILENCE = 30.0  # seconds for a peer to send something, once it is our turn
QUEUE_DEADLINE = 3600.0  # seconds in a queue that does not move
MOST_POSITION = 1000
STALL_DEADLINE = 120.0  # seconds in which nothing comes, while we wait in no queue
ATTEMPTS, RETRY_PAUSE = 4, 2.0
"""Streams, and seconds before the next. gRPC does not redial at once, so attempts would be used up
in a moment."""
LATER = 15.0  # seconds before a peer is asked again that was busy, slow, or without what we miss
SLOW, SLOW_TIMES = 10.0, 6
"""Seconds, or times what other pieces took, after which a piece is asked of another peer, too."""
GIVING_WAY, LEAST_RATE = 20.0, 16_000.0
"""Seconds until a session gives way for the first time that brings fewer bytes a second (or half of
what our owner allows)."""
BARRED_SECONDS = 3600.0  # for which nothing is asked of a peer that lied
PREPARING = 6  # times as long for a peer that is making a snapshot for us
TICK = 0.25
_REFUSED = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(eq=False)
class Source:
    """A content as one peer offers it."""

    peer: str
    size: int = 0
    """Bytes of the file, as the peer says."""
    is_open: bool = True
    """Whether the peer may give more."""


S = TypeVar("S", bound=Source)


class Download(ABC, Generic[S]):
    """A content that is being fetched: what is missing, and whether what comes is right."""

    SLICE_BYTES: ClassVar[int | None] = None
    """Most bytes that one request asks for; None: all of a piece. With slices a content gives way
    to exchanges, and a piece that was begun may go on elsewhere: even a sole peer that brings next
    to nothing is left for a while."""

    def __init__(self, name: str, enter: pb.Enter, total: int = 0) -> None:
        self.name = name  # for people
        self.enter = enter  # request that names the content
        self.total = total  # bytes of all pieces; 0: unknown
        self.size = 0  # bytes of the pieces that are here
        self.missing: OrderedDict[int, int] = OrderedDict()
        """Pieces to ask for, in the order of asking; the most urgent have the lowest number."""
        self.struck: TTLCache[str, bool] = TTLCache(4096, BARRED_SECONDS)
        """Peers that have violated the protocol."""
        self._under_way: dict[int, tuple[S, float]] = {}  # asked of whom last, and when
        self._seconds: deque[float] = deque(maxlen=32)  # times that pieces took

    @abstractmethod
    def conclude(self) -> bool:
        """Whether all is here, and believed."""

    @abstractmethod
    def listing_bytes(self, opened: pb.Opened, enter: pb.Enter) -> int:
        """Bytes of the list that answers ``enter`` before the pieces. Raises ProtocolViolation."""

    @abstractmethod
    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> S:
        """Check what a peer offers. Raises ProtocolViolation, CheckpointError, DiskFull."""

    @abstractmethod
    def size_of(self, source: S, index: int) -> int:
        """Bytes of a piece."""

    @abstractmethod
    async def put(self, source: S, index: int, data: bytearray) -> None:
        """Keep a piece that is right. Raises CheckpointError or ProtocolViolation, DiskFull."""

    def fits(self, source: S, index: int) -> bool:
        """Whether a piece may come from this source."""
        return True

    def renew(self, source: S, opened: pb.Opened) -> None:
        """Take in what a source offers in its next stream, under the same name."""

    def may_give(self, source: S) -> bool:
        """Whether a source may give any piece that is still to come."""
        return True

    async def begun(self, index: int) -> bytearray:
        """Bytes of a piece that came before."""
        return bytearray()

    async def keep(self, index: int, data: bytearray, came: int) -> None:
        """Keep what is here of a piece, of which the last bytes just ``came``. Raises DiskFull."""

    def choose(self, source: S) -> int | None:
        """The best of the pieces that nobody was asked for."""
        return next((index for index in self.missing if self.fits(source, index)), None)

    def take(self, source: S) -> int | None:
        """A piece to ask for: one that nobody was asked for, else one that is late."""
        if (index := self.choose(source)) is None:
            slow = monotonic() - max(SLOW, SLOW_TIMES * median(self._seconds or [0.0]))
            late = (
                index
                for index, (other, since) in self._under_way.items()
                if other is not source and since < slow and self.fits(source, index)
            )
            index = next(late, None)
        if index is not None:
            self.ask(source, index)
        return index

    def ask(self, source: S, index: int) -> None:
        """A source is asked for a piece."""
        self.missing.pop(index, None)
        self._under_way[index] = source, monotonic()

    def give_back(self, source: S, index: int) -> None:
        """A piece does not come: it is the next that is asked for."""
        if self._under_way.get(index, (None, 0.0))[0] is source:
            del self._under_way[index]
            self.missing[index] = 0
            self.missing.move_to_end(index, last=False)

    def _came(self, index: int, size: int) -> None:
        """A piece is here."""
        self.size += size
        self.missing.pop(index, None)
        if index in self._under_way:
            self._seconds.append(monotonic() - self._under_way.pop(index)[1])


@dataclass
class _Asked:
    """A piece that a peer was asked for."""

    index: int
    size: int
    data: bytearray
    """What has come."""
    end: int
    """Bytes from its beginning up to which it was asked for."""


class PeerSession:
    """Our session with one peer."""

    def __init__(self, fetch: "Fetch", peer: PeerInfo, seconds: float, rate: float) -> None:
        """It may bring next to nothing for ``seconds``; ``rate``: bytes that buy a second more."""
        self.peer = peer
        self.patience = self.patience_left = seconds
        self.position: int | None = None  # in its queue; 0: it is our turn; None: unknown yet
        self.served: float | None = None  # when our turn began; None while we wait for it
        self.since = monotonic()  # time of the last position, or of the last bytes
        self._rate = rate
        self._fetch = fetch
        self._download = download = fetch.download
        self._source: Source | None = None
        self._was_served = False
        self._name = b""  # SHA-256 that the source gave for its offer
        self._asked: deque[_Asked] = deque()
        self._came_bytes = 0
        self._asked_bytes = 0  # those that have come when all is here that was asked for
        self._requests: deque[tuple[int, int, float]] = deque()
        """Requests under way: bytes, ``_asked_bytes`` at their end, and sending time (seconds)."""
        self._window = float(download.SLICE_BYTES or 0)  # bytes that may be on their way
        self._trip = inf  # shortest time from a request to its last byte
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Take pieces until nothing is left. Raises NodeError, ProtocolViolation."""
        failures = 0
        try:
            while True:
                before = self._came_bytes
                try:
                    return await self._stream()
                except LinkLost:
                    # A peer that has given anything gets all its attempts again.
                    failures = 1 if self._came_bytes > before else failures + 1
                    if failures == ATTEMPTS:
                        raise
                self.position = self.served = None
                await asyncio.sleep(RETRY_PAUSE)
        finally:
            self.served = None
            self._close_source()

    async def _stream(self) -> None:
        channels, name = self._fetch.channels, self.peer.peer_id
        call = (await channels.stub(self.peer)).Fetch(metadata=channels.metadata(name))
        stream = CallerStream(call, channels.traffic.of(name))
        try:
            enter = pb.Enter.FromString(self._download.enter.SerializeToString())
            await stream.send(pb.FetchRequest(enter=enter))
            opened = await self._wait_for_turn(stream)
            size = self._download.listing_bytes(opened, enter)
            listing = _Asked(-1, size, bytearray(), size)
            await self._read(stream, listing)
            source = self._source
            if source is None or self._name != opened.name:
                self._close_source()
                source = await self._download.open(self.peer, opened, bytes(listing.data))
                self._source, self._name = source, opened.name
            else:
                self._download.renew(source, opened)
            # Of the stream before, the piece under way goes on.
            while self._asked and (
                len(self._asked) > 1 or not self._download.fits(source, self._asked[0].index)
            ):
                self._download.give_back(source, self._asked.pop().index)
            for asked in self._asked:
                asked.end = len(asked.data)
            self._asked_bytes = self._came_bytes
            self._requests.clear()
            await self._take_pieces(stream, source)
            await stream.close()
        except LinkLost:
            if call.done():
                code, details = await call.code(), in_words(await call.details() or "refuses us")
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # A turn ends while others wait: we queue again.
                    raise (LinkLost if self.served else RetryLater)(details) from None
                if code in _REFUSED:
                    raise CheckpointError(details) from None
            raise
        finally:
            stream.cancel()

    async def _wait_for_turn(self, stream: CallerStream) -> pb.Opened:
        most = MOST_POSITION
        while True:
            reply = await _next(stream, QUEUE_DEADLINE if self.position else SILENCE)
            kind = reply.WhichOneof("kind")
            if kind == "opened":
                break
            if kind != "position" or reply.position > most:
                raise ProtocolViolation(
                    f"sent {kind or 'nothing'} before it was our turn, or a position that grew"
                )
            most = self.position = reply.position
            self.since = monotonic()
        self.position, self.served = 0, monotonic()
        if not self._was_served:  # once: turns may be short
            self._was_served = True
            self.patience_left = self.patience
        return reply.opened

    async def _take_pieces(self, stream: CallerStream, source: Source) -> None:
        while True:
            await self._ask_ahead(stream, source)
            if self._asked:
                asked = self._asked[0]
                await self._read(stream, asked, source)
                await self._download.put(source, asked.index, asked.data)
                self._asked.popleft()
                self._fetch.reasons.pop(self.peer.peer_id, None)
            elif self._download.conclude():
                return
            elif monotonic() - self.since > LATER or not self._download.may_give(source):
                raise RetryLater("has nothing that we miss, or others give the rest")
            else:
                await asyncio.sleep(TICK)

    async def _ask_ahead(self, stream: CallerStream, source: Source) -> None:
        """Ask for pieces, or slices of them, while few bytes are under way."""
        down, slice_bytes = self._fetch.down, self._download.SLICE_BYTES
        ahead = self._window
        if slice_bytes and self._asked and self._asked[-1].size > slice_bytes:
            ahead = slice_bytes  # a line with gaps lets an exchange begin
        elif not slice_bytes:
            # Under an owner's limit the link is busy anyway. At most a sixteenth, so that no peer
            # gives all of a small content.
            ahead = min(AHEAD_BYTES, self._download.total // 16) if down.rate is None else 0
        while not (coming := self._asked_bytes - self._came_bytes) or (
            coming < ahead and len(self._requests) < MAX_REQUESTS // 2
        ):
            if slice_bytes:
                if coming and down.is_busy:
                    return
                await down.give_way()
            if not self._asked or self._asked[-1].end == self._asked[-1].size:
                if (index := self._download.take(source)) is None:
                    return
                size = self._download.size_of(source, index)
                self._asked.append(asked := _Asked(index, size, bytearray(), 0))
                asked.data = await self._download.begun(index)
                asked.end = len(asked.data)
            asked = self._asked[-1]
            most = LEAST_PIECE if down.is_busy else slice_bytes
            count = min(asked.size - asked.end, most) if slice_bytes and most else 0
            wanted = pb.Wanted(piece=asked.index, offset=asked.end, size=count)
            count = count or asked.size - asked.end
            asked.end += count
            self._asked_bytes += count
            self._requests.append((count, self._asked_bytes, monotonic()))
            await stream.send(pb.FetchRequest(wanted=wanted))

    async def _read(
        self, stream: CallerStream, asked: _Asked, source: Source | None = None
    ) -> None:
        """Read chunks until all of a piece has come, and ask more of ``source`` meanwhile."""
        data = asked.data
        arrival = Arrival(self._fetch.down, asked.size - len(data), CHUNK_BYTES)
        while len(data) < asked.size:
            await arrival.make_room()
            reply = await _next(stream, SILENCE)
            chunk, count = reply.chunk, len(reply.chunk.data)
            if reply.WhichOneof("kind") != "chunk" or chunk.offset != len(data) or not count:
                raise ProtocolViolation("sent bytes out of place")
            if len(data) + count > asked.end:
                raise ProtocolViolation("sent more than was asked for")
            data += chunk.data
            arrival.took(count)
            self.patience_left = min(self.patience, self.patience_left + count / self._rate)
            self.since = monotonic()
            self._came_bytes += count
            self._fetch.received(count)
            if source is not None:
                self._answered()
                await self._download.keep(asked.index, data, count)
                await self._ask_ahead(stream, source)

    def _answered(self) -> None:
        """Have more bytes on their way while answers come at once, and fewer while they queue: that
        fills a long line, and delays an exchange by AHEAD_SECONDS at most."""
        while self._requests and self._requests[0][1] <= self._came_bytes:
            size, _, sent = self._requests.popleft()
            trip = monotonic() - sent
            self._trip = min(self._trip, trip)
            grown = self._window + size * max(-0.5, 1 - (trip - self._trip) / AHEAD_SECONDS)
            self._window = min(AHEAD_BYTES, max(self._download.SLICE_BYTES or 0, grown))

    def _close_source(self) -> None:
        if self._source is not None:
            for asked in self._asked:
                self._download.give_back(self._source, asked.index)
            self._source.is_open = False
        self._asked.clear()
        self._source = None


async def _next(stream: CallerStream, seconds: float) -> pb.FetchReply:
    async with in_time(seconds, "stopped sending"):
        reply = await stream.receive()
    if reply is None:
        raise LinkLost("ended the stream")
    return reply


class Fetch:
    """Fetches one content."""

    def __init__(
        self,
        channels: Channels,
        download: Download[Any],
        peers: Callable[[], Sequence[PeerInfo]],
        down: BandwidthLimit | None = None,
        warn: Callable[[str], None] = lambda text: None,
        *,
        gives_up: bool = True,
    ) -> None:
        """``peers`` returns those to ask, the best first, and may change each time; ``gives_up``:
        whether to raise LinkLost where nobody gives what is missing."""
        self.channels = channels
        self.download = download
        self.down = down or BandwidthLimit()
        self.bytes_received = 0
        self.reasons: dict[str, str] = {}  # why peers gave nothing more
        self.sessions: dict[str, PeerSession] = {}
        self._peers = peers
        self._warn = warn
        self._gives_up = gives_up
        self._leaving: set[asyncio.Task[None]] = set()
        self._later: dict[str, float] = {}  # when a peer may be asked again; infinity: never
        self._patience: dict[str, float] = {}
        self._use = Use()

    async def run(self, show: Callable[[str], None] = lambda text: None) -> None:
        """Fetch all pieces; ``show`` receives how far it is, or why it is no further. Raises
        DiskFull, LinkLost with the reason."""
        last = looked = monotonic()
        try:
            while not self.download.conclude():
                self._begin_sessions()
                show(self.describe())
                tasks = [session.task for session in self.sessions.values()]
                tasks = tasks or [asyncio.create_task(asyncio.sleep(TICK))]
                await asyncio.wait(tasks, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                passed, looked = monotonic() - looked, monotonic()
                for session in self.sessions.values():
                    is_preparing = session.position == 0 and session.served is None
                    if not (self.download.SLICE_BYTES and self.down.is_busy):
                        session.patience_left -= passed / PREPARING if is_preparing else passed
                    last = max(last, session.since)
                self._end_sessions()
                if self.download.SLICE_BYTES:
                    self._make_room(served=True)
                queued = any(session.position for session in self.sessions.values())
                patience = QUEUE_DEADLINE if queued else STALL_DEADLINE
                is_hopeless = not self.sessions and all(
                    self._later.get(peer.peer_id) == inf for peer in self._peers()
                )
                if self._gives_up and (looked - last > patience or is_hopeless):
                    raise LinkLost(self.why_not())
        finally:
            for name in list(self.sessions):
                self._cancel(name)
            await asyncio.gather(*self._leaving, return_exceptions=True)

    @property
    def serving(self) -> int:
        """Peers that serve us."""
        return sum(session.served is not None for session in self.sessions.values())

    @property
    def rate(self) -> float:
        """Bytes a second that peers have brought recently."""
        return self._use.rate(monotonic())

    def describe(self) -> str:
        """The progress, for people."""
        sessions = self.sessions.items()
        queued = sorted((one.position, name[-6:]) for name, one in sessions if one.position)
        if serving := self.serving:
            peers = "peer" if serving == 1 else "peers"
            done, speed = self.download.size / 1e6, rate(self.rate)
            total = f" of {self.download.total / 1e6:.1f}" if self.download.total else ""
            return f"{done:.1f}{total} MB from {serving} {peers}, {speed}"
        if queued:
            return ", ".join(f"number {place} in the queue of {name}" for place, name in queued)
        if self.sessions and not self.reasons:
            return f"calling {len(self.sessions)} peers"
        return self.why_not()

    def why_not(self) -> str:
        """Why no peer gives the missing pieces."""
        reasons = [f"{peer[-6:]}: {reason}" for peer, reason in self.reasons.items()]
        return "; ".join(reasons[:3]) or "no peer that could give it is here yet"

    def received(self, count: int) -> None:
        """Count received bytes."""
        self.bytes_received += count
        self._use.add(count, monotonic())

    def _begin_sessions(self) -> None:
        most = self.down.rate or inf
        rate = min(LEAST_RATE, most / 2 / MOST_SESSIONS)
        due = [one for one in self._peers() if one.peer_id not in self.sessions]
        for peer in sorted(due, key=lambda one: self._later.get(one.peer_id, 0.0)):
            name = peer.peer_id
            is_late = self._later.get(name, 0.0) > monotonic()
            if is_late or (len(self.sessions) >= MOST_SESSIONS and not self._make_room()):
                return
            seconds = self._patience.get(name, GIVING_WAY)
            self.sessions[name] = PeerSession(self, peer, seconds, rate)

    def _make_room(self, *, served: bool = False) -> bool:
        """End the session that has brought too little for longest, if there is one; ``served``:
        of those whose turn it is."""
        sessions = [item for item in self.sessions.items() if item[1].served or not served]
        if not sessions:
            return False
        name, session = min(sessions, key=lambda item: item[1].patience_left)
        if session.patience_left >= 0:
            return False
        self._patience[name] = 2 * self._patience.get(name, GIVING_WAY)
        self._cancel(name)
        self.reasons[name] = f"has brought next to nothing in {session.patience:.0f} s"
        return True

    def _end_sessions(self) -> None:
        """Take in which sessions have ended."""
        for name, session in list(self.sessions.items()):
            if not session.task.done():
                continue
            del self.sessions[name]
            self._later[name] = monotonic() + LATER
            try:
                session.task.result()
            except DiskFull:
                raise
            except (RetryLater, LinkLost) as error:
                self.reasons[name] = str(error)
            except LowcommError as error:
                self.reasons[name] = str(error)
                self._later[name] = inf
                self.download.struck[name] = True
                self._warn(f"{self.download.name} of {name[-6:]}: {error}: it is not asked again")

    def _cancel(self, name: str) -> None:
        task = self.sessions.pop(name).task
        self._later[name] = monotonic() + LATER
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        task.cancel()
