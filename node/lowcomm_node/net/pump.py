"""Moves bytes between two sockets in the event loop, both ways, at the pace of the slower one.

Either socket may speak TLS (`ssl.SSLSocket`). Both must not block.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

BUFFER = 256 * 1024
"""Bytes that one direction reads at once, and holds while the other end is slow."""
RECORD = 16 * 1024
"""Bytes of a record of TLS. With less room OpenSSL would keep a rest, of which no event tells."""
LINGER = 2.0
"""Seconds to move what an end has written that reads no more."""
_BLOCKED = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


async def pump(one: socket.socket, other: socket.socket) -> socket.socket:
    """Move bytes until one of both ends; that one."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[socket.socket] = loop.create_future()

    def end(which: socket.socket) -> None:
        if not ended.done():
            ended.set_result(which)

    ways = [_Way(loop, one, other, end), _Way(loop, other, one, end)]
    try:
        return await ended
    finally:
        for way in ways:
            way.stop()


class _Way:
    """One direction: it reads only while the sink takes everything."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket,
        end: Callable[[socket.socket], None],
    ) -> None:
        self._loop, self._source, self._sink, self._end = loop, source, sink, end
        self._records = isinstance(source, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(BUFFER))
        self._left = self._buffer[:0]
        loop.add_reader(source, self._read)
        self._reads = True

    def stop(self) -> None:
        """Move no more bytes."""
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._sink)

    def _read(self) -> None:
        size = got = 0
        try:
            size = got = self._source.recv_into(self._buffer)
            # A read gives one record of TLS, and each event costs more than a read.
            while self._records and got and BUFFER - size >= RECORD:
                got = self._source.recv_into(self._buffer[size:])
                size += got
        except _BLOCKED:
            if not size:
                return
        except OSError:
            pass  # what was read before is sent, and the next read fails again
        if not size:
            self._loop.remove_reader(self._source)
            self._end(self._source)
            return
        self._left = self._buffer[:size]
        self._write()

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[self._sink.send(self._left) :]
        except _BLOCKED:
            pass
        except OSError:
            self.stop()
            # The other direction reads what the sink has still written, and its end.
            self._loop.call_later(LINGER, self._end, self._sink)
            return
        # Repeated requests would cost system calls.
        if self._left and self._reads:
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._write)
            self._reads = False
        elif not self._left and not self._reads:
            self._loop.remove_writer(self._sink)
            self._loop.add_reader(self._source, self._read)
            self._reads = True
