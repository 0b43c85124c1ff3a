"""Serves HTTP at sockets, in the event loop of the daemon."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowcomm_node.errors import PortInUse
from lowcomm_node.status.model import Status
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import prefixes_of
from lowcomm_node.system.units import place

CLOSE_DEADLINE = 1.0
"""Seconds for answers under way when it closes."""
SEND_BUFFER = 64 * 1024
"""Bytes."""
MAX_CONNECTIONS = 256
"""More than viewers of events may be (viewers.py)."""
READ_DEADLINE = 10.0
"""Seconds for the other end to read some of an answer that is longer than the buffers."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens. ``option`` sets the port. Raises PortInUse."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of each connection: the kernel would hold megabytes for one that does not read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        why = error.strerror or str(error)
        raise PortInUse(
            f"{place(host, port)} can't be listened at ({why}): choose another with {option}."
        ) from None
    return sock


def bind_own(path: Path) -> socket.socket:
    """A unix socket that listens for this user alone. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)  # of a daemon that was killed
        sock.bind(str(path))
        path.chmod(0o600)  # before it listens: until then nobody can connect
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


class FairProtocol(H11Protocol):
    """A connection. When there are too many, one of the address that has most ends, an idle one
    first. Another one can always be made."""

    _moved = 0.0
    _unread: asyncio.TimerHandle | None = None

    @property
    def _place(self) -> str:
        """A network address; empty for a unix socket."""
        return prefixes_of(self.client[0].removeprefix("::ffff:"))[0] if self.client else ""

    @property
    def _worth(self) -> tuple[bool, float]:
        """Whether a request is being answered, and the other end reads; beyond that the longest
        idle one is worth least, and the longest answer, which is a stream, most."""
        cycle = self.cycle
        idle = not cycle or cycle.more_body or cycle.response_complete or self._unread is not None
        return not idle, self._moved if idle else -self._moved

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept it, and end another one if there are too many."""
        super().connection_made(transport)
        self._moved = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [one for one in self.connections if isinstance(one, FairProtocol)]
            others.remove(self)
            held = Counter(one._place for one in others)
            surplus = min(others, key=lambda one: (-held[one._place], *one._worth))
            self.connections.discard(surplus)
            surplus.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        self._moved = self.loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        """Wait until the other end reads."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_DEADLINE, self._cut_off)

    def resume_writing(self) -> None:
        """Go on, since it has read."""
        self._read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._read()
        super().connection_lost(exc)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _cut_off(self) -> None:
        log.warning("control.cut_off", reason=f"has read nothing for {READ_DEADLINE:.0f} s")
        self.transport.abort()


class Listening:
    """An application that is served."""

    def __init__(self, app: Any, *sockets: socket.socket) -> None:
        """``app``: of ASGI."""

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            with suppress(asyncio.CancelledError):  # it closes: no error of the application
                await app(scope, receive, send)

        config = uvicorn.Config(
            serve,
            http=FairProtocol,
            ws="none",
            log_config=None,
            lifespan="off",
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _leave_signals_alone  # type: ignore[method-assign] - the daemon has its own
        self._serving = asyncio.create_task(self._server.serve(list(sockets)))

    async def close(self) -> None:
        """Stop listening; what has not been answered or read soon is cut off."""
        self._server.should_exit = True
        _, late = await asyncio.wait({self._serving}, timeout=CLOSE_DEADLINE)
        if late:
            state = self._server.server_state
            for connection in list(state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # the requests learn first that nobody waits for an answer
            for task in list(state.tasks):
                task.cancel()
            await asyncio.wait({self._serving}, timeout=CLOSE_DEADLINE)
        self._serving.cancel()


def serve_metrics(look: Callable[[], Status], address: str) -> Listening:
    """Serve ``/metrics`` at ``HOST:PORT``. Raises PortInUse."""
    from lowcomm_node.status.metrics import tell_metrics  # few nodes need it

    host, _, port = address.rpartition(":")

    async def answer(request: Request) -> Response:
        return tell_metrics(look)

    app = Starlette(routes=[Route("/metrics", answer)])
    return Listening(app, bind(host.strip("[]"), int(port), "--metrics"))


class _leave_signals_alone:  # noqa: N801 - stands in for a method
    """uvicorn would take SIGINT and SIGTERM for itself."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
