"""What somebody who gives sends us on one stream: signs of life, and the bytes that we ask for.

State and run files come the same way, with the same patience and the same checks.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from lowcomm_node.errors import LinkLost, RetryLater
from lowcomm_node.net.bandwidth import Arrival, BandwidthLimit
from lowcomm_node.net.stream import CallerStream
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb

CHUNK_BYTES = 256 * 1024
SILENCE = 30.0
"""Seconds for a giver to send something, once it is our turn."""
SLOWEST = 2_000.0
"""Least bytes a second, after the first seconds of a piece."""
QUEUE_DEADLINE = 3600.0
"""Seconds in a queue that does not move."""
MOST_POSITION = 1000
ATTEMPTS = 4
RETRY_PAUSE = 2.0
"""Seconds before a stream is reopened. gRPC does not redial at once, so attempts would be used up
in a moment."""


class Replies:
    """The replies on one stream. ``took`` is told the bytes of each chunk."""

    def __init__(
        self, stream: CallerStream, down: BandwidthLimit, took: Callable[[int], None]
    ) -> None:
        self._stream = stream
        self._down = down
        self._took = took

    async def next(self, seconds: float) -> pb.FetchReply:
        """The next reply. Raises LinkLost if none comes in that many seconds."""
        try:
            async with asyncio.timeout(seconds):
                reply = await self._stream.receive()
        except TimeoutError:
            raise LinkLost("stopped sending") from None
        if reply is None:
            raise LinkLost("ended the stream")
        return reply

    async def waiting(self, position: int | None) -> pb.FetchReply:
        """The next reply while we wait at ``position`` in the queue; None or 0: not in it."""
        return await self.next(QUEUE_DEADLINE if position else SILENCE)

    async def read(self, data: bytearray, size: int) -> None:
        """Read chunks until ``data`` has ``size`` bytes; what came stays in it on an error.

        Raises LinkLost, RetryLater if they come too slowly, ProtocolViolation.
        """
        arrival = Arrival(self._down, size - len(data), CHUNK_BYTES)
        # A giver that drips bytes never runs into SILENCE: what it has sent buys it time.
        patience = SILENCE
        while len(data) < size:
            await arrival.make_room()
            began = monotonic()
            reply = await self.next(SILENCE)
            patience -= monotonic() - began
            if patience < 0:
                raise RetryLater("sends too slowly")
            chunk = reply.chunk
            if reply.WhichOneof("kind") != "chunk" or chunk.offset != len(data) or not chunk.data:
                raise ProtocolViolation("sent bytes out of place")
            if len(data) + len(chunk.data) > size:
                raise ProtocolViolation("sent more than was asked for")
            patience += len(chunk.data) / SLOWEST
            arrival.took(len(chunk.data))
            data += chunk.data
            self._took(len(chunk.data))
