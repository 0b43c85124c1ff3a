"""A socket and its callbacks in the event loop."""

import asyncio
import socket
from collections.abc import Callable


class Watched:
    """A socket that the event loop watches. Repeating a request costs no system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self.socket = sock
        self._reader: Callable[[], None] | None = None
        self._writer: Callable[[], None] | None = None

    def read(self, then: Callable[[], None] | None) -> None:
        """Call ``then`` whenever the socket is readable; None: stop."""
        if then is self._reader:
            return
        if then is None:
            self._loop.remove_reader(self.socket)
        else:
            self._loop.add_reader(self.socket, then)
        self._reader = then

    def write(self, then: Callable[[], None] | None) -> None:
        """Call ``then`` whenever the socket is writable; None: stop."""
        if then is self._writer:
            return
        if then is None:
            self._loop.remove_writer(self.socket)
        else:
            self._loop.add_writer(self.socket, then)
        self._writer = then

    def close(self) -> None:
        """Stop watching, and close the socket."""
        self.read(None)
        self.write(None)
        self.socket.close()
