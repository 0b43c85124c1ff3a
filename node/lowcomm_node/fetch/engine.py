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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

import grpc

from lowcomm_node.errors import CheckpointError, DiskFull, LinkLost, RetryLater
from lowcomm_node.fetch.queue import Patience
from lowcomm_node.net.bandwidth import Arrival, BandwidthLimit, Use
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.stream import CallerStream
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

MOST_SERVING = 3
"""Peers that serve us at once. With that many we leave the queues of others."""
SHARED_RATE = 500_000.0
"""Bytes a second of ``--max-down`` for each of them."""
MOST_SESSIONS = 6
"""Peers that serve us, or have us in their queue."""
CHUNK_BYTES = 256 * 1024
AHEAD_BYTES = 1024 * 1024
"""Bytes of pieces that a peer is asked for in advance, so that the link does not idle."""
MAX_REQUESTS = 64
"""Requests of one peer that may wait at a giver."""
SILENCE = 30.0
"""Seconds for a peer to send something, once it is our turn, and in which bytes may drip."""
SLOWEST = 2_000.0
"""Bytes that buy a peer another second."""
QUEUE_DEADLINE = 3600.0
"""Seconds in a queue that does not move."""
MOST_POSITION = 1000
OPEN_DEADLINE = 900.0
"""Seconds for a peer to make a snapshot, while it sends signs of life."""
STALL_DEADLINE = 120.0
"""Seconds in which nothing comes, while we wait in no queue."""
ATTEMPTS = 4
RETRY_PAUSE = 2.0
"""Seconds before a stream is reopened. gRPC does not redial at once, so attempts would be used up
in a moment."""
LATER = 15.0
"""Seconds before a peer is asked again that was busy, slow, or without what we miss."""
SLOW, SLOW_TIMES = 10.0, 6
"""Seconds, or times what other pieces took, after which a piece is asked of another peer, too."""
GIVING_WAY = 20.0
"""Seconds until a session that brings next to nothing gives way for the first time."""
PREPARING = 6
"""Times as long for a peer that is making a snapshot for us."""
LEAST_RATE = 16_000.0
"""Bytes a second that a session brings, or gives way; fewer where our owner allows less."""
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


@dataclass(frozen=True)
class PieceRequest:
    """A piece that a peer is asked for."""

    index: int
    size: int
    is_audit: bool = False
    """We have it from another peer, and compare."""


class Download(ABC):
    """A content that is being fetched: which pieces are missing, and whether what comes is right.

    Used from one event loop.
    """

    name: str
    """For people."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes of all pieces; 0: unknown."""
        self.missing: dict[int, None] = {}
        """Pieces to ask for, in the order of asking."""
        self._under_way: dict[int, tuple[Source, float]] = {}
        """The source that was asked for a piece last, and when."""
        self._seconds: deque[float] = deque(maxlen=32)
        """Times that pieces took."""
        self.struck: set[str] = set()
        """Peers that have violated the protocol."""

    @property
    @abstractmethod
    def enter(self) -> pb.Enter:
        """Request that names the content."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the pieces that are here."""

    @abstractmethod
    def conclude(self) -> bool:
        """Whether all is here, and believed."""

    @abstractmethod
    def listing_bytes(self, opened: pb.Opened) -> int:
        """Bytes of the list that precedes the pieces. Raises ProtocolViolation."""

    @abstractmethod
    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> Source:
        """Check what a peer offers. Raises ProtocolViolation, CheckpointError, DiskFull."""

    @abstractmethod
    async def put(self, source: Source, wanted: PieceRequest, data: bytearray) -> None:
        """Keep a piece that is right. Raises CheckpointError or ProtocolViolation, DiskFull."""

    @abstractmethod
    def size_of(self, source: Source, index: int) -> int:
        """Bytes of a piece."""

    def fits(self, source: Source, index: int) -> bool:
        """Whether a piece may come from this source."""
        return True

    def strike(self, peer: str) -> None:
        """A peer has violated the protocol."""
        self.struck.add(peer)

    def take(self, source: Source) -> PieceRequest | None:
        """A piece to ask for: one that was asked of nobody, else one that another does not
        bring."""
        now = monotonic()
        slow = now - max(SLOW, SLOW_TIMES * median(self._seconds or [0.0]))
        late = (
            index
            for index, (other, since) in self._under_way.items()
            if other is not source and since < slow
        )
        for candidates in (self.missing, late):
            index = next((one for one in candidates if self.fits(source, one)), None)
            if index is not None:
                self.missing.pop(index, None)
                self._under_way[index] = source, now
                return PieceRequest(index, self.size_of(source, index))
        return None

    def give_back(self, source: Source, wanted: PieceRequest) -> None:
        """A piece does not come."""
        if self._under_way.get(wanted.index, (None, 0.0))[0] is source:
            del self._under_way[wanted.index]
            self.missing[wanted.index] = None

    def _came(self, index: int) -> None:
        """A piece is here."""
        self.missing.pop(index, None)
        if index in self._under_way:
            self._seconds.append(monotonic() - self._under_way.pop(index)[1])


class TurnOver(RetryLater):
    """Others wait at a peer that has served us for long: we queue again."""


class PeerSession:
    """Our session with one peer."""

    def __init__(self, fetch: "Fetch", peer: PeerInfo, worth: Patience) -> None:
        self.peer = peer
        self.position: int | None = None
        """In its queue; 0: it is our turn; None: unknown yet."""
        self.served: float | None = None
        """When our turn began; None while we wait for it."""
        self.bytes_received = 0
        self.since = monotonic()
        """Time of the last position, or of the last bytes."""
        self.worth = worth
        """Runs out while it brings too little."""
        self._fetch = fetch
        self._download = fetch.download
        self._source: Source | None = None
        self._was_served = False
        self._name = b""
        """SHA-256 that the source gave for its offer."""
        self._asked: deque[PieceRequest] = deque()
        self._data = bytearray()
        """Bytes received of the first piece that was asked for."""
        self._patience = Patience(SILENCE, SLOWEST)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Take pieces until nothing is left.

        Raises LinkLost, RetryLater, CheckpointError, ProtocolViolation, DiskFull.
        """
        failures = 0
        try:
            while True:
                before = self.bytes_received
                try:
                    return await self._stream()
                except (LinkLost, TurnOver):
                    # A peer that has given anything gets all its attempts again.
                    failures = 1 if self.bytes_received > before else failures + 1
                    if failures == ATTEMPTS:
                        raise
                self.position = self.served = None
                await asyncio.sleep(RETRY_PAUSE)
        finally:
            self.served = None
            self._close_source()
            self._fetch.changed.set()

    async def _stream(self) -> None:
        channels, name = self._fetch.channels, self.peer.peer_id
        call = (await channels.stub(self.peer)).Fetch(metadata=channels.metadata(name))
        stream = CallerStream(call)
        self._patience = Patience(SILENCE, SLOWEST)
        try:
            await stream.send(pb.FetchRequest(enter=self._download.enter))
            opened = await self._wait_for_turn(stream)
            listing = bytearray()
            await self._read(stream, listing, self._download.listing_bytes(opened))
            if self._source is None or self._name != opened.name:
                self._close_source()
                self._source = await self._download.open(self.peer, opened, bytes(listing))
                self._name = opened.name
            for number, wanted in enumerate(self._asked):  # of the stream before
                await self._ask(stream, wanted, 0 if number else len(self._data))
            await self._take_pieces(stream)
            await stream.close()
        except LinkLost:
            if call.done():
                code, details = await call.code(), await call.details()
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise (TurnOver if self.served else RetryLater)(
                        in_words(details or "is busy")
                    ) from None
                if code in _REFUSED:
                    raise CheckpointError(in_words(details or "refuses us")) from None
            raise
        finally:
            stream.cancel()

    async def _wait_for_turn(self, stream: CallerStream) -> pb.Opened:
        most, ours = MOST_POSITION, monotonic()
        while True:
            reply = await self._next(stream, QUEUE_DEADLINE if self.position else SILENCE)
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
        if not self._was_served:  # once: turns may be short
            self._was_served = True
            self.worth.left = self.worth.most
        self._fetch.changed.set()
        return reply.opened

    async def _take_pieces(self, stream: CallerStream) -> None:
        assert self._source is not None
        while True:
            await self._ask_ahead(stream)
            if self._asked:
                wanted = self._asked[0]
                await self._read(stream, self._data, wanted.size)
                await self._download.put(self._source, wanted, self._data)
                self._asked.popleft()
                self._data = bytearray()
                self._fetch.brought(self.peer.peer_id)
            elif self._download.conclude():
                return
            elif monotonic() - self.since > LATER:
                raise RetryLater("has nothing that we miss, or others give the rest")
            else:
                await self._fetch.wait_changed()

    async def _ask_ahead(self, stream: CallerStream) -> None:
        """Ask for pieces while few bytes are under way."""
        if self._source is None:
            return
        # Under an owner's limit the link is busy anyway. At most a sixteenth, so that no peer gives
        # all of a small content.
        is_free = self._fetch.down.rate is None
        ahead = min(AHEAD_BYTES, self._download.total // 16) if is_free else 0
        while not self._asked or (
            len(self._asked) < MAX_REQUESTS // 2
            and sum(one.size for one in self._asked) - len(self._data) < ahead
        ):
            wanted = self._download.take(self._source)
            if wanted is None:
                return
            self._asked.append(wanted)
            await self._ask(stream, wanted, 0)

    async def _ask(self, stream: CallerStream, wanted: PieceRequest, offset: int) -> None:
        request = pb.Wanted(piece=wanted.index, offset=offset)
        await stream.send(pb.FetchRequest(wanted=request))

    async def _read(self, stream: CallerStream, data: bytearray, size: int) -> None:
        """Read chunks until ``data`` has ``size`` bytes; what came stays in it on an error.

        Raises LinkLost, RetryLater if they come too slowly, ProtocolViolation.
        """
        arrival = Arrival(self._fetch.down, size - len(data), CHUNK_BYTES)
        while len(data) < size:
            await arrival.make_room()
            began = monotonic()
            reply = await self._next(stream, SILENCE)
            self._patience.waited(monotonic() - began)
            if self._patience.left < 0:
                raise RetryLater("sends too slowly")
            chunk = reply.chunk
            if reply.WhichOneof("kind") != "chunk" or chunk.offset != len(data) or not chunk.data:
                raise ProtocolViolation("sent bytes out of place")
            if len(data) + len(chunk.data) > size:
                raise ProtocolViolation("sent more than was asked for")
            data += chunk.data
            arrival.took(len(chunk.data))
            self._patience.passed(len(chunk.data))
            self.worth.passed(len(chunk.data))
            self.since = monotonic()
            self.bytes_received += len(chunk.data)
            self._fetch.received(len(chunk.data))
            await self._ask_ahead(stream)

    async def _next(self, stream: CallerStream, seconds: float) -> pb.FetchReply:
        try:
            async with asyncio.timeout(seconds):
                reply = await stream.receive()
        except TimeoutError:
            raise LinkLost("stopped sending") from None
        if reply is None:
            raise LinkLost("ended the stream")
        return reply

    def _close_source(self) -> None:
        if self._source is not None:
            for wanted in self._asked:
                self._download.give_back(self._source, wanted)
            self._source.is_open = False
        self._asked.clear()
        self._data = bytearray()
        self._source = None


class Fetch:
    """Fetches one content."""

    def __init__(
        self,
        channels: Channels,
        download: Download,
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
        self.reasons: dict[str, str] = {}
        """Why peers gave nothing more."""
        self.sessions: dict[str, PeerSession] = {}
        self.changed = asyncio.Event()
        self._peers = peers
        self._warn = warn
        self._gives_up = gives_up
        self._leaving: set[asyncio.Task[None]] = set()
        self._later: dict[str, float] = {}
        """When a peer may be asked again; infinity: never."""
        self._patience: dict[str, float] = {}
        self._use = Use()

    async def run(self, show: Callable[[str], None] = lambda text: None) -> None:
        """Fetch all pieces; ``show`` receives how far it is, or why it is no further.

        What has come is kept. Raises DiskFull, LinkLost with the reason.
        """
        last = looked = monotonic()
        try:
            while not self.download.conclude():
                before = self._progress()
                self._begin_sessions()
                show(self.describe())
                await self.wait_changed()
                passed, looked = monotonic() - looked, monotonic()
                for session in self.sessions.values():
                    is_preparing = session.position == 0 and session.served is None
                    session.worth.waited(passed / PREPARING if is_preparing else passed)
                self._end_sessions()
                if self._progress() != before:
                    last = monotonic()
                queued = any(session.position for session in self.sessions.values())
                patience = QUEUE_DEADLINE if queued else STALL_DEADLINE
                has_hope = self.sessions or any(map(self._may_be_asked, self._peers()))
                if self._gives_up and (monotonic() - last > patience or not has_hope):
                    raise LinkLost(self.why_not())
        finally:
            for name in list(self.sessions):
                self._cancel(name)
            await asyncio.gather(*self._leaving, return_exceptions=True)

    @property
    def serving(self) -> int:
        """Peers that serve us."""
        return sum(session.served is not None for session in self.sessions.values())

    def describe(self) -> str:
        """The progress, for people."""
        queued = sorted(
            (session.position, name[-6:])
            for name, session in self.sessions.items()
            if session.position
        )
        serving, done = self.serving, f"{self.download.size / 1e6:.1f}"
        if serving:
            peers = "peer" if serving == 1 else "peers"
            rate = self._use.rate(monotonic()) / 1e6
            total = self.download.total
            amount = f"{done} of {total / 1e6:.1f} MB" if total else f"{done} MB"
            return f"{amount} from {serving} {peers}, {rate:.2f} MB/s"
        if queued:
            return ", ".join(f"{_ordinal(place)} in the queue of {name}" for place, name in queued)
        if self.sessions and not self.reasons:
            return f"calling {len(self.sessions)} peers"
        return self.why_not()

    def why_not(self) -> str:
        """Why nobody gives what is missing."""
        reasons = [f"{peer[-6:]}: {reason}" for peer, reason in self.reasons.items()]
        return "; ".join(reasons[:3]) or "no peer that could give it is here yet"

    async def wait_changed(self) -> None:
        """Wait until a session has changed, or for a moment."""
        changed = self.changed
        try:
            async with asyncio.timeout(TICK):
                await changed.wait()
        except TimeoutError:
            pass
        if changed is self.changed and changed.is_set():
            self.changed = asyncio.Event()

    # called by sessions

    def received(self, count: int) -> None:
        """Count received bytes."""
        self.bytes_received += count
        self._use.add(count, monotonic())

    def brought(self, peer: str) -> None:
        """A peer has brought a piece."""
        self.reasons.pop(peer, None)
        self.changed.set()

    # sessions

    def _begin_sessions(self) -> None:
        enough = self._enough()
        most = enough if self.serving >= enough else MOST_SESSIONS
        now, later = monotonic(), self._later
        due = [one for one in self._peers() if one.peer_id not in self.sessions]
        for peer in sorted(due, key=lambda one: later.get(one.peer_id, 0.0)):
            if later.get(peer.peer_id, 0.0) > now:
                return
            if len(self.sessions) >= most and not self._make_room():
                return
            rate = (
                LEAST_RATE if self.down.rate is None else min(LEAST_RATE, self.down.rate / 2 / most)
            )
            seconds = self._patience.get(peer.peer_id, GIVING_WAY)
            self.sessions[peer.peer_id] = PeerSession(self, peer, Patience(seconds, rate))

    def _make_room(self) -> bool:
        """End the session that has brought too little for longest, if there is one."""
        if not self.sessions:
            return False
        name, session = min(self.sessions.items(), key=lambda item: item[1].worth.left)
        if session.worth.left >= 0:
            return False
        self._patience[name] = 2 * self._patience.get(name, GIVING_WAY)
        self._cancel(name)
        self.reasons[name] = f"has brought next to nothing in {session.worth.most:.0f} s"
        return True

    def _end_sessions(self) -> None:
        """Take in which sessions have ended, and leave the queues that are not needed."""
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
                self._later[name] = float("inf")
                self.download.strike(name)
                self._warn(f"{self.download.name} of {name[-6:]}: {error}: it is not asked again")
        if self.serving >= self._enough():
            for name, session in list(self.sessions.items()):
                if session.served is None:
                    self._cancel(name)

    def _cancel(self, name: str) -> None:
        task = self.sessions.pop(name).task
        self._later[name] = monotonic() + LATER
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        task.cancel()

    def _enough(self) -> int:
        """How many peers should serve us: with a low limit each would take bandwidth from the
        others."""
        rate = self.down.rate
        return MOST_SERVING if rate is None or rate >= MOST_SERVING * SHARED_RATE else 1

    def _may_be_asked(self, peer: PeerInfo) -> bool:
        return self._later.get(peer.peer_id, 0.0) < float("inf")

    def _progress(self) -> tuple[float, ...]:
        return self.bytes_received, *(session.since for session in self.sessions.values())


def _ordinal(number: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"
