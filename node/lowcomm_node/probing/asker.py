"""Asks probes of one peer, over one stream of libp2p."""

import asyncio
from collections.abc import Callable, Sequence
from time import time
from types import TracebackType
from typing import Self

from lowcomm_node.errors import LinkLost
from lowcomm_node.libp2p.interface import OpenStream
from lowcomm_node.probing.wire import receive_message, send_message
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import (
    DialBack,
    Keeping,
    Seen,
    Target,
    in_words,
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


class Asker:
    """One stream of probes, as a context manager."""

    def __init__(self, stream: OpenStream) -> None:
        self._stream, self._asking = stream, asyncio.Lock()
        self.address = stream.address
        """Where we see the other end, as a multiaddress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream."""
        self._stream.socket.close()

    async def look(self, clock: Callable[[], float] = time) -> tuple[Seen, float]:
        """How we are seen, and by how many seconds the clock there is ahead of ours, as exactly as the way allows.

        Raises LinkLost, ProtocolViolation.
        """
        asked = clock()
        seen = read_seen((await self._ask(pb.Probe(look=pb.Look()), "seen", LOOK_DEADLINE)).seen)
        # The answer was written between the two: what lies in there is no offset.
        return seen, seen.time - min(max(seen.time, asked), clock())

    async def dial_back(self, peer_id: str, targets: Sequence[Target]) -> tuple[bool, ...]:
        """Which of these ports of ours can be called from there. Raises LinkLost, also if that is refused, ProtocolViolation."""
        request = DialBack(peer_id, tuple(targets)).to_message()
        answer = await self._ask(request, "dialed_back", DIAL_BACK_DEADLINE)
        return read_reached(answer.dialed_back, len(targets))

    async def keeps(self, run_id: str) -> Keeping:
        """Whether a bootstrap server keeps a run. Raises LinkLost, also from who is none, ProtocolViolation."""
        probe = pb.Probe(keep=pb.Keep(run_id=bytes.fromhex(run_id)))
        return read_kept((await self._ask(probe, "kept", KEEP_DEADLINE)).kept)

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
                self.close()  # an answer that still comes would be taken for that to another question
                raise LinkLost(f"did not answer within {seconds:.0f} s") from None
            except asyncio.CancelledError:
                self.close()
                raise

    async def _receive(self, wanted: str) -> pb.Probed:
        probed = read_probed(await receive_message(self._stream.socket), wanted)
        if probed.WhichOneof("kind") == "refused":
            raise LinkLost(in_words(probed.refused))
        return probed
