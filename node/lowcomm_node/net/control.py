"""p2pd's control socket, where hivemind's client does not suffice: streams as sockets, and
deadlines.

each request has a connection of its own   varint length, Request ──►   ◄── varint length, Response
STREAM_OPEN                                after the response that connection is the stream
"""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import base58

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.interface import OpenStream
from lowcomm_node.net.multiaddress import EntryPoint, decode
from lowcomm_node.net.varint import write_varint

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
    await asyncio.get_running_loop().sock_sendall(connection, write_varint(len(data)) + data)
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
