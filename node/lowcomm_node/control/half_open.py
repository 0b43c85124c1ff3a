"""Ends connections to the control API that uvicorn would keep: on which no whole request comes, or
whose other end does not read."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowcomm_node.system.logs import log

REQUEST_DEADLINE = 10.0
"""Seconds for a whole request, headers and body."""
READ_DEADLINE = 10.0
"""Seconds for the other end to read some of an answer that is longer than the buffers."""
MAX_CONNECTIONS = 256
"""More than viewers of events may be (viewers.py). Beyond that the one that has been without a
request for longest is ended."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > MAX_CONNECTIONS:
            open_ = [
                one
                for one in self.connections
                if isinstance(one, BoundedProtocol) and one._timer is not None
            ]
            min(
                open_, key=lambda one: one._timer.when() if one._timer is not None else 0.0
            ).give_up()

    def data_received(self, data: bytes) -> None:
        """Some of a request has come."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()
        else:
            self._stop()

    def pause_writing(self) -> None:
        """The other end does not read as fast as we write."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_DEADLINE, self._cut_off)

    def resume_writing(self) -> None:
        """It has read."""
        self._read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop()
        self._read()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """End it; what has come of a request is lost."""
        self._stop()
        self.connections.discard(self)
        self.transport.abort()

    def _cut_off(self) -> None:
        log.warning("control.cut_off", reason=f"has read nothing for {READ_DEADLINE:.0f} s")
        self.transport.abort()

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_request(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_DEADLINE, self.give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
