"""Incoming streams: p2pd dials us for each, and names the peer at the other end.

We listen on an abstract unix socket, which a killed process does not leave behind. The kernel tells
who dials it: only our own p2pd is believed, for it vouches for the identity of the peer.
"""

import asyncio
import secrets
import socket
import struct
from contextlib import suppress

import base58

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import Control, read_message
from lowcomm_node.net.interface import OpenStream, TakeStream
from lowcomm_node.net.multiaddress import decode
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import endure, log_defect

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
