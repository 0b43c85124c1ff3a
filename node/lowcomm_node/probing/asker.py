"""Asks probes of one peer over one stream of libp2p, and carries the messages in such a stream."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from time import time
from typing import Protocol, Self

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import OpenStream, read_message
from lowcomm_node.net.varint import write_varint
from lowcomm_protocol.errors import in_words
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import (
    MAX_MESSAGE,
    PROTOCOL,
    DialBack,
    Keeping,
    Seen,
    Target,
    read_kept,
    read_probed,
    read_reached,
    read_seen,
)

CONNECT_DEADLINE = 6.0
LOOK_DEADLINE = 6.0
KEEP_DEADLINE = 20.0
DIAL_BACK_DEADLINE = 40.0
"""Seconds: others may be served first, and each call takes a few."""


class OpensStreams(Protocol):
    """Opens streams to peers that we are connected to."""

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream. Raises LinkLost."""
        ...


class Asker:
    """One stream of probes, as a context manager."""

    def __init__(self, stream: OpenStream) -> None:
        self._stream = stream
        self._asking = asyncio.Lock()
        self.address = stream.address
        """Where we see the other end, as a multiaddress."""

    @classmethod
    async def open(cls, streams: OpensStreams, peer_id: str) -> Self:
        """Ask a peer that we are connected to. Raises LinkLost."""
        return cls(await streams.open_stream(peer_id, PROTOCOL, CONNECT_DEADLINE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream."""
        self._stream.socket.close()

    async def look(self, clock: Callable[[], float] = time) -> tuple[Seen, float]:
        """How we are seen, and how many seconds the peer's clock is ahead of ours.

        The offset is as exact as the delay allows. Raises LinkLost, ProtocolViolation.
        """
        asked = clock()
        seen = read_seen((await self._ask(pb.Probe(look=pb.Look()), "seen", LOOK_DEADLINE)).seen)
        # The answer was written between the two: whatever lies in there is no offset.
        return seen, seen.time - min(max(seen.time, asked), clock())

    async def dial_back(self, peer_id: str, targets: Sequence[Target]) -> tuple[bool, ...]:
        """Which of these ports of ours the peer can call.

        Raises LinkLost, also if the peer refuses, ProtocolViolation.
        """
        request = DialBack(peer_id, tuple(targets)).to_message()
        answer = await self._ask(request, "dialed_back", DIAL_BACK_DEADLINE)
        return read_reached(answer.dialed_back, len(targets))

    async def keeps(self, run_id: str, only_tell: bool = False) -> Keeping:
        """Whether a bootstrap server keeps a run. It adopts the run unless it shall ``only_tell``.

        Raises LinkLost, also if the peer is no bootstrap server, ProtocolViolation.
        """
        keep = pb.Keep(run_id=bytes.fromhex(run_id), only_tell=only_tell)
        return read_kept((await self._ask(pb.Probe(keep=keep), "kept", KEEP_DEADLINE)).kept)

    async def send(self, ping: pb.Ping) -> None:
        """See measuring.Carrier."""
        await send_message(self._stream.socket, pb.Probe(ping=ping).SerializeToString())

    async def receive(self) -> pb.Pong:
        """See measuring.Carrier."""
        return (await self._receive("pong")).pong

    async def _ask(self, probe: pb.Probe, wanted: str, seconds: float) -> pb.Probed:
        async with self._asking:
            try:
                async with asyncio.timeout(seconds):
                    await send_message(self._stream.socket, probe.SerializeToString())
                    return await self._receive(wanted)
            except TimeoutError:
                self.close()  # a late answer would be taken for that to the next question
                raise LinkLost(f"did not answer within {seconds:.0f} s") from None
            except asyncio.CancelledError:
                self.close()
                raise

    async def _receive(self, wanted: str) -> pb.Probed:
        probed = read_probed(await receive_message(self._stream.socket), wanted)
        if probed.WhichOneof("kind") == "refused":
            raise LinkLost(in_words(probed.refused))
        return probed


async def send_message(stream: socket.socket, data: bytes) -> None:
    """Send one message, its length in front of it. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, write_varint(len(data)) + data)
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None


async def receive_message(stream: socket.socket) -> bytes:
    """The next message. Raises LinkLost, also at the end of the stream."""
    try:
        return await read_message(stream, MAX_MESSAGE)
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None
