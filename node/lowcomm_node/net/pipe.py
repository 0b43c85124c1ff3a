"""gRPC through libp2p, for peers that can't be dialed: a plain pipe at each end of a stream.

    gRPC ── unix socket ── Pipe ══ p2pd, punched or relayed, p2pd ══ Pipe ── unix socket ── server

    caller   opens a stream, waits for the server's first byte, and has gRPC dial a socket of ours
    callee   binds a name of its own, dials the gRPC server, and remembers whose stream it carries
             under that name: so the server knows the caller, whom libp2p has authenticated

A stream that breaks off ends its calls. An exchange is tried again, and a transfer resumes by
piece.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import place_in, relay_of
from lowcomm_node.net.control import OpenStream, Streams
from lowcomm_node.net.local import address_of, bound, caller, new_name, remove, target_of
from lowcomm_node.net.pump import pump
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Shares
from lowcomm_node.system.tasks import Tasks, in_time, start

OPEN_DEADLINE = 14.0
"""Seconds to open a stream that the other end takes: a relay may have to be dialed first, and a
dead connection noticed."""
ANSWER_DEADLINE = 4.0
"""Seconds for the first byte of the server before libp2p's connection counts as dead."""
LINGER = 1.0
"""Seconds before a stream is closed whose gRPC has ended: over QUIC p2pd loses what was written
right before."""
MAX_INCOMING = 64
"""Streams of others at once."""
MAX_OF_PEER = 4
"""Streams of one peer. gRPC needs one; there are two while a better connection replaces it."""
UNACCEPTED = 20.0
"""Seconds for the first accepted call over a stream: libp2p lets anybody open one. Our own gRPC
has as long to dial one that we have opened."""


def protocol_of(run_id: str) -> str:
    """The name of our streams in libp2p, by run: peers of other runs don't get through."""
    return f"/lowcomm/exchange/2/{run_id[:32]}"


async def carry(local: socket.socket, stream: socket.socket) -> None:
    """Move bytes between gRPC's socket and a stream until one of them ends, and end both."""
    local.setblocking(False)
    try:
        await pump(local, stream)
    finally:
        local.close()
        asyncio.get_running_loop().call_later(LINGER, stream.close)


class Outgoing:
    """A stream to a peer, for one gRPC connection."""

    def __init__(self, stream: OpenStream, name: str) -> None:
        """``name``: of the unix socket."""
        self.peer_id = stream.peer_id
        self.address = stream.address
        """Multiaddress of the other end."""
        self.target = target_of(name)
        """What gRPC dials."""
        self._stream = stream.socket
        self._name, self._listener = name, bound(name)
        self._listener.listen(1)
        self._carrying = start(self._carry())

    @property
    def is_open(self) -> bool:
        """Whether it still carries bytes, or may."""
        return not self._carrying.done()

    async def close(self) -> None:
        """End the connection."""
        self._carrying.cancel()
        await asyncio.gather(self._carrying, return_exceptions=True)
        self._listener.close()
        self._stream.close()

    async def _carry(self) -> None:
        try:
            async with asyncio.timeout(UNACCEPTED):
                local = await self._accept()
        except TimeoutError:
            log.debug("tunnel.ended", peer=self.peer_id, reason="gRPC did not dial it in time")
            self._stream.close()
            return
        finally:
            remove(self._name)
        await carry(local, self._stream)

    async def _accept(self) -> socket.socket:
        """The connection of our own gRPC: any process of this machine can dial the name."""
        loop = asyncio.get_running_loop()
        with self._listener:
            while True:
                local, _ = await loop.sock_accept(self._listener)
                if caller(local) == os.getpid():
                    return local
                local.close()


@dataclass(eq=False)
class IncomingStream:
    """A stream that another peer has opened to us."""

    peer_id: str
    address: str
    """Multiaddress of the other end."""
    deadline: asyncio.Timeout | None = None
    """For its first accepted call."""

    @property
    def place(self) -> str:
        """The key of quotas: its IP address, or the relay, behind which no address is visible."""
        return place_in(self.address)

    def accept(self) -> None:
        """Let it stay: a call through it came from an admitted peer."""
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(None)


class Pipes:
    """All streams of this node for gRPC, in both directions."""

    def __init__(self, streams: Streams, run_id: str) -> None:
        self.streams = streams
        self._protocol = protocol_of(run_id)
        self._outgoing: set[Outgoing] = set()
        self.incoming: dict[str, IncomingStream] = {}
        """By the name of the unix socket that connects it to the server."""
        self._shares = Shares()
        self._tasks = Tasks()
        self._server: Callable[[], str] = str
        self._closed = False
        self.refused = 0
        """Streams refused because there were too many."""

    async def serve(self, server: Callable[[], str]) -> None:
        """Carry the streams of others to the gRPC server, from now on; ``server``: the name of its
        unix socket, which may change. Raises LinkLost."""
        self._server = server
        await self.streams.serve_streams(self._protocol, self._take)

    async def dial(self, peer_id: str, entry_points: Sequence[str]) -> Outgoing:
        """A stream that a peer has taken. Raises LinkLost with the reason if there is none."""
        self._outgoing = {outgoing for outgoing in self._outgoing if outgoing.is_open}
        outgoing = Outgoing(await self._open(peer_id, entry_points), new_name("out"))
        self._outgoing.add(outgoing)
        return outgoing

    def called_from(self, peer_id: str) -> str:
        """The address of the newest stream that a peer has opened to us; empty if there is none."""
        return next((one.address for one in reversed(self._of(peer_id))), "")

    def statistics(self) -> dict[str, int]:
        """What ``status`` shows."""
        return {"open": len(self.incoming), "refused": self.refused}

    async def close(self) -> None:
        """End all streams, and take no more."""
        self._closed = True
        ending = (outgoing.close() for outgoing in self._outgoing)
        await asyncio.gather(self._tasks.cancel(), *ending, return_exceptions=True)

    def _of(self, peer_id: str) -> list[IncomingStream]:
        return [one for one in self.incoming.values() if one.peer_id == peer_id]

    async def _open(self, peer_id: str, entry_points: Sequence[str]) -> OpenStream:
        async with in_time(OPEN_DEADLINE):
            try:
                return await self._connect(peer_id, entry_points)
            except TimeoutError:
                ours = [it for it in self._outgoing if it.is_open and it.peer_id == peer_id]
                if ours or self._of(peer_id):
                    raise
            # The connection may be dead, which libp2p takes half a minute to notice. No stream of
            # ours uses it.
            await self.streams.disconnect(peer_id)
            return await self._connect(peer_id, entry_points)

    async def _connect(self, peer_id: str, entry_points: Sequence[str]) -> OpenStream:
        await self.streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        async with asyncio.timeout(ANSWER_DEADLINE):
            stream = await self.streams.open_stream(peer_id, self._protocol, OPEN_DEADLINE)
            try:
                if not await _is_taken(stream.socket):
                    raise LinkLost("does not take the stream: it has no room, or left the run")
            except BaseException:
                stream.socket.close()
                raise
            return stream

    # streams of others

    def _take(self, stream: OpenStream) -> None:
        incoming = IncomingStream(stream.peer_id, stream.address)
        # libp2p lets anybody open streams, so they are bounded before a task begins.
        free = MAX_INCOMING - len(self.incoming)
        is_full = free <= 0 or not self._shares.has_room(incoming.place, free)
        if self._closed or is_full or len(self._of(stream.peer_id)) >= MAX_OF_PEER:
            self.refused += 1
            stream.socket.close()
            return
        name = new_name("in")
        self.incoming[name] = incoming
        self._shares.take(incoming.place)
        self._tasks.start(self._serve(name, incoming, stream.socket))

    async def _serve(self, name: str, incoming: IncomingStream, stream: socket.socket) -> None:
        try:
            async with asyncio.timeout(UNACCEPTED) as incoming.deadline:
                local = bound(name)
                try:
                    address = address_of(self._server())
                    await asyncio.get_running_loop().sock_connect(local, address)
                except BaseException:
                    local.close()
                    stream.close()
                    raise
                await carry(local, stream)
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no call was accepted"
            log.debug("tunnel.ended", peer=incoming.peer_id, reason=reason)
        finally:
            self._shares.give_back(incoming.place)
            del self.incoming[name]
            remove(name)


async def _is_taken(stream: socket.socket) -> bool:
    """Wait for the first byte of a stream, without reading it; False at its end. A server of HTTP/2
    speaks first."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(stream, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(stream)
    with suppress(OSError):
        return bool(stream.recv(1, socket.MSG_PEEK))
    return False


def name_tunnel(address: str) -> str:
    """The name of a route through libp2p, as ``peers`` prints it, by its multiaddress."""
    relay = relay_of(address)
    return f"relay {relay[-6:]}" if relay else "punched" if address else "tunnel"
