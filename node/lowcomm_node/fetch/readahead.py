"""Reads the requests of a stream as they come, whatever the handler does meanwhile.

gRPC buffers megabytes of each stream that nobody reads: a caller that waits for its turn, or is
being sent something, could fill our memory with that. So nothing stays unread, and a caller with
more requests than allowed loses its call.
"""

import asyncio
from types import TracebackType
from typing import Any, Protocol, Self

from lowcomm_node.errors import LinkLost
from lowcomm_protocol.errors import ProtocolViolation


class Source(Protocol):
    """The source of requests: a ``CalleeStream``."""

    async def receive(self) -> Any:
        """The next request; None at the end. Raises LinkLost, ProtocolViolation."""
        ...


class ReadAhead:
    """Context of the handling task. It is cancelled if the stream breaks, or its caller asks too
    much."""

    def __init__(self, source: Source, most: int, largest: int) -> None:
        """``most``: requests that may wait; ``largest``: bytes of one."""
        self._source = source
        self._most = most
        self._largest = largest
        self._requests: asyncio.Queue[Any] = asyncio.Queue()  # bounded by ``most``
        self._broken: LinkLost | ProtocolViolation | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._owner = task
        self._cancelling = task.cancelling()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise LinkLost or ProtocolViolation in place of the cancellation that ended the task."""
        self._reader.cancel()
        try:
            await asyncio.gather(self._reader, return_exceptions=True)
        except asyncio.CancelledError:  # it broke at the very end
            if self._broken is None:
                raise
        if self._broken is not None and self._owner.uncancel() <= self._cancelling:
            raise self._broken from None

    async def receive(self) -> Any:
        """The next request; None at the end."""
        return await self._requests.get()

    async def _read(self) -> None:
        try:
            while (request := await self._source.receive()) is not None:
                if request.ByteSize() > self._largest:
                    raise ProtocolViolation(
                        f"a request of {request.ByteSize()} bytes, where {self._largest} are enough"
                    )
                if self._requests.qsize() >= self._most:
                    raise ProtocolViolation(f"more than {self._most} requests at once")
                self._requests.put_nowait(request)
            self._requests.put_nowait(None)
        except (LinkLost, ProtocolViolation) as error:
            self._broken = error
            self._owner.cancel()
