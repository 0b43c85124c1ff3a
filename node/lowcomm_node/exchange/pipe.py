"""Carries bytes between a socket of this machine and a stream to a peer, until both ends have said all.

One buffer each way, so whoever does not read stops whoever writes. What each side counts is what entered the other.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.tunnel_frames import WORD, Decoder, Signal, word

BUFFER = 128 * 1024
"""Bytes that are read at once, and the most that one direction holds."""
LINGER = 30.0
"""Seconds from the first END, of whichever side, to the end of the pipe."""


class Pipe:
    """Both directions between ``local`` and ``stream``, which is ready; it closes both when it ends."""

    def __init__(self, local: socket.socket, stream: socket.socket, moved: Callable[[int, int], None]) -> None:
        """``moved`` hears how many bytes were sent and received, a piece at a time."""
        self._local, self._stream, self._moved = local, stream, moved
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._sending = asyncio.Lock()
        self._got_end = self._end_acked = self._local_is_gone = False
        self._lingering: asyncio.Timeout | None = None
        self._last_moved = self._loop.time()
        self._blocked: dict[socket.socket, float] = {}

    def idle(self, now: float) -> float:
        """Seconds since a byte has moved, either way; ``now``: the event loop's time."""
        return now - self._last_moved

    def blocked(self, now: float) -> float:
        """Seconds for which one of the two ends has not taken what we hold for it; 0 if both do."""
        return max((now - since for since in self._blocked.values()), default=0.0)

    async def run(self) -> None:
        """Carry to the end. Raises LinkLost or ProtocolViolation if the stream does not end as it should."""
        outward = asyncio.create_task(self._carry_out())
        try:
            async with asyncio.timeout(None) as self._lingering:
                await self._carry_in()
        except TimeoutError:
            raise LinkLost(f"did not end within {LINGER:.0f} s") from None
        except OSError as error:
            raise LinkLost(f"broke off: {error.strerror}") from None
        finally:
            outward.cancel()
            try:
                await asyncio.gather(outward, return_exceptions=True)
            finally:
                self._local.close()
                self._stream.close()

    async def _carry_out(self) -> None:
        buffer = memoryview(bytearray(WORD + BUFFER))
        loop, local = self._loop, self._local
        with suppress(OSError):  # the local end is gone, or the stream is: then reading from it ends the pipe
            while size := await _read(loop, local, buffer[WORD:]):
                buffer[:WORD] = word(size)
                await self._send(buffer[: WORD + size])
                self._moved(size, 0)
        with suppress(OSError):
            self._linger()
            await self._send(memoryview(word(Signal.END)))

    async def _carry_in(self) -> None:
        buffer = memoryview(bytearray(BUFFER))
        while not (self._got_end and self._end_acked):
            size = await self._loop.sock_recv_into(self._stream, buffer)
            if not size:
                if self._got_end:  # the other side had all that it waited for, and its ACK was lost on the way
                    return
                raise LinkLost("broke off")
            self._last_moved = self._loop.time()
            for part in self._decoder.feed(buffer[:size]):
                if isinstance(part, memoryview):
                    await self._pass_on(part)
                else:
                    await self._obey(part)

    async def _pass_on(self, piece: memoryview) -> None:
        if self._got_end:
            raise LinkLost("sent bytes after its end")
        self._moved(0, len(piece))
        if self._local_is_gone:
            return  # nobody is interested any more, but the END behind it is
        try:
            await self._write(self._local, piece)
        except OSError:
            self._local_is_gone = True

    async def _obey(self, signal: Signal) -> None:
        if signal is Signal.ACK:
            self._end_acked = True
        elif signal is Signal.END and not self._got_end:
            self._got_end = True
            self._linger()
            with suppress(OSError):
                self._local.shutdown(socket.SHUT_WR)
            await self._send(memoryview(word(Signal.ACK)))
        else:
            raise LinkLost(f"sent {signal.name} where it is not due")

    async def _send(self, data: memoryview) -> None:
        async with self._sending:  # an ACK must not come between a length and its bytes
            await self._write(self._stream, data)

    async def _write(self, sink: socket.socket, data: memoryview) -> None:
        self._blocked[sink] = self._last_moved = self._loop.time()
        try:
            await self._loop.sock_sendall(sink, data)
        finally:
            self._blocked.pop(sink, None)

    def _linger(self) -> None:
        if self._lingering is not None and self._lingering.when() is None:
            self._lingering.reschedule(self._loop.time() + LINGER)


async def _read(loop: asyncio.AbstractEventLoop, source: socket.socket, into: memoryview) -> int:
    """Bytes read; 0 at the end, also where the other end was just closed."""
    try:
        return await loop.sock_recv_into(source, into)
    except ConnectionResetError:
        return 0
