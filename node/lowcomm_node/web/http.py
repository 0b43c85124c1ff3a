"""Serves HTTP at sockets, in the event loop of the daemon, with limits on connections.

The page of a node is files that hold nothing of it. Its script asks the API for all that it shows.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowcomm_node.errors import PortInUse
from lowcomm_node.status.figures import answer_metrics
from lowcomm_node.status.model import Status
from lowcomm_node.system.units import place

CLOSE_DEADLINE = 1.0
"""Seconds for answers under way when it closes."""
SEND_BUFFER = 64 * 1024
"""Bytes."""
MAX_CONNECTIONS = 256
"""At a port; more than viewers of events may be (viewers.py)."""
REQUEST_DEADLINE = 10.0
"""Seconds for a request to come whole."""
READ_DEADLINE = 10.0
"""Seconds for the other end to read some of an answer that is longer than the buffers."""


FOLDER = Path(__file__).parent / "page"
HEADERS = {
    # Nothing of another host is loaded, and no other page can show this one in a frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


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


class LimitedProtocol(H11Protocol):
    """Connection that may be ended for a new one while it is idle, and is where nothing moves.

    Connections to a unix socket are the owner's: they neither count nor are ended for others.
    """

    address = ""
    """Empty for a unix socket."""
    began = 0.0
    """Loop time."""
    _deadline: asyncio.TimerHandle | None = None

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered, or the answer is not read."""
        cycle = self.cycle
        return self._deadline is not None or cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept it; if there are too many, end another one of the address that holds most.

        The oldest idle one goes first, else the youngest."""
        super().connection_made(transport)
        self.address = self.client[0].removeprefix("::ffff:") if self.client else ""
        self.began = self.loop.time()
        self._end_after(REQUEST_DEADLINE)
        if not self.address:
            return
        others = [one for one in self.connections if isinstance(one, LimitedProtocol)]
        others = [one for one in others if one.address and one is not self]
        if len(others) >= MAX_CONNECTIONS:
            [(address, _)] = Counter(one.address for one in others).most_common(1)
            crowd = [one for one in others if one.address == address]
            idle, began = [one for one in crowd if one._idle], attrgetter("began")
            surplus = min(idle, key=began) if idle else max(crowd, key=began)
            self.connections.discard(surplus)
            surplus.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._end_after(REQUEST_DEADLINE)
        else:
            self._go_on()

    def pause_writing(self) -> None:
        """Wait until the other end reads."""
        super().pause_writing()
        self._end_after(READ_DEADLINE)

    def resume_writing(self) -> None:
        """Go on, since it has read."""
        self._go_on()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._go_on()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _go_on(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Listening:
    """An application that is served."""

    def __init__(self, app: Any, *sockets: socket.socket) -> None:
        """``app``: an ASGI application."""

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            with suppress(asyncio.CancelledError):  # it closes: no error of the application
                await app(scope, receive, send)

        config = uvicorn.Config(
            serve,
            http=LimitedProtocol,
            ws="none",
            log_config=None,
            lifespan="off",
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        # The daemon has handlers of its own.
        self._server.capture_signals = nullcontext  # type: ignore[assignment]
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

    async def answer(request: Request) -> Response:
        return answer_metrics(look())

    host, _, port = address.rpartition(":")
    app = Starlette(routes=[Route("/metrics", answer)])
    return Listening(app, bind(host.strip("[]"), int(port), "--metrics"))


class PageFiles(StaticFiles):
    """Files with the headers of a page."""

    def file_response(self, *given: Any, **named: Any) -> Response:
        """Answer with a file."""
        response = super().file_response(*given, **named)
        response.headers.update(HEADERS)
        return response


PAGE = Mount("/", PageFiles(directory=FOLDER, html=True))
