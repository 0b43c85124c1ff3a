"""Serves HTTP at a socket, in the event loop of the daemon."""

import asyncio
import socket
from typing import Any

import uvicorn

from lowcomm_node.control.half_open import BoundedProtocol
from lowcomm_node.errors import PortInUse

CLOSE_DEADLINE = 5.0
SEND_BUFFER = 64 * 1024
"""Bytes."""


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
            f"{host}:{port} can't be listened at ({why}): choose another with {option}."
        ) from None
    return sock


class Listening:
    """An application that is served."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        """``app``: of ASGI."""
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _leave_signals_alone  # type: ignore[method-assign] - the daemon has its own
        self._serving = asyncio.create_task(self._server.serve([sock]))

    async def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self._serving
        except TimeoutError:
            self._serving.cancel()


class _leave_signals_alone:  # noqa: N801 - stands in for a method
    """uvicorn would take SIGINT and SIGTERM for itself."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
