"""The second route: the Exchange service over streams of libp2p, for peers that can't be dialed.

    caller's gRPC ── unix socket ── Way ══ stream: p2pd, punched or relayed, p2pd ══ Tunnels ── unix socket ── gRPC server

The callee's end binds a name of its own before it dials the gRPC server, and remembers whose stream it carries under that
name: so the service knows the caller, for whom libp2p vouches. A stream that ends takes its connection of gRPC with it;
gRPC opens another one with its next call, and that gets a fresh stream.

All names are abstract unix sockets, so a killed process leaves nothing behind; the gRPC server's own socket has no name at
all (service.py).
"""

import asyncio
import os
import secrets
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from lowcomm_node.discovery.interface import OpenStream, Streams
from lowcomm_node.discovery.multiaddress import relay_of
from lowcomm_node.discovery.streams import caller
from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.pipe import Pipe
from lowcomm_node.exchange.tunnel_frames import WORD, Signal, word
from lowcomm_node.logs import log
from lowcomm_protocol.errors import LowcommError

MAX_TUNNELS = 64
"""Tunnels that others hold to us at once."""
MAX_TUNNELS_PER_PEER = 4
"""gRPC needs one; for a moment there are two, when a better connection has been found."""
MAX_NEW = 32
"""Streams of others that are taken within a second: each costs a connection of gRPC."""
MAX_OPENING = 8
"""Connections of gRPC to one peer at once, which get a stream each."""
OPEN_DEADLINE = 14.0
"""Seconds to a stream that the other end has taken: a relay may have to be dialed first, and a dead connection noticed."""
ANSWER_DEADLINE = 4.0
"""Seconds for the answer on a connection that there was, before that is taken for dead."""
IDLE = 600.0
"""Seconds without a byte after which a tunnel is closed."""
STALL = 60.0
"""Seconds for which one end may take nothing of what is held for it."""
SWEEP_EVERY = 5.0

Moved = Callable[[str, int, int], None]
"""Hears of bytes that a tunnel has carried: peer, sent, received."""


def protocol_of(run_id: str) -> str:
    """The name of our streams in libp2p: a peer of another run does not get through."""
    return f"/lowcomm/exchange/1/{run_id[:32]}"


class Tunnels:
    """Both ends of all tunnels of this node."""

    def __init__(self, streams: Streams, run_id: str, moved: Moved = lambda peer, sent, received: None) -> None:
        self._streams, self._protocol, self._moved = streams, protocol_of(run_id), moved
        self._token, self._numbers = secrets.token_hex(8), count(1)
        self._names: dict[str, str] = {}
        self._held: Counter[str] = Counter()
        self._inbound: dict[str, str] = {}
        self._pipes: dict[Pipe, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways: set[Way] = set()
        self._server: str | None = None
        self._taken: deque[float] = deque(maxlen=MAX_NEW)
        self._closed = False
        self.refused = 0
        """Streams that were turned away because there were too many."""

    # the callee's end

    async def serve(self, server: str) -> None:
        """Lead streams that come in to the gRPC server's unix socket ``server``. Raises LinkLost."""
        self._server = server
        self._start(self._sweep())
        await self._streams.serve_streams(self._protocol, self._take)

    def peer_of(self, name: str) -> str | None:
        """Whose stream is carried under the name of a unix socket that has dialed the gRPC server; None: not one of ours."""
        return self._names.get(name)

    def caller_at(self, peer_id: str) -> str | None:
        """The address of the last stream that a peer has opened to us; None if it holds none."""
        return self._inbound.get(peer_id) if self._held[peer_id] else None

    def _take(self, stream: OpenStream) -> None:
        peer, now = stream.peer_id, asyncio.get_running_loop().time()
        is_full = self._held[peer] >= MAX_TUNNELS_PER_PEER or self._held.total() >= MAX_TUNNELS
        is_flood = len(self._taken) == MAX_NEW and now - self._taken[0] < 1.0
        if is_full or is_flood or self._closed:
            self.refused += 1
            with suppress(OSError):
                stream.socket.send(word(Signal.BUSY))
            stream.socket.close()
            return
        self._taken.append(now)
        self._held[peer] += 1
        self._inbound[peer] = stream.address
        self._start(self._serve(stream))

    async def _serve(self, stream: OpenStream) -> None:
        peer, name = stream.peer_id, f"lowcomm.{self._token}.in.{stream.peer_id}.{next(self._numbers)}"
        local = socket.socket(socket.AF_UNIX)
        try:
            local.setblocking(False)
            local.bind(f"\0{name}")
            self._names[name] = peer
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(OPEN_DEADLINE):
                await loop.sock_connect(local, self._server or "")
                await loop.sock_sendall(stream.socket, word(Signal.READY))
            await self._carry(peer, local, stream.socket)
        except (LowcommError, OSError) as error:
            log.debug("tunnel.lost", peer=peer, end="callee", reason=str(error))
        finally:
            self._names.pop(name, None)
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
                self._inbound.pop(peer, None)
            local.close()
            stream.socket.close()

    # the caller's end

    def way(self, peer_id: str) -> "Way":
        """A new way to a peer; its ``target`` is what gRPC dials."""
        way = Way(self, peer_id, f"lowcomm.{self._token}.out.{next(self._numbers)}")
        self._ways.add(way)
        return way

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of libp2p's connections to a peer."""
        return await self._streams.connected_at(peer_id)

    async def open(self, peer_id: str, entry_points: Sequence[str]) -> OpenStream:
        """A stream that the other end has taken. Raises LinkLost."""
        await self._streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        try:
            async with asyncio.timeout(ANSWER_DEADLINE):
                return await self._open(peer_id)
        except TimeoutError:
            if peer_id in self._held or any(way.carries(peer_id) for way in self._ways):
                raise LinkLost("did not answer in time") from None
        # The connection may be dead, which libp2p takes half a minute to notice; nothing of ours depends on it.
        await self._streams.disconnect(peer_id)
        await self._streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        return await self._open(peer_id)

    async def _open(self, peer_id: str) -> OpenStream:
        stream = await self._streams.open_stream(peer_id, self._protocol, OPEN_DEADLINE)
        try:
            answer = await _read_word(stream.socket)
        except OSError:
            answer = b""
        except BaseException:
            stream.socket.close()
            raise
        if answer != word(Signal.READY):
            stream.socket.close()
            raise LinkLost(
                "has no room for another tunnel" if answer == word(Signal.BUSY) else "does not take the stream"
            )
        return stream

    # both

    def forget(self, way: "Way") -> None:
        """A way was closed."""
        self._ways.discard(way)

    async def carry_for(self, peer_id: str, local: socket.socket, stream: OpenStream) -> None:
        """Carry bytes for a way, to the end. Raises LinkLost, ProtocolViolation, OSError."""
        await self._carry(peer_id, local, stream.socket)

    async def close(self) -> None:
        """End all tunnels, and take no more."""
        self._closed = True
        for way in list(self._ways):
            await way.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, peer_id: str, local: socket.socket, stream: socket.socket) -> None:
        pipe = Pipe(local, stream, lambda sent, received: self._moved(peer_id, sent, received))
        running = self._pipes[pipe] = asyncio.create_task(pipe.run())
        try:
            await asyncio.wait({running})
            if running.cancelled():
                raise LinkLost("was closed, for nothing moved in it")
            running.result()
        finally:
            del self._pipes[pipe]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _sweep(self) -> None:
        """End tunnels that are of no use any more."""
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """End tunnels in which nothing has moved for too long; ``now``: the event loop's time."""
        for pipe, task in list(self._pipes.items()):
            if pipe.idle(now) > IDLE or pipe.blocked(now) > STALL:
                task.cancel()


class Way:
    """The caller's end to one peer: a unix socket for gRPC, and a stream for each of its connections."""

    def __init__(self, tunnels: Tunnels, peer_id: str, name: str) -> None:
        self._tunnels, self._peer_id = tunnels, peer_id
        self.target = f"unix-abstract:{name}"
        self.entry_points: tuple[str, ...] = ()
        """Where the peer can be dialed, as its newest record tells."""
        self.address = ""
        """Multiaddress of the connection that carries, or last carried, a stream."""
        self.reason = ""
        """Why the last stream could not be opened."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{name}")
        self._socket.listen(MAX_OPENING)
        self._socket.setblocking(False)
        self._carrying: set[asyncio.Task[None]] = set()
        self._streams = 0
        self._accepting = asyncio.create_task(self._accept())

    def carries(self, peer_id: str) -> bool:
        """Whether it has a stream to a peer."""
        return peer_id == self._peer_id and bool(self._streams)

    @property
    def relay(self) -> str | None:
        """The peer id of the relay that the last stream went through; None if it went through none."""
        return relay_of(self.address)

    async def close(self) -> None:
        """End its streams."""
        self._tunnels.forget(self)
        self._accepting.cancel()
        tasks = [self._accepting, *self._carrying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                local, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("tunnel.not_accepted", reason=str(error))
                await asyncio.sleep(1.0)
                continue
            local.setblocking(False)
            # Any process of this machine can dial the name; ours alone is gRPC.
            if caller(local) != os.getpid() or len(self._carrying) >= MAX_OPENING:
                local.close()
                continue
            task = asyncio.create_task(self._carry(local))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, local: socket.socket) -> None:
        stream: OpenStream | None = None
        try:
            async with asyncio.timeout(OPEN_DEADLINE):
                stream = await self._tunnels.open(self._peer_id, self.entry_points)
            self.address, self.reason = stream.address, ""
            self._streams += 1
            try:
                await self._tunnels.carry_for(self._peer_id, local, stream)
            finally:
                self._streams -= 1
        except TimeoutError:
            self.reason = "did not answer in time"
        except (LowcommError, OSError) as error:
            self.reason = str(error)
            log.debug("tunnel.lost", peer=self._peer_id, end="caller", reason=self.reason)
        finally:
            local.close()
            if stream is not None:
                stream.socket.close()


async def _read_word(source: socket.socket) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < WORD and (part := await loop.sock_recv(source, WORD - len(data))):
        data += part
    return data
