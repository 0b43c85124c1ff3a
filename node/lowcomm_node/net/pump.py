"""Moves the bytes of a session between a local socket and the current stream.

Bytes read from one are written to the other at once; while that takes no more, reading stops. A
stream that breaks off is only a pause: ``wait_cut`` tells the provider of streams, and ``attach``
goes on where the last one ended.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.frames import Part, Signal, numbered
from lowcomm_node.net.session import Session
from lowcomm_node.net.watched import Watched
from lowcomm_protocol.errors import ProtocolViolation

BUFFER = 256 * 1024
"""Bytes read from a stream at once, and the most held for the local end."""
LINGER = 30.0
"""Seconds from the first END, of either side, to the end of the session."""
MOST_PARTS = 64
"""Parts of a stream processed in one turn of the event loop, however small the other end cut
them."""


class Pump:
    """Both directions between ``local`` and the streams of one session; it closes them all."""

    def __init__(self, local: socket.socket, session: Session, *, calls: bool) -> None:
        """``calls``: whether this is the caller's end."""
        self._loop = asyncio.get_running_loop()
        local.setblocking(False)
        self._local = Watched(self._loop, local)
        self._session = session
        self._calls = calls
        self._stream: Watched | None = None
        self._buffer = memoryview(bytearray(BUFFER))
        self._pieces: list[memoryview] = []
        """Views of the buffer that the local end has still to take."""
        self._coming: Iterator[Part] | None = None
        """The undecoded rest of the buffer."""
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._news = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None
        self._last_moved = self._loop.time()
        self._blocked: dict[str, float] = {}
        self._from_local = self._guarded(self._read_local)
        self._from_stream = self._guarded(self._read_stream)
        self._to_local = self._guarded(self._pass_on)
        self._to_stream = self._guarded(self._push)
        self._on_coming = self._guarded(self._take_in)
        self._is_shut = False
        self._streams = 0
        self.cut = ""
        """Why the last stream was lost; empty while there is one, or none is needed."""

    async def dial(self, name: str, server: str) -> None:
        """Connect the local end, under a name of its own. Raises OSError."""
        local = self._local.socket
        local.bind(name)
        await self._loop.sock_connect(local, server)

    # for whoever provides the streams

    @property
    def received(self) -> int:
        """Bytes that have come from the other side, over all streams."""
        return self._session.received

    @property
    def carried(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    @property
    def began(self) -> bool:
        """Whether there is a stream, or was one."""
        return self._streams > 0

    @property
    def resumed(self) -> int:
        """Streams that replaced an earlier one."""
        return max(0, self._streams - 1)

    @property
    def repeated(self) -> int:
        """Bytes that were sent more than once."""
        return self._session.repeated

    def attach(self, stream: socket.socket, number: int) -> None:
        """Go on over a stream whose other end has received ``number`` bytes. Raises
        ProtocolViolation."""
        self._attach(stream, number, b"")

    def accept(self, stream: socket.socket, number: int) -> bool:
        """As ``attach``, after telling the other end that we are ready. Replaces a stream that
        still exists.

        False for an outdated stream: the other end has acknowledged more since.
        """
        if number < self._session.acked:
            stream.close()
            return False
        self._drop_stream()
        self._attach(stream, number, numbered(Signal.READY, self._session.received))
        return True

    def cut_off(self, reason: str) -> None:
        """Give up the stream, not the session."""
        self._drop_stream()
        if self._over.done():
            return
        if self._session.done:  # the other end had all that it waited for
            self.close()
        elif not self._session.received:
            self.fail(LinkLost(reason))  # nothing has begun that could be resumed
        else:
            self.cut = reason
            self._tell()

    def hang_up(self) -> None:
        """Read no more from the local end; the session then ends in order."""
        with suppress(OSError):
            self._local.socket.shutdown(socket.SHUT_RD)

    def fail(self, error: BaseException) -> None:
        """End the session, with a reason."""
        if not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # whoever waits gets it; if nobody does, it is no defect
        self.close()

    def close(self) -> None:
        """End the session: in order if both sides have finished, else it is lost."""
        if not self._over.done():
            if self._session.done:
                self._over.set_result(None)
            else:
                self._over.cancel()
        self.cut = ""
        if self._lingering is not None:
            self._lingering.cancel()
        if (
            self._stream is not None
            and not self._session.done
            and (farewell := self._session.farewell())
        ):
            with suppress(OSError):
                # At best: without it the other end keeps the session for KEEP seconds.
                self._stream.socket.send(farewell)
        self._drop_stream()
        self._local.close()
        self._pieces = []
        self._coming = None
        self._session.close()
        self._tell()

    async def wait_cut(self) -> bool:
        """Wait until there is no stream: True if another one is needed, False if the session is
        done.

        Raises what ended the session: LinkLost, ProtocolViolation.
        """
        while self._stream is not None and not self._over.done():
            await self._news.wait()
        return self._needs_stream()

    async def wait_carried(self) -> bool:
        """Wait until there is a stream: True if there is one, False if the session is done.

        Raises as ``wait_cut``.
        """
        while self._stream is None and not self._over.done():
            await self._news.wait()
        return not self._needs_stream() and self._stream is not None

    def idle(self, now: float) -> float:
        """Seconds since a byte has moved in either direction; ``now``: the event loop's time."""
        return now - self._last_moved

    def blocked(self, now: float) -> tuple[float, float]:
        """Seconds for which the local end, and the stream, have taken nothing; 0: they take."""
        stream = max(now - self._blocked.get(what, now) for what in ("stream", "ack"))
        return now - self._blocked.get("local", now), stream

    def acknowledge(self) -> None:
        """Acknowledge what has come, so that the other end can free it."""
        if self._stream is not None:
            self._session.acknowledge()
            self._to_stream()

    # streams

    def _attach(self, stream: socket.socket, number: int, greeting: bytes) -> None:
        if self._over.done():
            stream.close()
            return
        try:
            self._session.resume(number, greeting)
        except ProtocolViolation as error:
            stream.close()
            self.fail(error)
            raise
        self._stream = Watched(self._loop, stream)
        self.cut = ""
        self._streams += 1
        self._last_moved = self._loop.time()
        self._tell()
        if self._calls and self._session.done:  # only the last word of the other end was lost
            self.close()
            return
        self._read_on()
        if not self._pieces:
            self._stream.read(self._from_stream)
        self._to_stream()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._coming = None  # it comes again
        for what in ("stream", "ack"):
            self._blocked.pop(what, None)
        self._session.break_off()

    def _needs_stream(self) -> bool:
        if self._over.done():
            if self._over.cancelled():
                raise LinkLost("was closed")
            self._over.result()
            return False
        return self._stream is None

    def _tell(self) -> None:
        """Wake the waiting tasks."""
        self._news.set()
        self._news = asyncio.Event()

    # bytes

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        """A callback for the event loop. Any exception in it ends the session."""

        def call() -> None:
            if self._over.done():
                return
            try:
                work()
            except Exception as error:  # a defect of ours included: whoever waits gets it
                self.fail(error)

        return call

    def _read_local(self) -> None:
        room = self._session.room()
        if room is None:
            self._read_on()
            return
        try:
            size = self._local.socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it was closed with bytes of ours unread
            size = 0
        if size:
            self._session.add(size)
            self._last_moved = self._loop.time()
        else:
            self._session.end()
            self._local.read(None)
            self._linger()
        self._push()

    def _read_on(self) -> None:
        """Read from the local end, unless too many bytes are unacknowledged."""
        if self._session.room() is not None:
            self._blocked.pop("ack", None)
            self._local.read(self._from_local)
            return
        self._local.read(None)
        if not self._session.ended and self._stream is not None:
            self._blocked.setdefault("ack", self._loop.time())

    def _push(self) -> None:
        """Write to the stream what it takes."""
        stream = self._stream
        if stream is None:
            return
        while parts := self._session.outgoing():
            try:
                size = stream.socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                stream.write(self._to_stream)
                self._blocked.setdefault("stream", self._loop.time())
                return
            except OSError as error:
                self.cut_off(f"broke off: {error.strerror}")
                return
            self._session.sent(size)
            self._last_moved = self._loop.time()
            self._blocked.pop("stream", None)
        stream.write(None)
        self._close_if_done()

    def _read_stream(self) -> None:
        stream = self._stream
        assert stream is not None
        try:
            size = stream.socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.cut_off(f"broke off: {error.strerror}")
            return
        if not size:
            self.cut_off("broke off")
            return
        self._last_moved = self._loop.time()
        self._coming = self._session.decode(self._buffer[:size])
        self._take_in()

    def _take_in(self) -> None:
        """Process some of the buffer."""
        if self._coming is None or self._pieces:
            return
        parts = list(islice(self._coming, MOST_PARTS))
        if len(parts) < MOST_PARTS:
            self._coming = None
        self._pieces = self._session.feed(parts)
        if self._session.is_gone and not self._session.done:
            raise LinkLost("was closed by the other end")
        self._read_on()
        self._pass_on()
        self._push()

    def _pass_on(self) -> None:
        """Write to the local end what has come."""
        while self._pieces:
            try:
                size = self._local.socket.sendmsg(self._pieces)
            except (BlockingIOError, InterruptedError):
                self._local.write(self._to_local)
                # The buffer is in use until the local end takes it. Meanwhile nothing is read, and
                # the flow control of the stream slows the sender.
                self._blocked.setdefault("local", self._loop.time())
                if self._stream is not None:
                    self._stream.read(None)
                return
            except OSError:  # nobody is interested any more, but the END behind it is still to come
                self._pieces = []
                break
            self._blocked.pop("local", None)
            self._pieces = _without(self._pieces, size)
        self._blocked.pop("local", None)
        self._local.write(None)
        if self._stream is not None:
            self._stream.read(self._from_stream if self._coming is None else None)
        if self._coming is not None:
            self._loop.call_soon(self._on_coming)
            return
        if self._session.got_end and not self._is_shut:
            self._is_shut = True
            self._linger()
            with suppress(OSError):
                self._local.socket.shutdown(socket.SHUT_WR)
        self._close_if_done()

    # the end

    def _close_if_done(self) -> None:
        # The caller waits for the callee to close, or a last word of ours could be lost.
        if (
            not self._calls
            and self._session.done
            and not self._pieces
            and not self._session.outgoing()
        ):
            self.close()

    def _linger(self) -> None:
        if self._lingering is None:
            self._lingering = self._loop.call_later(LINGER, self._end_lingering)

    def _end_lingering(self) -> None:
        if self._session.done:
            self.close()
        else:
            self.fail(LinkLost(f"did not end within {LINGER:.0f} s"))


def _without(pieces: list[memoryview], size: int) -> list[memoryview]:
    """Pieces less their first ``size`` bytes."""
    for index, piece in enumerate(pieces):
        if size < len(piece):
            return [piece[size:], *pieces[index + 1 :]]
        size -= len(piece)
    return []
