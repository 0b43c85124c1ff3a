"""Nodes that call each other directly and through pipes, with real gRPC at both ends. The streams
between them are a twin's, or p2pd's."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import time
from typing import Any

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.wire import RUN, new_certificate, record
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.control import Streams
from lowcomm_node.net.ping import Echo
from lowcomm_node.net.pipe import Pipes
from lowcomm_node.net.server import ExchangeServer, ExchangeService
from lowcomm_node.net.stream import CalleeStream, CallerStream
from lowcomm_node.net.tls import Certificate, Gatekeeper
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo

DEADLINE = 60.0
"""Seconds for what takes less than one; only a test that fails waits so long."""
ADA, BOB, EVE = (Identity(bytes([number]) * 32) for number in (11, 12, 13))
CERTIFICATE = new_certificate()
DEAD = ("127.0.0.1:1",)
"""Where nobody listens."""


async def soon(work: Awaitable[Any], deadline: float = DEADLINE) -> Any:
    """What comes of ``work``, which must come to an end."""
    async with asyncio.timeout(deadline):
        return await work


async def received(stream: CallerStream) -> pb.Frame | None:
    """The next frame as the message that it stands for."""
    return whole(await soon(stream.receive()))


def whole(frame: Any) -> pb.Frame | None:
    """A frame as the message that it stands for."""
    return frame if frame is None else pb.Frame.FromString(frame.SerializeToString())


async def echo(peer: str, stream: CalleeStream) -> None:
    """Answer every frame with itself, to the end."""
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


class End:
    """One node: it calls, and it is called, directly and through tunnels."""

    def __init__(
        self,
        identity: Identity,
        streams: Streams,
        certificate: Certificate,
        pings: Echo | None = None,
    ) -> None:
        self.identity, self.certificate, self.streams = identity, certificate, streams
        self.gatekeeper = Gatekeeper(identity, RUN, time)
        self.pipes = Pipes(streams, RUN)
        self.service = ExchangeService(self.gatekeeper, self, self.pipes, echo=pings or Echo())
        self.server = ExchangeServer(certificate, self.service)
        self.channels = Channels(self.gatekeeper, self.pipes)
        self.swapping: Callable[[str, CalleeStream], Awaitable[None]] = echo
        self.callers: list[str] = []
        """Who has called."""
        self.port = 0

    @property
    def peer_id(self) -> str:
        """Its name."""
        return self.identity.peer_id

    async def start(self) -> None:
        """Listen in both ways."""
        self.port = await self.server.start("127.0.0.1", 0)
        await self.pipes.serve(lambda: self.server.local)

    async def close(self) -> None:
        """End everything, except the streams' own machinery."""
        await self.channels.close()
        await self.pipes.close()
        await self.server.close()

    def info(self, **changes: Any) -> PeerInfo:
        """Its record: nobody listens where it says, unless a test changes that."""
        return record(self.identity, 1, self.certificate.public_key, **changes)

    async def call(self, other: PeerInfo, timeout: float = 300) -> CallerStream:
        """Begin a Swap with another."""
        stub = await self.channels.stub(other)
        call = stub.Swap(metadata=self.channels.metadata(other.peer_id), timeout=timeout)
        return CallerStream(call, self.channels.traffic.of(other.peer_id))

    async def introduce(self, other: PeerInfo) -> str:
        """What another answers to Describe: as whom it knows us."""
        stub = await self.channels.stub(other)
        metadata = self.channels.metadata(other.peer_id)
        answer = await stub.Describe(pb.Introduction(), metadata=metadata, timeout=30)
        return answer.amendments.decode()

    # what the service asks of it

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """As the test has set."""
        self.callers.append(peer)
        await self.swapping(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """A hundred bytes."""
        await stream.send(piece(100))

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Tell the caller as whom we know it."""
        self.callers.append(peer)
        return pb.Introduction(amendments=peer.encode())


@asynccontextmanager
async def ends(*made: End) -> AsyncIterator[tuple[End, ...]]:
    """Ends that listen."""
    try:
        for end in made:
            await end.start()
        yield made
    finally:
        for end in made:
            await end.close()


def end(identity: Identity, network: MemoryNetwork) -> End:
    """One node of a DHT in this process."""
    return End(identity, MemoryDiscovery(identity.peer_id, network), CERTIFICATE)


@asynccontextmanager
async def pair(*others: Identity) -> AsyncIterator[tuple[End, ...]]:
    """Ada, Bob and others, who listen."""
    network = MemoryNetwork(time)
    made = [end(identity, network) for identity in (ADA, BOB, *others)]
    async with ends(*made) as (*all_,):
        yield tuple(all_)


def cut(end: End) -> None:
    """Break off all streams that an end has opened to others."""
    assert isinstance(end.streams, MemoryDiscovery)
    for stream in end.streams.opened:
        with suppress(OSError):  # it is closed
            stream.shutdown(socket.SHUT_RDWR)


def piece(size: int) -> pb.FetchReply:
    """What a joiner is sent."""
    return pb.FetchReply(chunk=pb.Chunk(data=bytes(size)))


def chunk(number: int, size: int) -> pb.Frame:
    """A frame of contents; no two are alike."""
    return pb.Frame(chunk=pb.Chunk(offset=number * size, data=number.to_bytes(8) * (size // 8)))
