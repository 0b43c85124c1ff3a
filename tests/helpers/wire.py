"""Two ends of real gRPC streams over TLS on loopback in one event loop; and ends that misbehave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import time
from typing import Any, TypeVar

import grpc
from grpc import aio

from lowcomm_node.net.channels import Channels
from lowcomm_node.net.server import ExchangeServer, ExchangeService
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.net.tls import (
    SERVER_NAME,
    Certificate,
    Gatekeeper,
    make_certificate,
    pinned,
)
from lowcomm_node.sync.link import ContentLink, PairLink
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo, Phase

RUN = "ab" * 32
CALLEE, CALLER = Identity(b"\1" * 32), Identity(b"\2" * 32)
PATH = "/lowcomm.v1.Exchange/"
_END: Any = getattr(aio, "EOF")  # noqa: B009 - compiled: a type checker does not see it
DEADLINE = 30.0
"""Seconds for what takes milliseconds; only a test that fails waits so long."""


def new_certificate() -> Certificate:
    """A certificate made now."""
    return make_certificate()


def record(identity: Identity, port: int, digest: bytes, **changes: Any) -> PeerInfo:
    """What callers know of a peer that listens on loopback."""
    fields: dict[str, Any] = {
        "peer_id": identity.peer_id,
        "run_id": RUN,
        "phase": Phase.TRAINING,
        "issued": time(),
        "expires": time() + 60,
        "addresses": (f"127.0.0.1:{port}",),
        "certificate": digest,
    }
    return PeerInfo(**fields | changes)


async def soon(work: Awaitable[Any]) -> Any:
    """What comes of ``work``, which must come to an end."""
    async with asyncio.timeout(DEADLINE):
        return await work


Handler = Callable[[str, CalleeStream], Awaitable[None]]
"""What a callee does with a call of a peer."""


async def _hold(peer: str, stream: CalleeStream) -> None:
    await stream.dropped.wait()


class Callee:
    """A server whose streams are handed to the test; what it does with calls can be replaced."""

    def __init__(self, identity: Identity = CALLEE, clock: Callable[[], float] = time) -> None:
        self.identity = identity
        self.streams: asyncio.Queue[tuple[str, CalleeStream]] = asyncio.Queue()
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        """How the handlers of Swap and Fetch ended."""
        self.introduced: list[str] = []
        self.swapping: Handler = _hold
        self.fetching: Handler = _hold
        self.certificate = new_certificate()
        self.gatekeeper = Gatekeeper(identity, RUN, clock)
        self.service = ExchangeService(self.gatekeeper, self)
        self.server = ExchangeServer(self.certificate, self.service)
        self.port = 0

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Held until the other end goes or the test cancels the stream."""
        self.streams.put_nowait((peer, stream))
        try:
            await self.swapping(peer, stream)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """What the test has set."""
        try:
            await self.fetching(peer, stream)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Tells who called."""
        self.introduced.append(peer)
        return pb.Introduction(amendments=peer.encode())

    def info(self, **changes: Any) -> PeerInfo:
        """The record that callers go by."""
        return record(self.identity, self.port, self.certificate.public_key, **changes)


async def never_serve(peer: str, stream: CalleeStream) -> None:
    """A handler of Fetch with a queue that never ends."""
    await stream.send(pb.FetchReply(position=5))
    await asyncio.Event().wait()


async def drip(peer: str, stream: CalleeStream) -> None:
    """A handler of Fetch that is always about to begin."""
    while True:
        await stream.send(pb.FetchReply(position=0))
        await asyncio.sleep(0.05)


class Rogue:
    """A callee with a good certificate that answers with whatever bytes the test gives it."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        """What every Swap is answered with."""
        self.opening: list[bytes] = []
        """What a Fetch begins with."""
        self.answers: list[bytes] = []
        """What each piece is answered with that it is asked for."""
        self.requests: list[pb.Wanted] = []
        self.certificate = new_certificate()
        self.port = 0

    async def start(self) -> aio.Server:
        """Listen."""
        server = aio.server()
        handlers = {
            "Swap": grpc.stream_stream_rpc_method_handler(self._swap),
            "Fetch": grpc.stream_stream_rpc_method_handler(self._fetch),
        }
        generic = grpc.method_handlers_generic_handler(PATH.strip("/"), handlers)
        server.add_generic_rpc_handlers((generic,))
        self.port = server.add_secure_port("127.0.0.1:0", self.certificate.server_credentials())
        await server.start()
        return server

    def info(self) -> PeerInfo:
        """The record that callers go by."""
        return record(CALLEE, self.port, self.certificate.public_key)

    async def _swap(self, requests: Any, context: Any) -> None:
        for frame in self.frames:
            await context.write(frame)
        await context.read()

    async def _fetch(self, requests: Any, context: Any) -> None:
        assert await context.read() is not _END
        for reply in self.opening:
            await context.write(reply)
        while (data := await context.read()) is not _END:
            self.requests.append(pb.FetchRequest.FromString(data).wanted)
            for reply in self.answers:
                await context.write(reply)


class Cable:
    """A TCP connection between two ends that can be cut."""

    def __init__(self, port: int, source: str = "") -> None:
        """``source``: the address that it comes from at the other end, such as 127.9.0.1."""
        self._target = port
        self._from = (source, 0) if source else None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on another port and lead there."""
        self._server = await asyncio.start_server(self._lead, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break all connections; new ones can be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Break all connections for good."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(
            "127.0.0.1", self._target, local_addr=self._from
        )
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def listening(
    identity: Identity = CALLEE,
    clock: Callable[[], float] = time,
) -> AsyncIterator[Callee]:
    """A callee that listens."""
    callee = Callee(identity, clock)
    callee.port = await callee.server.start("127.0.0.1", 0)
    try:
        yield callee
    finally:
        await callee.server.close()


@asynccontextmanager
async def misbehaving() -> AsyncIterator[Rogue]:
    """A rogue that listens."""
    rogue = Rogue()
    server = await rogue.start()
    try:
        yield rogue
    finally:
        await server.stop(0)


@asynccontextmanager
async def cabled(port: int, source: str = "") -> AsyncIterator[Cable]:
    """A cable to a port."""
    cable = Cable(port, source)
    await cable.start()
    try:
        yield cable
    finally:
        await cable.close()


@asynccontextmanager
async def calling(
    identity: Identity = CALLER,
    clock: Callable[[], float] = time,
) -> AsyncIterator[Channels]:
    """The channels of a caller."""
    channels = Channels(Gatekeeper(identity, RUN, clock))
    try:
        yield channels
    finally:
        await channels.close()


@asynccontextmanager
async def calling_raw(peer: PeerInfo) -> AsyncIterator[aio.Channel]:
    """A channel of a caller that sends and takes bytes as they are."""
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    async with aio.secure_channel(
        peer.addresses[0], pinned(peer.certificate), options=options
    ) as channel:
        yield channel


async def call(channels: Channels, peer: PeerInfo) -> CallerStream:
    """Begin a Swap."""
    stub = await channels.stub(peer)
    return CallerStream(stub.Swap(metadata=channels.metadata(peer.peer_id), timeout=60))


L = TypeVar("L", bound=ContentLink)


@asynccontextmanager
async def linked(kind: type[L] = PairLink) -> AsyncIterator[tuple[L, L]]:
    """The caller's and the callee's link of one stream, after hello."""
    async with listening() as callee, calling() as channels:
        caller = await call(channels, callee.info())
        await caller.send(pb.Frame(hello=pb.Offer(protocol=1)))
        peer, stream = await soon(callee.streams.get())
        assert peer == CALLER.peer_id
        frame = await soon(stream.receive())
        assert frame is not None and frame.WhichOneof("kind") == "hello"
        try:
            yield kind(CALLEE.peer_id, caller), kind(CALLER.peer_id, stream)
        finally:
            caller.cancel()
            stream.cancel()
