"""Two ends of real gRPC streams over TLS on loopback, in one event loop."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import Any

from lowcomm_node.exchange.channels import Channels
from lowcomm_node.exchange.link import Link
from lowcomm_node.exchange.security import Gatekeeper, make_certificate
from lowcomm_node.exchange.service import ExchangeServer, ExchangeService
from lowcomm_node.exchange.stream import CalleeStream, CallerStream
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import PeerInfo, Phase

RUN = "ab" * 32
CALLEE, CALLER = Identity(b"\1" * 32), Identity(b"\2" * 32)


class Callee:
    """A server whose streams are handed to the test; it also serves what the test puts into ``parts``."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[tuple[str, CalleeStream]] = asyncio.Queue()
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.certificate = make_certificate(datetime.datetime.now(datetime.UTC))
        self.gatekeeper = Gatekeeper(CALLEE, RUN, time)
        self.server = ExchangeServer(self.certificate, ExchangeService(self.gatekeeper, self))
        self.port = 0

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Held until the other end goes or the test cancels the stream."""
        self.streams.put_nowait((peer, stream))
        try:
            await stream.wait_dropped()
        except asyncio.CancelledError:
            self.ended.put_nowait(asyncio.CancelledError())
            raise
        self.ended.put_nowait(None)

    async def fetch(self, peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        """Nothing."""
        for offset in ():
            yield pb.FetchChunk(offset=offset)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Tells who called."""
        return pb.Introduction(release=peer)

    def info(self, **changes: Any) -> PeerInfo:
        """The record that callers go by."""
        fields: dict[str, Any] = {
            "peer_id": CALLEE.peer_id, "run_id": RUN, "phase": Phase.TRAINING, "issued": time(), "expires": time() + 60,
            "addresses": (f"127.0.0.1:{self.port}",), "certificate": self.certificate.der, "swarm_step": 0, "steps": 0,
            "tokens_per_second": 0.0, "entry_points": (),
        }  # fmt: skip
        return PeerInfo(**fields | changes)


@asynccontextmanager
async def listening() -> AsyncIterator[Callee]:
    """A callee that listens."""
    callee = Callee()
    callee.port = await callee.server.start("127.0.0.1", 0)
    try:
        yield callee
    finally:
        await callee.server.close()


@asynccontextmanager
async def calling(identity: Identity = CALLER) -> AsyncIterator[Channels]:
    """The channels of a caller."""
    channels = Channels(Gatekeeper(identity, RUN, time))
    try:
        yield channels
    finally:
        await channels.close()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link]]:
    """The caller's and the callee's link of one stream, after hello."""
    async with listening() as callee, calling() as channels:
        stub = await channels.stub(callee.info())
        caller = CallerStream(stub.Swap(metadata=channels.metadata(CALLEE.peer_id), timeout=60))
        await caller.send(pb.Frame(hello=pb.Offer(protocol=1)))
        peer, stream = await callee.streams.get()
        assert peer == CALLER.peer_id
        frame = await stream.receive()
        assert frame is not None and frame.WhichOneof("kind") == "hello"
        try:
            yield Link(CALLEE.peer_id, caller), Link(CALLER.peer_id, stream)
        finally:
            caller.cancel()
            stream.cancel()
