"""The joiner's side of Fetch: a state in pieces, from several donors at once.

Each donor has a ``DonorSession``: it waits for its turn there, then takes missing pieces one after
the other, so fast donors give more. A broken stream is reopened, and continues at the byte that it
had reached while the donor still has its snapshot. A donor that is slow, silent or lies is dropped,
and others give its pieces.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

import grpc

from lowcomm_node.errors import CheckpointError, DiskFull, LinkLost, RetryLater
from lowcomm_node.state_transfer.download import Download, Source
from lowcomm_node.transport.bandwidth import Arrival, BandwidthLimit, Use
from lowcomm_node.transport.channels import Channels
from lowcomm_node.transport.stream import CallerStream
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.state.pieces import Piece
from lowcomm_protocol.state.snapshot import Manifest, name_of, read_manifest

MOST_SERVING = 3
"""Donors that serve us at once. With that many we leave the queues of others."""
SHARED_RATE = 500_000.0
"""Bytes a second of ``--max-down`` for each of them."""
MOST_SESSIONS = 6
"""Donors that serve us, or have us in their queue."""
CHUNK_BYTES = 256 * 1024
AHEAD_BYTES = 1024 * 1024
"""Bytes of pieces asked for in advance, so that the link does not idle."""
SILENCE = 30.0
"""Seconds for a donor to send something, once it is our turn."""
SLOWEST = 2_000.0
"""Least bytes a second over a piece."""
SLOW = 10.0
"""Seconds that the last pieces may take while other donors are idle, or several times what theirs
took."""
OPEN_DEADLINE = 900.0
"""Seconds for a donor to make a snapshot, while it sends signs of life."""
MOST_POSITION = 1000
QUEUE_DEADLINE = 3600.0
"""Seconds in a queue that does not move."""
STALL_DEADLINE = 120.0
"""Seconds in which nothing comes, while we wait in no queue."""
ATTEMPTS = 4
RETRY_PAUSE = 2.0
"""Seconds before a stream is reopened. gRPC does not redial at once, so attempts would be used up
in a moment."""
LATER = 20.0
"""Seconds before a donor is asked again that was busy, slow, or of another version."""
VERSION_PATIENCE = 5.0
"""Seconds that we wait for a donor of our version before we switch to that of the others, and fetch
anew what does not fit."""
TICK = 0.25


@dataclass(frozen=True)
class Asked:
    """A piece under way. ``audit``: we have it already, and compare."""

    piece: Piece
    audit: bool = False


class TurnOver(RetryLater):
    """Others wait at a donor that has served us for long: we queue again."""


class DonorSession:
    """Our session with one donor."""

    def __init__(self, fetcher: "Fetcher", donor: PeerInfo) -> None:
        self.donor = donor
        self.position: int | None = None
        """In its queue; 0: it serves us; None: unknown yet."""
        self.since = monotonic()
        """Time of the last position, or of the last bytes."""
        self.began: float | None = None
        """Since when we wait for the current piece."""
        self.idle = False
        """It could give, but there is nothing to ask for."""
        self._fetcher = fetcher
        self._download = fetcher.download
        self._known: tuple[bytes, Manifest] | None = None
        self._partial: tuple[bytes, Asked, bytearray] | None = None
        """The received part of a piece when the stream broke, and its snapshot."""

    async def run(self) -> None:
        """Take pieces until nothing is left.

        Raises LinkLost, RetryLater, CheckpointError, ProtocolViolation, DiskFull.
        """
        if self._download.base is not None:
            self._known = (name_of(self._download.base.to_bytes(self._download.form)), self._download.base)
        failures = 0
        while True:
            before = self._fetcher.bytes_received
            try:
                await self._session()
                return
            except TurnOver:
                if self._fetcher.bytes_received == before:
                    raise
                self.position = None
                await asyncio.sleep(RETRY_PAUSE)
            except LinkLost:
                failures = 1 if self._fetcher.bytes_received > before else failures + 1
                if failures == ATTEMPTS:
                    raise
                self.position = None
                await asyncio.sleep(RETRY_PAUSE)

    async def _session(self) -> None:
        stub = await self._fetcher.channels.stub(self.donor)
        call = stub.Fetch(metadata=self._fetcher.channels.metadata(self.donor.peer_id))
        stream = CallerStream(call)
        source: Source | None = None
        try:
            await stream.send(pb.FetchRequest(enter=pb.Enter(snapshot=self._known[0] if self._known else b"")))
            name, manifest = await self._opened(stream)
            self._known = (name, manifest)
            source = self._download.open(self.donor.peer_id, manifest)
            self._fetcher.changed()
            await self._take_pieces(stream, source, name)
            await stream.close()
        except LinkLost:
            if call.done() and await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise (TurnOver if self.position == 0 else RetryLater)(await call.details() or "is busy") from None
            if call.done() and await call.code() in _REFUSED:
                raise CheckpointError(await call.details() or "refuses us") from None
            raise
        finally:
            stream.cancel()
            self.began = None
            self.idle = False
            if source is not None:
                self._download.close_source(source)
            self._fetcher.changed()

    async def _opened(self, stream: CallerStream) -> tuple[bytes, Manifest]:
        """Wait for our turn; returns the snapshot that it begins with."""
        most, ours = MOST_POSITION, monotonic()
        while True:
            reply = await self._reply(stream, QUEUE_DEADLINE if self.position else SILENCE)
            kind = reply.WhichOneof("kind")
            if kind == "opened":
                break
            if kind != "position" or reply.position > most:
                raise ProtocolViolation(f"sent {kind or 'nothing'} before it was our turn, or a position that grew")
            ours = ours if self.position == 0 else monotonic()
            if not reply.position and monotonic() - ours > OPEN_DEADLINE:
                raise RetryLater("takes too long to make a snapshot")
            most = self.position = reply.position
            self.since = monotonic()
        self.position = 0
        name, form = reply.opened.snapshot, self._download.form
        if self._known is not None and self._known[0] == name:
            return self._known
        if not 0 < reply.opened.size <= form.largest_manifest:
            raise ProtocolViolation(
                f"a manifest of {reply.opened.size} bytes: at most {form.largest_manifest} are needed"
            )
        data = bytearray()
        await self._read(stream, data, reply.opened.size)
        if name_of(bytes(data)) != name:
            raise ProtocolViolation("a manifest that does not match its digest")
        manifest = read_manifest(bytes(data), form)
        if not await self._fetcher.plausible(self.donor, manifest.swarm_step):
            raise ProtocolViolation(f"a snapshot of swarm step {manifest.swarm_step}, which nobody else is near")
        return name, manifest

    async def _take_pieces(self, stream: CallerStream, source: Source, name: bytes) -> None:
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
                await self._fetcher.wait_changed(TICK)
                if monotonic() - self.since > LATER:
                    raise RetryLater(
                        "has nothing that we miss: its state is of another version, or others give the rest"
                    )
                continue
            self.began = monotonic()
            data = bytearray(partial[2]) if partial and partial[1] == asked[0] else bytearray()
            partial = None
            try:
                await self._read(stream, data, asked[0].piece.size)
            except LinkLost:
                self._partial = (name, asked[0], data)
                raise
            one = asked.popleft()
            self._fetcher.took(self.donor.peer_id, monotonic() - self.began)
            if not one.audit:
                await self._download.put(source, one.piece, data)
            elif not await self._download.compare(source, one.piece, data):
                self._fetcher.disputed(self.donor.peer_id)
            self._fetcher.changed()

    async def _ask_ahead(
        self, stream: CallerStream, source: Source, asked: deque[Asked], partial: tuple[bytes, Asked, bytearray] | None
    ) -> None:
        # Under an owner's limit the link is busy anyway. At most a sixteenth, so that no donor gets
        # all of a small state.
        ahead = min(AHEAD_BYTES, self._download.form.size // 16) if self._fetcher.down.rate is None else 0
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
            await stream.send(pb.FetchRequest(wanted=pb.Wanted(piece=one.piece.index, offset=offset)))

    async def _read(self, stream: CallerStream, data: bytearray, size: int) -> None:
        """Read chunks until ``data`` has ``size`` bytes."""
        arrival = Arrival(self._fetcher.down, size - len(data), CHUNK_BYTES)
        patience = SILENCE + (size - len(data)) / SLOWEST
        while len(data) < size:
            await arrival.make_room()
            began = monotonic()
            reply = await self._reply(stream, min(SILENCE, patience))
            patience -= monotonic() - began
            if patience < 0:
                raise RetryLater("sends too slowly")
            chunk = reply.chunk
            if reply.WhichOneof("kind") != "chunk" or chunk.offset != len(data) or not chunk.data:
                raise ProtocolViolation("sent bytes out of place")
            if len(data) + len(chunk.data) > size:
                raise ProtocolViolation("sent more than was asked for")
            arrival.took(len(chunk.data))
            data += chunk.data
            self.since = monotonic()
            self._fetcher.received(len(chunk.data))

    async def _reply(self, stream: CallerStream, seconds: float) -> pb.FetchReply:
        try:
            async with asyncio.timeout(seconds):
                reply = await stream.receive()
        except TimeoutError:
            raise LinkLost("stopped sending") from None
        if reply is None:
            raise LinkLost("ended the stream")
        return reply


_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)


class Fetcher:
    """Fetches one state."""

    def __init__(
        self,
        channels: Channels,
        download: Download,
        donors: Callable[[], Sequence[PeerInfo]],
        plausible: Callable[[PeerInfo, int], Awaitable[bool]] | None = None,
        down: BandwidthLimit | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``donors`` returns the donors to ask, the best first, and may change each time.

        ``plausible``: whether a donor's snapshot may be of this swarm step.
        """
        self.channels = channels
        self.download = download
        self.plausible = plausible or _anything
        self.down = down or BandwidthLimit()
        self.bytes_received = 0
        self._donors = donors
        self._warn = warn
        self._sessions: dict[str, tuple[DonorSession, asyncio.Task[None]]] = {}
        self._later: dict[str, float] = {}
        """When a donor may be asked again; infinity: never."""
        self._reasons: dict[str, str] = {}
        self._seconds: deque[float] = deque(maxlen=32)
        self._changed = asyncio.Event()
        self._use = Use()
        self._stuck: float | None = None

    async def fetch(self) -> None:
        """Fetch all pieces. Raises LinkLost with the reason if no donor gives them, or DiskFull.

        What has come is kept.
        """
        last = monotonic()
        try:
            while not (self.download.is_complete() and self.download.conclude()):
                before = self._progress()
                self._begin_sessions()
                self._look_after_version()
                self._leave_slow()
                await self.wait_changed(TICK)
                await self._end_sessions()
                if self._progress() != before:
                    last = monotonic()
                queued = any(session.position for session, _ in self._sessions.values())
                if monotonic() - last > (QUEUE_DEADLINE if queued else STALL_DEADLINE) or not (
                    self._sessions or self._hope()
                ):
                    raise LinkLost(self.why_not())
        finally:
            await self._cancel(list(self._sessions))

    def describe(self) -> str:
        """The progress, for people."""
        form, serving = self.download.form, self._serving()
        queued = sorted(
            (session.position, name[-6:]) for name, (session, _) in self._sessions.items() if session.position
        )
        if not serving and queued:
            return ", ".join(f"{_ordinal(position)} in the queue of {name}" for position, name in queued)
        told = f"{self.download.size / 1e6:.1f} of {form.size / 1e6:.1f} MB"
        if not serving:
            return f"{told}, calling {len(self._sessions)} peers" if self._sessions else told
        peers = "peer" if len(serving) == 1 else "peers"
        return f"{told} from {len(serving)} {peers}, {self._use.rate(monotonic()) / 1e6:.2f} MB/s"

    def why_not(self) -> str:
        """Why no donor gives what is missing."""
        reasons = [f"{peer[-6:]}: {reason}" for peer, reason in self._reasons.items()]
        return "; ".join(reasons[:4]) or "nobody has what is missing"

    # reported by sessions

    def received(self, size: int) -> None:
        """Count received bytes."""
        self.bytes_received += size
        self._use.add(size, monotonic())

    def took(self, peer: str, seconds: float) -> None:
        """A piece has come."""
        self._seconds.append(seconds)
        self._reasons.pop(peer, None)

    def disputed(self, peer: str) -> None:
        """A donor's piece has nothing in common with another's."""
        self._warn(f"state of {peer[-6:]} has nothing in common with that of another peer: one of them is left out")

    def changed(self) -> None:
        """Wake whoever waits for changes."""
        self._changed.set()

    async def wait_changed(self, seconds: float) -> None:
        """Wait until something has changed, or for ``seconds``."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass
        if changed is self._changed and changed.is_set():
            self._changed = asyncio.Event()

    # sessions

    def _begin_sessions(self) -> None:
        enough = self._enough()
        wanted = enough if len(self._serving()) >= enough else MOST_SESSIONS
        now = monotonic()
        for donor in self._donors():
            if len(self._sessions) >= wanted:
                return
            if donor.peer_id not in self._sessions and self._later.get(donor.peer_id, 0.0) <= now:
                session = DonorSession(self, donor)
                task = asyncio.create_task(session.run())
                task.add_done_callback(lambda _: self.changed())
                self._sessions[donor.peer_id] = (session, task)

    async def _end_sessions(self) -> None:
        """Process ended sessions, and leave the queues that are not needed."""
        for name, (_, task) in list(self._sessions.items()):
            if task.done():
                del self._sessions[name]
                self._take_in(name, task)
        if len(self._serving()) >= self._enough():
            await self._cancel([name for name, (session, _) in self._sessions.items() if session.position != 0])

    def _take_in(self, name: str, task: asyncio.Task[None]) -> None:
        self._later[name] = monotonic() + LATER
        if task.cancelled():  # it was slow
            return
        try:
            task.result()
        except DiskFull:
            raise
        except (RetryLater, LinkLost) as error:
            self._reasons[name] = str(error)
        except LowcommError as error:
            self._reasons[name] = str(error)
            self._later[name] = float("inf")
            self.download.strike(name)
            self._warn(f"state of {name[-6:]}: {error}")

    async def _cancel(self, names: list[str]) -> None:
        tasks = [self._sessions.pop(name)[1] for name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look_after_version(self) -> None:
        if not self.download.is_stuck():
            self._stuck = None
        elif self._stuck is None:
            self._stuck = monotonic()
        elif monotonic() - self._stuck > VERSION_PATIENCE:
            self.download.rebase()
            self._stuck = None
            self.changed()

    def _leave_slow(self) -> None:
        """Cancel slow donors when others are idle and can take over."""
        if not any(session.idle for session, _ in self._sessions.values()):
            return
        most, now = max(SLOW, 8 * median(self._seconds or [0.0])), monotonic()
        for session, task in self._sessions.values():
            if session.began is not None and not session.idle and now - session.began > most:
                task.cancel()
                self._reasons[session.donor.peer_id] = "sends too slowly"

    def _serving(self) -> list[str]:
        return [name for name, (session, _) in self._sessions.items() if session.position == 0]

    def _enough(self) -> int:
        """How many donors should serve us: with a low limit each would take bandwidth from the
        others."""
        rate = self.down.rate
        return MOST_SERVING if rate is None or rate >= MOST_SERVING * SHARED_RATE else 1

    def _progress(self) -> tuple[float, ...]:
        return (self.bytes_received, *(session.since for session, _ in self._sessions.values()))

    def _hope(self) -> bool:
        """Whether any donor may be asked again."""
        return any(self._later.get(donor.peer_id, 0.0) < float("inf") for donor in self._donors())


async def _anything(donor: PeerInfo, swarm_step: int) -> bool:
    return True


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
