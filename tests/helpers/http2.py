"""Hostile HTTP/2 by hand: floods of frames that no library sends, over TLS, to a real server."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from helpers.wire import SERVER_NAME

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
TICK = 0.02
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def _text(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def block(path: bytes) -> bytes:
    """The header block of a call (RFC 7541): static names, literal values that are not indexed."""
    fields = b"\x83\x87\x04" + _text(path) + b"\x01" + _text(b"lowcomm")
    return (
        fields
        + b"\x0f\x10"
        + _text(b"application/grpc")
        + b"\x00"
        + _text(b"te")
        + _text(b"trailers")
    )


def _string(text: bytes) -> bytes:
    """A string of any length (RFC 7541, section 5.2)."""
    left = len(text) - 127
    if left < 0:
        return _text(text)
    length = [127]
    while left >= 128:
        length.append(128 + left % 128)
        left //= 128
    return bytes([*length, left]) + text


def call(
    stream: int, path: bytes, metadata: Iterable[tuple[str, bytes]], message: bytes = b""
) -> bytes:
    """A whole call with one message, by a caller that shows who it is."""
    fields = block(path)
    for name, value in metadata:
        told = base64.b64encode(value) if name.endswith("-bin") else value
        fields += b"\x00" + _string(name.encode()) + _string(told)
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, data)


def begin(
    stream: int, path: bytes = b"/lowcomm.v1.Exchange/Describe", flags: int = END_HEADERS
) -> bytes:
    """The beginning of a call."""
    return frame(HEADERS, flags, stream, block(path))


def unknown_methods(number: int) -> bytes:
    """A call of what there is not."""
    return begin(2 * number + 1, b"/no.such.Service/Method", END_HEADERS | END_STREAM)


def rapid_reset(number: int) -> bytes:
    """A call that is taken back at once (CVE-2023-44487)."""
    return begin(2 * number + 1) + frame(RST_STREAM, 0, 2 * number + 1, b"\0\0\0\x08")


def pings(number: int) -> bytes:
    """Pings, which are to be answered."""
    return frame(PING, 0, 0, number.to_bytes(8, "big"))


def window_updates(number: int) -> bytes:
    """Room for a byte more, again and again."""
    return frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x01")


def continuations(number: int) -> bytes:
    """Headers that never end (CVE-2024-27316)."""
    return (
        begin(1, flags=0)
        if number == 0
        else frame(CONTINUATION, 0, 1, b"\x00" + _text(b"x") + _text(b"y" * 99))
    )


def settings(number: int) -> bytes:
    """Settings, which are to be acknowledged."""
    return frame(SETTINGS)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "unknown methods": unknown_methods,
    "rapid reset": rapid_reset,
    "PING": pings,
    "WINDOW_UPDATE": window_updates,
    "CONTINUATION": continuations,
    "SETTINGS": settings,
}


class Connection:
    """One connection that says whatever the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.received = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(OSError):
            while data := await self._reader.read(65536):
                self.received += len(data)

    @property
    def is_over(self) -> bool:
        """Whether the other end has closed it."""
        return self._reading.done()

    async def flood(self, kind: Callable[[int], bytes], rate: float) -> int:
        """Send frames, so many a second at most, until it is over; how many."""
        number, burst = 0, max(1, int(rate * TICK))
        with suppress(OSError):
            while not self.is_over:
                self.writer.write(b"".join(kind(number + one) for one in range(burst)))
                number += burst
                await self.writer.drain()
                await asyncio.sleep(TICK)
        return number

    async def close(self) -> None:
        """Break it off."""
        self.writer.transport.abort()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection over TLS that has said hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    streams = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=SERVER_NAME
    )
    connection = Connection(*streams)
    connection.writer.write(PREFACE + frame(SETTINGS))
    try:
        yield connection
    finally:
        await connection.close()
