"""Ends connections to the control API on which no whole request comes: uvicorn would keep them."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_DEADLINE = 10.0
"""Seconds for a whole request, headers and body."""
MAX_CONNECTIONS = 64
"""Beyond that the one that has been without a request for longest is ended."""


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._timer: asyncio.TimerHandle | None = None

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

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """End it; what has come of a request is lost."""
        self._stop()
        self.connections.discard(self)
        self.transport.abort()

    def _await_request(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_DEADLINE, self.give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
