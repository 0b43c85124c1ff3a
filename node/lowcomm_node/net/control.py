"""Streams to other peers, and p2pd's control socket, which opens them.

hivemind's client of p2pd offers neither streams as sockets nor deadlines.

    a request     has a connection of its own: length, Request ──►   ◄── length, Response
    STREAM_OPEN   after the response that connection is the stream
    incoming      p2pd dials us for each stream, and names the peer at the other end

We listen on an abstract unix socket, which a killed process does not leave behind. The kernel names
the process that dials it: only our own p2pd is believed, since it vouches for the peer's identity.
"""

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import base58

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import EntryPoint, decode
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import endure, log_defect


@dataclass(frozen=True)
class OpenStream:
    """A stream to another peer, whose identity is proven."""

    peer_id: str
    address: str
    """Multiaddress of the other end, with the relay if there is one; empty if unknown."""
    socket: socket.socket
    """Non-blocking. Who takes the stream closes it."""
    protocol: str = ""
    """The protocol of an incoming stream."""


TakeStream = Callable[[OpenStream], None]
"""Takes over an incoming stream."""


class Streams(Protocol):
    """Byte streams between peers, even if only one of them, or neither, can be dialed."""

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """Connect to a peer: at these addresses, or through our own entry points as relays.

        Raises LinkLost with the reason if it fails.
        """
        ...

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer, such as dead ones. Never raises."""
        ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream to a connected peer. Raises LinkLost.

        Only an answer of the other end shows that it serves the protocol, and that the connection
        works.
        """
        ...

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with each incoming stream of a protocol, from now on. Raises
        LinkLost.

        Each protocol can be served once.
        """
        ...

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of the connections to a peer; empty if there are none, or p2pd can't
        tell."""
        ...


MAX_ANSWER = 4 * 1024**2
"""Bytes of one answer. The list of peers grows with their number."""
SLACK = 1.0
"""Seconds that we wait beyond p2pd's own deadline: its error says more than ours."""


@dataclass(frozen=True)
class Connection:
    """A connection of p2pd to another peer."""

    peer_id: str
    address: str
    """Multiaddress of the other end; empty if it is of a kind that we don't use."""


class Control:
    """Requests to a running p2pd. Each raises LinkLost with the reason if it fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def connect(self, peer_id: str, entries: Sequence[EntryPoint], seconds: float) -> None:
        """Connect to a peer at any of these addresses, unless it is connected already."""
        pb = _messages()
        addresses = [entry.to_bytes() for entry in entries]
        connect = pb.ConnectRequest(
            peer=base58.b58decode(peer_id), addrs=addresses, timeout=max(1, round(seconds))
        )
        await self._ask(pb.Request(type=pb.Request.CONNECT, connect=connect), seconds)

    async def disconnect(self, peer_id: str, seconds: float = 5.0) -> None:
        """Close all connections to a peer."""
        pb = _messages()
        wanted = pb.DisconnectRequest(peer=base58.b58decode(peer_id))
        await self._ask(pb.Request(type=pb.Request.DISCONNECT, disconnect=wanted), seconds)

    async def identify(self, seconds: float = 5.0) -> tuple[str, tuple[str, ...]]:
        """The peer id of this p2pd, and the addresses at which it believes to be dialable."""
        pb = _messages()
        answer = (await self._ask(pb.Request(type=pb.Request.IDENTIFY), seconds)).identify
        addresses = (decode(address) for address in answer.addrs)
        return base58.b58encode(answer.id).decode(), tuple(
            address for address in addresses if address
        )

    async def connections(self, seconds: float = 5.0) -> list[Connection]:
        """All connections; a peer may have several."""
        pb = _messages()
        answer = await self._ask(pb.Request(type=pb.Request.LIST_PEERS), seconds)
        return [
            Connection(base58.b58encode(peer.id).decode(), decode(address) or "")
            for peer in answer.peers
            for address in peer.addrs
        ]

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream.

        p2pd answers before the other end does: only bytes from the stream prove that it is served.
        """
        pb = _messages()
        wanted = pb.StreamOpenRequest(
            peer=base58.b58decode(peer_id), proto=[protocol], timeout=max(1, round(seconds))
        )
        request = pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)
        with _in_words():
            async with asyncio.timeout(seconds + SLACK):
                stream = await _dial(self._path)
                try:
                    answer = await _exchange(stream, request)
                except BaseException:
                    stream.close()
                    raise
        return OpenStream(peer_id, decode(answer.streamInfo.addr) or "", stream)

    async def handle_streams(self, protocol: str, address: bytes, seconds: float = 5.0) -> None:
        """Have p2pd dial ``address`` (bytes of a multiaddress) for each incoming stream of a
        protocol."""
        pb = _messages()
        handler = pb.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=handler), seconds)

    async def _ask(self, request: Any, seconds: float) -> Any:
        with _in_words():
            async with asyncio.timeout(seconds + SLACK):
                connection = await _dial(self._path)
                with connection:
                    return await _exchange(connection, request)


def varint(number: int) -> bytes:
    """The bytes of a number: seven bits a byte, the lowest first."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def framed(data: bytes) -> bytes:
    """A message with its length before it, as ``read_message`` reads it."""
    return varint(len(data)) + data


async def read_message(source: socket.socket, limit: int = MAX_ANSWER) -> bytes:
    """Read one length-prefixed message, and not a byte more: a stream may follow.

    Raises LinkLost, OSError.
    """
    size = shift = 0
    while True:
        byte = (await read_exactly(source, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 28:
            raise LinkLost("sent a length that is none")
    if size > limit:
        raise LinkLost(f"sent a message of {size} bytes: at most {limit}")
    return await read_exactly(source, size)


async def read_exactly(source: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes. Raises LinkLost at the end of the stream, OSError."""
    loop, parts, missing = asyncio.get_running_loop(), list[bytes](), size
    while missing:
        part = await loop.sock_recv(source, missing)
        if not part:
            raise LinkLost("the stream ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


async def _dial(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


async def _exchange(connection: socket.socket, request: Any) -> Any:
    data = request.SerializeToString()
    await asyncio.get_running_loop().sock_sendall(connection, framed(data))
    answer = _messages().Response.FromString(await read_message(connection))
    if answer.type == _messages().Response.ERROR:
        raise LinkLost(_shorten(answer.error.msg))
    return answer


@contextmanager
def _in_words() -> Iterator[None]:
    from google.protobuf.message import DecodeError

    try:
        yield
    except TimeoutError:
        raise LinkLost("did not answer in time") from None
    except OSError as error:
        raise LinkLost(f"p2pd can't be asked: {error.strerror or error}") from None
    except DecodeError:
        raise LinkLost("p2pd sent bytes that are no message") from None


def _shorten(message: str) -> str:
    """p2pd's error, one line per address, as one printable line. Other peers can influence its
    text."""
    lines = [line.strip(" *") for line in message.splitlines()]
    text = (
        "; ".join(line for line in lines if line and not line.startswith("failed to dial"))
        or message
    )
    return "".join(char if char.isprintable() else " " for char in text)[:300]


def _messages() -> Any:
    from lowcomm_node.net.hivemind_parts import (
        p2pd_pb2,  # takes a while to import, the first time: see client.load_hivemind
    )

    return p2pd_pb2


HEADER_DEADLINE = 5.0
MAX_HEADER = 4096
BACKLOG = 64
MAX_GREETED = 64
"""Streams whose header is being read at once. More wait in the kernel's queue."""
_UNIX = b"\x90\x03"  # the code of "unix" in a multiaddress
_CREDENTIALS = "3i"


class StreamListener:
    """Accepts the streams that p2pd hands over."""

    def __init__(self, take: TakeStream) -> None:
        self._take = take
        self._name = f"lowcomm.{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._greeting: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_GREETED)
        self._accepting: asyncio.Task[None] | None = None
        self.dialer: int | None = None
        """Process id of the p2pd that is believed."""

    @property
    def address(self) -> bytes:
        """The multiaddress that p2pd dials."""
        # Go reads a leading @ as an abstract name; a path would need a slash there.
        path = f"@{self._name}".encode()
        return _UNIX + bytes([len(path)]) + path

    def start(self) -> None:
        """Begin to accept."""
        accept = endure("streams of other peers are not accepted", self._accept)
        self._accepting = asyncio.create_task(accept)

    async def close(self) -> None:
        """Accept no more. Streams already handed over stay open."""
        tasks = [*self._greeting, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                stream, _ = await loop.sock_accept(self._socket)
            # Such as too many open files: either it passes, or nothing works any more.
            except OSError as error:
                self._room.release()
                log.warning("stream.not_accepted", reason=str(error))
                await asyncio.sleep(1.0)
                continue
            task = asyncio.create_task(self._greet(stream))
            self._greeting.add(task)
            task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greeting.discard(task)
        self._room.release()
        log_defect(task)

    async def _greet(self, stream: socket.socket) -> None:
        from google.protobuf.message import DecodeError

        from lowcomm_node.net.hivemind_parts import p2pd_pb2

        taken = False
        try:
            stream.setblocking(False)
            if caller(stream) != self.dialer:
                log.warning(
                    "stream.other_process",
                    reason="another process of this machine dialed us",
                    pid=caller(stream),
                )
                return
            async with asyncio.timeout(HEADER_DEADLINE):
                header = p2pd_pb2.StreamInfo.FromString(await read_message(stream, MAX_HEADER))
            peer_id = base58.b58encode(header.peer).decode()
            opened = OpenStream(peer_id, decode(header.addr) or "", stream, header.proto)
            self._take(opened)
            taken = True
        except (LinkLost, OSError, DecodeError) as error:
            log.debug("stream.broken", reason=repr(error))
        finally:
            if not taken:
                with suppress(OSError):
                    stream.close()


class Served:
    """The protocols that we serve, their handlers, and which of them p2pd knows."""

    def __init__(self) -> None:
        self._takers: dict[str, TakeStream] = {}
        self._told: set[str] = set()
        self._listener: StreamListener | None = None
        self._closed = False

    def add(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with the streams of a protocol, once p2pd knows it.

        Raises LinkLost if it is served already.
        """
        if protocol in self._takers:
            raise LinkLost(f"streams of {protocol} are served already")
        self._takers[protocol] = take

    async def tell(self, control: Control, dialer: int | None) -> None:
        """Register with p2pd, whose process id is ``dialer``, the protocols that it does not know.

        Raises LinkLost.
        """
        if self._closed:
            raise LinkLost("no streams are taken any more")
        if self._listener is None:
            self._listener = StreamListener(self._take)
            self._listener.start()
        self._listener.dialer = dialer
        for protocol in [protocol for protocol in self._takers if protocol not in self._told]:
            await control.handle_streams(protocol, self._listener.address)
            self._told.add(protocol)

    def forget(self) -> None:
        """p2pd has ended, and the next one knows no protocols."""
        self._told.clear()

    async def close(self) -> None:
        """Accept no more streams."""
        self._closed = True
        self._takers.clear()
        if self._listener is not None:
            await self._listener.close()

    def _take(self, stream: OpenStream) -> None:
        # p2pd hands over registered protocols only.
        take = self._takers.get(stream.protocol)
        if take is None:  # we are leaving
            stream.socket.close()
        else:
            take(stream)


def caller(connection: socket.socket) -> int:
    """The process id at the other end of a unix socket, from the kernel."""
    size = struct.calcsize(_CREDENTIALS)
    return struct.unpack(
        _CREDENTIALS, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )[0]
