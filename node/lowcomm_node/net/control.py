"""Streams to other peers, and p2pd's control socket, which opens them.

hivemind's client of p2pd offers neither streams as sockets nor deadlines.

    a request     has a connection of its own: length, Request ──►   ◄── length, Response
    STREAM_OPEN   after the response that connection is the stream
    incoming      p2pd dials us for each stream, and names the peer at the other end

The kernel names the process that dials our socket: only our own p2pd is believed, since it vouches
for the peer's identity.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import base58
from google.protobuf.message import DecodeError

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import EntryPoint, decode, encode
from lowcomm_node.net.local import address_of, bound, caller, new_name, remove
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Tasks, endure, in_time


@dataclass(frozen=True)
class OpenStream:
    """A stream to another peer, whose identity is proven."""

    peer_id: str
    address: str
    """Multiaddress of the other end, with the relay if there is one; empty if unknown."""
    socket: socket.socket
    """Non-blocking. Who takes the stream closes it."""


TakeStream = Callable[[OpenStream], None]
"""Takes over an incoming stream."""


class Streams(Protocol):
    """Byte streams between peers, even if only one of them, or neither, can be dialed; see
    ``dht.hivemind.Discovery``."""

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """Connect to a peer. Raises LinkLost with the reason if it fails."""
        ...

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer. Never raises."""
        ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream to a connected peer. Raises LinkLost. Only an answer of the other end shows
        that it serves the protocol."""
        ...

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with each incoming stream of a protocol. Raises LinkLost."""
        ...

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of the connections to a peer; empty if there are none."""
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
        await self._ask(
            "connect",
            seconds,
            peer=base58.b58decode(peer_id),
            addrs=[encode(entry.dial) for entry in entries],
            timeout=max(1, round(seconds)),
        )

    async def disconnect(self, peer_id: str, seconds: float = 5.0) -> None:
        """Close all connections to a peer."""
        await self._ask("disconnect", seconds, peer=base58.b58decode(peer_id))

    async def identify(self, seconds: float = 5.0) -> tuple[str, tuple[str, ...]]:
        """The peer id of this p2pd, and the addresses at which it believes to be dialable."""
        answer = (await self._ask("identify", seconds)).identify
        addresses = filter(None, map(decode, answer.addrs))
        return base58.b58encode(answer.id).decode(), tuple(addresses)

    async def connections(self, seconds: float = 5.0) -> list[Connection]:
        """All connections; a peer may have several."""
        return [
            Connection(base58.b58encode(peer.id).decode(), decode(address) or "")
            for peer in (await self._ask("list_peers", seconds)).peers
            for address in peer.addrs
        ]

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream. p2pd answers before the other end does: only bytes from the stream prove
        that it is served."""
        peer, timeout = base58.b58decode(peer_id), max(1, round(seconds))
        request = _request("stream_open", peer=peer, proto=[protocol], timeout=timeout)
        stream, answer = await self._exchange(request, seconds)
        return OpenStream(peer_id, decode(answer.streamInfo.addr) or "", stream)

    async def handle_streams(self, protocol: str, address: bytes, seconds: float = 5.0) -> None:
        """Have p2pd dial ``address`` (bytes of a multiaddress) for each incoming stream of a
        protocol."""
        await self._ask("stream_handler", seconds, addr=address, proto=[protocol], balanced=False)

    async def _ask(self, kind: str, seconds: float, **arguments: Any) -> Any:
        connection, answer = await self._exchange(_request(kind, **arguments), seconds)
        connection.close()
        return answer

    async def _exchange(self, request: Any, seconds: float) -> tuple[socket.socket, Any]:
        """The answer to a request, and the connection over which it came."""
        loop, connection = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
        try:
            async with in_time(seconds + SLACK):
                connection.setblocking(False)
                await loop.sock_connect(connection, str(self._path))
                await loop.sock_sendall(connection, framed(request.SerializeToString()))
                answer = _messages().Response.FromString(await read_message(connection))
            if answer.type == _messages().Response.ERROR:
                raise LinkLost(_shorten(answer.error.msg))
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise LinkLost(f"p2pd can't be asked: {reason}") from None
            if isinstance(error, DecodeError):
                raise LinkLost("p2pd sent bytes that are no message") from None
            raise
        return connection, answer


def _request(kind: str, **arguments: Any) -> Any:
    """A request of p2pd; the field of its arguments is called as its type is, in camel case."""
    first, *others = kind.split("_")
    name = first + "".join(map(str.capitalize, others))
    given = {name: arguments} if arguments else {}
    return _messages().Request(type=kind.upper(), **given)


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


async def send_message(sink: socket.socket, data: bytes) -> None:
    """Send a message, prefixed with its length. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(sink, framed(data))
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None


async def read_message(source: socket.socket, limit: int = MAX_ANSWER) -> bytes:
    """Read one length-prefixed message, and not a byte more: a stream may follow. Raises
    LinkLost."""
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
    """Read ``size`` bytes. Raises LinkLost, also at the end of the stream."""
    loop, data = asyncio.get_running_loop(), bytearray()
    try:
        while len(data) < size:
            if not (part := await loop.sock_recv(source, size - len(data))):
                raise LinkLost("the stream ended")
            data += part
    except OSError as error:
        raise LinkLost(f"the stream broke off ({error.strerror or error})") from None
    return bytes(data)


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
    """p2pd's messages, whose first import takes a moment: see ``hivemind_client.load_hivemind``."""
    from lowcomm_node.net.hivemind_parts import p2pd_pb2

    return p2pd_pb2


HEADER_DEADLINE = 5.0
MAX_HEADER = 4096
BACKLOG = 64
MAX_GREETED = 64
"""Streams whose header is being read at once. More wait in the kernel's queue."""
_UNIX = b"\x90\x03"  # the code of "unix" in a multiaddress


class StreamListener:
    """Accepts the streams that p2pd hands over, of the protocols that we serve."""

    def __init__(self) -> None:
        self._takers: dict[str, TakeStream] = {}
        self._registered: set[str] = set()
        """Protocols that the running p2pd knows."""
        self._name = new_name()
        self._tasks = Tasks()
        self._room = asyncio.Semaphore(MAX_GREETED)
        self._socket: socket.socket | None = None
        self._closed = False
        self.dialer: int | None = None
        """Process id of the p2pd that is believed."""

    @property
    def address(self) -> bytes:
        """The multiaddress that p2pd dials."""
        path = address_of(self._name).replace("\0", "@").encode()  # as Go writes it
        return _UNIX + bytes([len(path)]) + path

    def add(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with the streams of a protocol, once p2pd knows it. Raises LinkLost
        if it is served already."""
        if protocol in self._takers:
            raise LinkLost(f"streams of {protocol} are served already")
        self._takers[protocol] = take

    async def register(self, control: Control, dialer: int | None) -> None:
        """Register with p2pd, whose process id is ``dialer``, the protocols that it does not know.
        Raises LinkLost."""
        if self._closed:
            raise LinkLost("no streams are taken any more")
        self.dialer = dialer
        self.start()
        for protocol in [name for name in self._takers if name not in self._registered]:
            await control.handle_streams(protocol, self.address)
            self._registered.add(protocol)

    def forget(self) -> None:
        """p2pd has ended, and the next one knows no protocols."""
        self._registered.clear()

    def start(self) -> None:
        """Begin to accept, unless that has begun."""
        if self._socket is not None:
            return
        self._socket = bound(self._name)
        self._socket.listen(BACKLOG)
        accept = partial(self._accept, self._socket)
        self._tasks.start(endure("streams of other peers are not accepted", accept))

    async def close(self) -> None:
        """Accept no more. Streams already handed over stay open."""
        self._closed = True
        self._takers.clear()
        await self._tasks.cancel()
        if self._socket is not None:
            self._socket.close()
            remove(self._name)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                stream, _ = await loop.sock_accept(listening)
            # Such as too many open files: either it passes, or nothing works any more.
            except OSError as error:
                self._room.release()
                log.warning("stream.not_accepted", reason=str(error))
                await asyncio.sleep(1.0)
                continue
            task = self._tasks.start(self._greet(stream))
            task.add_done_callback(lambda _: self._room.release())

    async def _greet(self, stream: socket.socket) -> None:
        taken = False
        try:
            stream.setblocking(False)
            if caller(stream) != self.dialer:
                reason = "another process of this machine dialed us"
                log.warning("stream.other_process", reason=reason, pid=caller(stream))
                return
            async with asyncio.timeout(HEADER_DEADLINE):
                data = await read_message(stream, MAX_HEADER)
            header = _messages().StreamInfo.FromString(data)
            peer_id = base58.b58encode(header.peer).decode()
            # p2pd hands over registered protocols only; without a taker we are leaving.
            if (take := self._takers.get(header.proto)) is not None:
                take(OpenStream(peer_id, decode(header.addr) or "", stream))
                taken = True
        except (LinkLost, OSError, DecodeError) as error:
            log.debug("stream.broken", reason=repr(error))
        finally:
            if not taken:
                with suppress(OSError):
                    stream.close()
