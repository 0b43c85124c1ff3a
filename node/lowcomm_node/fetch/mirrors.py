"""Pieces of packed text from mirrors: ranges of a file that a web server has, over HTTPS.

Mirrors are those that the owner names, and those of the run where the owner allows them. They are
asked where peers bring too little. A run's creator is a stranger, so an address is hostile until it
was checked:

    where     public addresses only. The address that was checked is the one that is dialed, and TLS
              is for the name. Nothing follows a redirect or a proxy
    how much  the size must be that of the text, and an answer that of its range
    what      the run pins the digest of each piece; a mirror that gave another is asked no more
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from math import inf
from time import monotonic
from typing import Any

import httpcore

from lowcomm_node.errors import LinkLost, NodeError, TooSlow
from lowcomm_node.fetch.engine import CHUNK_BYTES, GIVING_WAY, LEAST_RATE, SILENCE
from lowcomm_node.net.bandwidth import Arrival, BandwidthLimit
from lowcomm_node.net.targets import is_public, number_of
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import in_time
from lowcomm_protocol.errors import in_words
from lowcomm_protocol.spec.sections import DIGEST_BYTES, PackedText

ATTEMPTS = 4  # connections in a row that bring nothing
LONGEST_PAUSE = 3600.0
"""Seconds that a mirror may ask us to wait."""
WINDOW_BYTES = 256 * 1024
"""Bytes that the kernel takes of an answer that we do not read."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Head = dict[bytes, bytes]


class MirrorRefused(NodeError):
    """A mirror that is not asked again."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """The IP addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class _Dialer(httpcore.AsyncNetworkBackend):
    """Dials the very address that was checked, whatever the name means a moment later."""

    def __init__(self, is_local: bool, resolve: Resolve) -> None:
        self._dialer: Any = httpcore.AnyIOBackend()
        self._is_local = is_local
        self._resolve = resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with in_time(timeout or SILENCE, f"{host} was not resolved in time"):
                addresses = await self._resolve(host, port)
        except OSError as error:
            raise LinkLost(f"{host} can't be resolved ({error.strerror})") from None
        for address in addresses:
            if not (is_public(address) or (self._is_local and number_of(address) is not None)):
                raise MirrorRefused(
                    f"{host} leads to {address}, which is not an address of the public internet"
                )
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)]
        return await self._dialer.connect_tcp(addresses[0], port, timeout, None, options)


class Mirror:
    """One text on one web server."""

    def __init__(
        self, url: str, part: PackedText, *, is_local: bool = False, resolve: Resolve = resolve
    ) -> None:
        """``url``: of the file, or of its folder if it ends in /; ``is_local``: whether it may lead
        to this machine or its network."""
        self.url = f"{url}{part.name}.pack" if url.endswith("/") else url
        self.host = httpcore.URL(self.url).host.decode()
        self.later = 0.0
        """When it may be asked again; infinity: never."""
        self.failures = 0
        self._part = part
        self._mark = b""
        """ETag of the file, while it is the same."""
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=_Dialer(is_local, resolve), max_connections=1, keepalive_expiry=30.0
        )

    async def listing(self) -> bytes:
        """The list of digests; still to be checked. Raises NodeError."""
        size, data = self._part.piece_count * DIGEST_BYTES, bytearray()
        async with self._ask(f"{self.url}.pieces", {}) as (status, _, blocks):
            self._require(status, 200)
            async for block in blocks:
                data += block
                if len(data) > size:
                    raise MirrorRefused(f"its list has more than {size:,} bytes")
        return bytes(data)

    async def read(self, start: int, stop: int, down: BandwidthLimit) -> AsyncGenerator[bytes]:
        """The bytes of the file from ``start`` to ``stop``, in blocks. Raises NodeError."""
        failures = 0
        while start < stop:
            before = start
            try:
                async with aclosing(self._read_range(start, stop, down)) as blocks:
                    async for block in blocks:
                        start += len(block)
                        yield block
            except TooSlow:
                raise
            except LinkLost:
                failures = 1 if start > before else failures + 1
                if failures == ATTEMPTS:
                    raise

    async def close(self) -> None:
        """End its connection."""
        await self._pool.aclose()

    async def _read_range(
        self, start: int, stop: int, down: BandwidthLimit
    ) -> AsyncGenerator[bytes]:
        span = f"{start}-{stop - 1}"
        asked = {"Range": f"bytes={span}"} | (
            {"If-Range": self._mark.decode()} if self._mark else {}
        )
        async with self._ask(self.url, asked) as (status, head, blocks):
            if status == 200 and self._mark:
                self._mark = b""
                raise MirrorRefused("its file has changed")
            self._require(status, 206)
            if head.get(b"content-range") != f"bytes {span}/{self._part.size}".encode():
                raise MirrorRefused(
                    f"it has another file: the pack has {self._part.size:,} bytes, and bytes "
                    f"{span} were asked for"
                )
            mark = head.get(b"etag", b"")
            self._mark = mark if mark.startswith(b'"') and len(mark) < 200 else b""
            arrival = Arrival(down, stop - start, CHUNK_BYTES)
            since, before = monotonic(), start
            async for block in blocks:
                start += len(block)
                if start > stop:
                    raise MirrorRefused("it sent more than it announced")
                arrival.took(len(block))
                yield block
                if (seconds := monotonic() - since) > GIVING_WAY:
                    if start - before < seconds * min(LEAST_RATE, (down.rate or inf) / 2):
                        raise TooSlow("brings next to nothing")
                    since, before = monotonic(), start
                await arrival.make_room()
                await down.give_way()
        if start < stop:
            raise LinkLost("broke off")

    @asynccontextmanager
    async def _ask(
        self, url: str, asked: dict[str, str]
    ) -> AsyncIterator[tuple[int, Head, AsyncIterator[bytes]]]:
        """Status, header fields and bytes of an answer. Raises LinkLost, MirrorRefused."""
        fields = {
            "User-Agent": f"lowcomm-node/{release()}",
            "Accept-Encoding": "identity",
        }
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), SILENCE)
        try:
            async with self._pool.stream(
                "GET", url, headers=list((fields | asked).items()), extensions={"timeout": timeout}
            ) as answer:
                head = {name.lower(): value for name, value in answer.headers}
                if head.get(b"content-encoding", b"identity") != b"identity":
                    raise MirrorRefused("it compresses what it sends")
                if answer.status in (429, 503):
                    wait = head.get(b"retry-after", b"60")
                    seconds = int(wait) if wait.isdigit() and len(wait) < 6 else 60
                    self.later = monotonic() + min(LONGEST_PAUSE, seconds)
                    raise LinkLost(f"asks us to come again in {seconds} s")
                yield answer.status, head, answer.aiter_stream()
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise LinkLost(in_words(f"failed: {error or type(error).__name__}")) from None
        except (OSError, ValueError) as error:  # of TLS, and of what a library makes of an answer
            raise LinkLost(in_words(f"failed: {error}")) from None

    def _require(self, status: int, expected: int) -> None:
        if 300 <= status < 400:
            raise MirrorRefused("it leads to another address: name that")
        if status != expected:
            what = "serves no ranges" if status == 200 else f"answers {status}"
            raise (LinkLost if status >= 500 else MirrorRefused)(f"it {what}")
