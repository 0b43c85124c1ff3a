"""The second route: the Exchange service over streams of libp2p, for peers that can't be dialed.

    caller's gRPC ── unix socket ── Way ══ stream: p2pd, punched or relayed, p2pd ══ Tunnels ── unix socket ── gRPC server

The callee's end binds a name of its own before it dials the gRPC server, and remembers whose session it carries under that
name: so the service knows the caller, for whom libp2p vouches. Each connection of gRPC is a session of its own. Streams
break off, because a relay ends them at its limits or goes away; gRPC does not notice:

    stream breaks off ──► both ends keep their socket of gRPC ──► the caller opens another stream, by whatever way there is
                          and what is unacknowledged              RESUME with session and numbers: both send on from there
                              └── not within KEEP: the session ends, and with it its calls

All names are abstract unix sockets, so a killed process leaves nothing behind; the gRPC server's own socket has no name at
all (service.py).
"""

import asyncio
import os
import secrets
import socket
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from lowcomm_node.discovery.control import read_exactly
from lowcomm_node.discovery.interface import OpenStream, Streams
from lowcomm_node.discovery.multiaddress import relay_of
from lowcomm_node.discovery.streams import caller
from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.pipe import Pipe
from lowcomm_node.exchange.tunnel_frames import (
    ANSWER,
    OPENING,
    SESSION,
    Opening,
    Signal,
    numbered,
    opening,
    read_answer,
    read_opening,
)
from lowcomm_node.exchange.tunnel_session import Session, Slabs
from lowcomm_node.logs import log
from lowcomm_protocol.errors import LowcommError

MAX_TUNNELS = 64
"""Sessions that others hold with us at once."""
MAX_TUNNELS_PER_PEER = 4
"""gRPC needs one; for a moment there are two, when a better connection has been found."""
MAX_NEW = 16
"""Streams of one peer that are taken within a second: each new session costs a connection of gRPC."""
MAX_CALLERS = 1024
"""Peers whose new streams are counted."""
MAX_FINISHED = 256
"""Sessions that are remembered for a caller that has missed the last word."""
MAX_OPENING = 8
"""Connections of gRPC to one peer at once, which get a session each."""
OPEN_DEADLINE = 14.0
"""Seconds to a stream that the other end has taken: a relay may have to be dialed first, and a dead connection noticed."""
ANSWER_DEADLINE = 4.0
"""Seconds for the answer on a connection that there was, before that is taken for dead."""
OPENING_DEADLINE = 5.0
"""Seconds for the first words of a caller, and for a caller that was refused to close its stream."""
KEEP = 30.0
"""Seconds for which a session whose stream broke off is kept; gRPC's own patience must be longer (channels, service)."""
PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each attempt to resume; the last one for all further ones."""
CLOSE_DEADLINE = 2.0
"""Seconds for a session to end as it should when its way is closed."""
IDLE = 600.0
"""Seconds without a byte after which a session is closed."""
STALL = 60.0
"""Seconds for which a stream may take nothing of what is held for it before it is given up; for gRPC, the session."""
SWEEP_EVERY = 5.0


def protocol_of(run_id: str) -> str:
    """The name of our streams in libp2p: a peer of another run does not get through."""
    return f"/lowcomm/exchange/1/{run_id[:32]}"


class Forgotten(LinkLost):
    """The other end does not know a session any more, so it can't be resumed."""


@dataclass(frozen=True)
class Statistics:
    """What became of the tunnels so far."""

    refused: int
    """Streams that were turned away because there were too many."""
    resumed: int
    """Streams that took the place of one that broke off, of ours and of others."""
    repeated: int
    """Bytes that were sent more than once because of that."""


_Key = tuple[str, bytes]
"""Peer id and name of a session: nobody can resume what another peer has begun."""


@dataclass(eq=False)
class _Inbound:
    """A session that somebody holds with us."""

    pipe: Pipe
    address: str
    """Where its last stream came from."""
    name: str
    """Of the unix socket that leads it to the gRPC server."""


class Tunnels:
    """Both ends of all tunnels of this node."""

    def __init__(self, streams: Streams, run_id: str) -> None:
        self.slabs = Slabs()
        self._streams, self._protocol = streams, protocol_of(run_id)
        self._token, self._numbers = secrets.token_hex(8), count(1)
        self._names: dict[str, str] = {}
        self._sessions: dict[_Key, _Inbound] = {}
        self._finished: OrderedDict[_Key, int] = OrderedDict()
        self._greeted: Counter[str] = Counter()
        self._taken: OrderedDict[str, deque[float]] = OrderedDict()
        self._pipes: set[Pipe] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways: set[Way] = set()
        self._server: str | None = None
        self._closed = False
        self._refused = self._resumed = self._repeated = 0

    def statistics(self) -> Statistics:
        """What became of the tunnels so far."""
        resumed = sum(pipe.resumed for pipe in self._pipes)
        repeated = sum(pipe.repeated for pipe in self._pipes)
        return Statistics(self._refused, self._resumed + resumed, self._repeated + repeated)

    # the callee's end

    async def serve(self, server: str) -> None:
        """Lead sessions that others begin to the gRPC server's unix socket ``server``. Raises LinkLost."""
        self._server = server
        self._start(self._sweep())
        await self._streams.serve_streams(self._protocol, self._take)

    def peer_of(self, name: str) -> str | None:
        """Whose session is carried under the name of a unix socket that has dialed the gRPC server; None: not one of ours."""
        return self._names.get(name)

    def caller_at(self, peer_id: str) -> str | None:
        """The address of the last stream that a peer has opened to us; None if it holds no session."""
        return next((held.address for held in reversed(self._held_by(peer_id).values()) if held.pipe.carried), None)

    def _held_by(self, peer_id: str) -> dict[_Key, _Inbound]:
        return {key: inbound for key, inbound in self._sessions.items() if key[0] == peer_id}

    def _take(self, stream: OpenStream) -> None:
        peer = stream.peer_id
        is_full = self._greeted[peer] >= MAX_TUNNELS_PER_PEER or self._greeted.total() >= MAX_TUNNELS
        if is_full or self._closed or self._is_flood(peer):
            self._refuse_at_once(stream)
            return
        self._greeted[peer] += 1
        self._start(self._greet(stream))

    def _is_flood(self, peer: str) -> bool:
        """Whether this is one stream too many of a peer within a second; counts it if not."""
        now = asyncio.get_running_loop().time()
        taken = self._taken.setdefault(peer, deque(maxlen=MAX_NEW))
        self._taken.move_to_end(peer)
        if len(self._taken) > MAX_CALLERS:
            self._taken.popitem(last=False)
        if len(taken) == MAX_NEW and now - taken[0] < 1.0:
            return True
        taken.append(now)
        return False

    def _refuse_at_once(self, stream: OpenStream) -> None:
        self._refused += 1
        with suppress(OSError):
            stream.socket.send(numbered(Signal.BUSY, 0))
        stream.socket.close()

    async def _greet(self, stream: OpenStream) -> None:
        """Hear what a stream is for."""
        peer = stream.peer_id
        try:
            async with asyncio.timeout(OPENING_DEADLINE):
                asked = read_opening(await read_exactly(stream.socket, OPENING))
            if asked.number is None and self._has_room(peer, asked.session):
                self._begin(stream, asked.session)
            elif (
                (inbound := self._sessions.get((peer, asked.session)))
                and inbound.pipe.began
                and asked.number is not None
            ):
                if inbound.pipe.accept(stream.socket, asked.number):
                    inbound.address = stream.address
            else:
                await self._refuse(stream, asked)
        except (LowcommError, OSError, TimeoutError) as error:
            log.debug("tunnel.not_taken", peer=peer, reason=str(error) or "said nothing in time")
            stream.socket.close()
        except BaseException:
            stream.socket.close()
            raise
        finally:
            self._greeted[peer] -= 1
            if not self._greeted[peer]:
                del self._greeted[peer]

    def _has_room(self, peer: str, session_id: bytes) -> bool:
        """Whether a peer may begin a session; one of its own that is of no use any more makes room for it."""
        held = self._held_by(peer)
        if (again := (peer, session_id)) in held:
            self._sessions.pop(again).pipe.fail(LinkLost("was begun anew"))
        elif len(held) >= MAX_TUNNELS_PER_PEER:
            lost = next((key for key, inbound in held.items() if inbound.pipe.cut), None)
            if lost is None:
                return False
            self._sessions.pop(lost).pipe.fail(LinkLost("gave way to a new tunnel of the same peer"))
        return len(self._sessions) < MAX_TUNNELS

    async def _refuse(self, stream: OpenStream, asked: Opening) -> None:
        """Tell a caller why its stream is of no use."""
        if asked.number is None:
            self._refused += 1
            answer = numbered(Signal.BUSY, 0)
        elif (number := self._finished.get((stream.peer_id, asked.session))) is not None:
            answer = numbered(Signal.READY, number)  # it has missed our last word only
        else:
            answer = numbered(Signal.GONE, 0)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(OPENING_DEADLINE):
            await loop.sock_sendall(stream.socket, answer)
            # Over QUIC the answer would be lost if we closed first.
            while await loop.sock_recv(stream.socket, 4096):
                pass
        stream.socket.close()

    def _begin(self, stream: OpenStream, session_id: bytes) -> None:
        name = f"lowcomm.{self._token}.in.{stream.peer_id}.{next(self._numbers)}"
        pipe = Pipe(socket.socket(socket.AF_UNIX), Session(self.slabs), calls=False)
        inbound = self._sessions[stream.peer_id, session_id] = _Inbound(pipe, stream.address, name)
        self._start(self._serve(stream, session_id, inbound))

    async def _serve(self, stream: OpenStream, session_id: bytes, inbound: _Inbound) -> None:
        peer, key, pipe = stream.peer_id, (stream.peer_id, session_id), inbound.pipe
        self._names[inbound.name] = peer
        try:
            with self.minding(pipe):
                async with asyncio.timeout(OPEN_DEADLINE):
                    await pipe.dial(f"\0{inbound.name}", self._server or "")
                pipe.accept(stream.socket, 0)
                while await pipe.wait_cut():
                    log.debug("tunnel.cut", peer=peer, end="callee", reason=pipe.cut)
                    await self._wait_resumed(pipe)
            self._finish(key, pipe)
        except (LowcommError, OSError, TimeoutError) as error:
            log.debug("tunnel.lost", peer=peer, end="callee", reason=str(error))
        finally:
            self._names.pop(inbound.name, None)
            if self._sessions.get(key) is inbound:
                del self._sessions[key]
            stream.socket.close()

    async def _wait_resumed(self, pipe: Pipe) -> None:
        reason = pipe.cut
        try:
            async with asyncio.timeout(KEEP):
                await pipe.wait_carried()
        except TimeoutError:
            raise LinkLost(f"{reason}, and was not resumed within {KEEP:.0f} s") from None

    def _finish(self, key: tuple[str, bytes], pipe: Pipe) -> None:
        self._finished[key] = pipe.received
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    # the caller's end

    def way(self, peer_id: str) -> "Way":
        """A new way to a peer; its ``target`` is what gRPC dials."""
        way = Way(self, peer_id, f"lowcomm.{self._token}.out.{next(self._numbers)}")
        self._ways.add(way)
        return way

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of libp2p's connections to a peer."""
        return await self._streams.connected_at(peer_id)

    async def open(
        self, peer_id: str, entry_points: Sequence[str], session_id: bytes, received: int | None = None
    ) -> tuple[OpenStream, int]:
        """A stream that the other end has taken, and how many numbers that has received before.

        ``received``: what we have, if the session is not a new one. Raises LinkLost; Forgotten if it can't be resumed.
        """
        words = opening(session_id, received)
        await self._streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        try:
            async with asyncio.timeout(ANSWER_DEADLINE):
                return await self._open(peer_id, words)
        except TimeoutError:
            if self._depends_on(peer_id):
                raise LinkLost("did not answer in time") from None
        # The connection may be dead, which libp2p takes half a minute to notice; nothing of ours depends on it.
        await self._streams.disconnect(peer_id)
        await self._streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        return await self._open(peer_id, words)

    def _depends_on(self, peer_id: str) -> bool:
        """Whether there are streams to or from a peer."""
        held = self._held_by(peer_id).values()
        return any(inbound.pipe.carried for inbound in held) or any(way.carries(peer_id) for way in self._ways)

    async def _open(self, peer_id: str, words: bytes) -> tuple[OpenStream, int]:
        stream = await self._streams.open_stream(peer_id, self._protocol, OPEN_DEADLINE)
        try:
            signal, number = await _ask(stream.socket, words)
        except BaseException:
            stream.socket.close()
            raise
        if signal is Signal.READY:
            return stream, number
        stream.socket.close()
        if signal is Signal.BUSY:
            raise LinkLost("has no room for another tunnel")
        raise Forgotten("does not know the session any more")

    # both

    @contextmanager
    def minding(self, pipe: Pipe) -> Iterator[None]:
        """Look after a pipe while it lives, and close it then."""
        self._pipes.add(pipe)
        try:
            yield
        finally:
            pipe.close()
            self._pipes.discard(pipe)
            self._resumed += pipe.resumed
            self._repeated += pipe.repeated

    def forget(self, way: "Way") -> None:
        """A way was closed."""
        self._ways.discard(way)

    async def close(self) -> None:
        """End all tunnels, and take no more."""
        self._closed = True
        await asyncio.gather(*(way.close() for way in list(self._ways)))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        log_defect(task)

    async def _sweep(self) -> None:
        """End what is of no use any more."""
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """Look after sessions in which nothing moves; ``now``: the event loop's time."""
        for pipe in list(self._pipes):
            local, stream = pipe.blocked(now)
            if pipe.idle(now) > IDLE or local > STALL:
                pipe.fail(LinkLost("was closed, for nothing moved in it"))
            elif stream > STALL:
                pipe.cut_off(f"took nothing for {STALL:.0f} s")
            elif pipe.idle(now) > SWEEP_EVERY:
                pipe.acknowledge()


class Way:
    """The caller's end to one peer: a unix socket for gRPC, and a session for each of its connections."""

    def __init__(self, tunnels: Tunnels, peer_id: str, name: str) -> None:
        self._tunnels, self._peer_id = tunnels, peer_id
        self.target = f"unix-abstract:{name}"
        self.entry_points: tuple[str, ...] = ()
        """Where the peer can be dialed, as its newest record tells."""
        self.address = ""
        """Multiaddress of the connection that carries, or last carried, a stream."""
        self.reason = ""
        """Why the last session could not be begun, or was lost."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{name}")
        self._socket.listen(MAX_OPENING)
        self._socket.setblocking(False)
        self._pipes: dict[asyncio.Task[None], Pipe] = {}
        self._accepting = asyncio.create_task(self._accept())

    def carries(self, peer_id: str) -> bool:
        """Whether it has a stream to a peer."""
        return peer_id == self._peer_id and any(pipe.carried for pipe in self._pipes.values())

    @property
    def cut(self) -> str:
        """Why no session has a stream though one had, while that is being resumed; empty if that is not so."""
        pipes = self._pipes.values()
        return "" if any(pipe.carried for pipe in pipes) else next((pipe.cut for pipe in pipes if pipe.cut), "")

    @property
    def relay(self) -> str | None:
        """The peer id of the relay that the last stream went through; None if it went through none."""
        return relay_of(self.address)

    async def wait_carried(self) -> None:
        """Wait until a session that was cut off has a stream again, or is lost. No deadline but KEEP."""
        for pipe in list(self._pipes.values()):
            with suppress(LowcommError, OSError):
                await pipe.wait_carried()

    async def close(self) -> None:
        """End its sessions."""
        self._tunnels.forget(self)
        self._accepting.cancel()
        tasks = [self._accepting, *self._pipes]
        ending = {task: pipe for task, pipe in self._pipes.items() if pipe.carried}
        for pipe in ending.values():
            pipe.hang_up()
        try:
            if ending:  # or the other end would keep them to be resumed
                await asyncio.wait(ending, timeout=CLOSE_DEADLINE)
        finally:
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
            if caller(local) != os.getpid() or len(self._pipes) >= MAX_OPENING:
                local.close()
                continue
            pipe = Pipe(local, Session(self._tunnels.slabs), calls=True)
            task = asyncio.create_task(self._carry(pipe))
            self._pipes[task] = pipe
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._pipes[task]
        log_defect(task)

    async def _carry(self, pipe: Pipe) -> None:
        """Carry a session to its end, over as many streams as it takes."""
        session_id = secrets.token_bytes(SESSION)
        try:
            with self._tunnels.minding(pipe):
                async with asyncio.timeout(OPEN_DEADLINE):
                    stream, number = await self._tunnels.open(self._peer_id, self.entry_points, session_id)
                self._attach(pipe, stream, number)
                while await pipe.wait_cut():
                    log.debug("tunnel.cut", peer=self._peer_id, end="caller", reason=pipe.cut)
                    await self._resume(pipe, session_id)
        except TimeoutError:
            self.reason = "did not answer in time"
        except (LowcommError, OSError) as error:
            self.reason = str(error)
            log.debug("tunnel.lost", peer=self._peer_id, end="caller", reason=self.reason)

    def _attach(self, pipe: Pipe, stream: OpenStream, number: int) -> None:
        self.address, self.reason = stream.address, ""
        pipe.attach(stream.socket, number)

    async def _resume(self, pipe: Pipe, session_id: bytes) -> None:
        """Lead a session that was cut off over another stream. Raises LinkLost."""
        why = pipe.cut
        last = "did not answer in time"
        try:
            async with asyncio.timeout(KEEP):
                for attempt in count():
                    await asyncio.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
                    try:
                        stream, number = await self._tunnels.open(
                            self._peer_id, self.entry_points, session_id, pipe.received
                        )
                    except Forgotten as error:
                        raise LinkLost(f"{why}, and can't be resumed: {error}") from None
                    except (LowcommError, OSError) as error:
                        last = str(error)
                        continue
                    self._attach(pipe, stream, number)
                    log.debug("tunnel.resumed", peer=self._peer_id, attempts=attempt + 1, address=self.address)
                    return
        except TimeoutError:
            raise LinkLost(f"{why}, and could not be resumed within {KEEP:.0f} s: {last}") from None


def log_defect(task: asyncio.Task[None]) -> None:
    """Tell of a task that has ended as none should."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("tunnel.defect", error=repr(error), exc_info=error)


async def _ask(stream: socket.socket, words: bytes) -> tuple[Signal, int]:
    """What the other end of a new stream answers to our first words. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, words)
        return read_answer(await read_exactly(stream, ANSWER))
    except OSError as error:
        raise LinkLost(f"does not take the stream: {error.strerror}") from None
    except LinkLost:
        raise LinkLost("does not take the stream") from None
