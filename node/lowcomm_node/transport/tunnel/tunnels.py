"""The second route: the Exchange service over streams of libp2p, for peers that can't be dialed.

    caller's gRPC ── unix socket ── Way ══ stream: p2pd, punched or relayed, p2pd ══ Tunnels ── unix socket ── gRPC server

The callee's end binds a name of its own before it dials the gRPC server, and remembers whose
session it carries under that name: so the service knows the caller, for whom libp2p vouches. Each
connection of gRPC is a session of its own. Streams break off, because a relay ends them at its
limits or goes away; gRPC does not notice:

    stream breaks off ──► both ends keep their socket of gRPC ──► the caller opens another stream, by whatever way there is
                          and what is unacknowledged              RESUME with session and numbers: both send on from there
                              └── not within KEEP: the session ends, and with it its calls

All names are abstract unix sockets, so a killed process leaves nothing behind; the gRPC server's
own socket has no name at all (transport/server.py).
"""

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.libp2p.control import read_exactly
from lowcomm_node.libp2p.interface import OpenStream, Streams
from lowcomm_node.libp2p.multiaddress import place_in
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Shares
from lowcomm_node.transport.guard.eviction import Arrivals, choose_evicted
from lowcomm_node.transport.tunnel.dialer import KEEP, Forgotten, TunnelDialer, log_defect
from lowcomm_node.transport.tunnel.frames import (
    ANSWER,
    OPENING,
    Opening,
    Signal,
    numbered,
    opening,
    read_answer,
    read_opening,
)
from lowcomm_node.transport.tunnel.pump import Pump
from lowcomm_node.transport.tunnel.session import Session, Slabs
from lowcomm_protocol.errors import LowcommError

MAX_TUNNELS = 64
"""Sessions that others hold with us at once."""
MAX_UNAUTHENTICATED = MAX_TUNNELS // 2
"""Sessions among these without an accepted call: libp2p lets anybody open one."""
MAX_TUNNELS_PER_PEER = 4
"""gRPC needs one; there are two for a moment when a better connection has been found."""
MAX_FINISHED = 256
"""Ended sessions remembered for callers that missed the last word."""
OPEN_DEADLINE = 14.0
"""Seconds to open a stream that the other end takes: a relay may have to be dialed first, and a
dead connection noticed."""
ANSWER_DEADLINE = 4.0
"""Seconds for an answer before the connection counts as dead."""
OPENING_DEADLINE = 5.0
"""Seconds for a caller's first words, and for a refused caller to close its stream."""
IDLE = 600.0
"""Seconds without a byte before a session is closed."""
STALL = 60.0
"""Seconds without progress before a stream is given up; if gRPC stalls, the session."""
UNACCEPTED = 20.0
"""Seconds for the first accepted call over a session. A session without one is of no use."""
SWEEP_EVERY = 5.0


def protocol_of(run_id: str) -> str:
    """The name of our streams in libp2p. It contains the run, so peers of other runs don't get
    through."""
    return f"/lowcomm/exchange/1/{run_id[:32]}"


@dataclass(frozen=True)
class Statistics:
    """Counters of the tunnels."""

    refused: int
    """Streams refused because there were too many."""
    resumed: int
    """Streams that replaced an interrupted one, in both directions."""
    repeated: int
    """Bytes sent again because of that."""


_Key = tuple[str, bytes]
"""Peer id and session id: a peer can't resume another peer's session."""


@dataclass(eq=False)
class _Inbound:
    """A session that somebody holds with us."""

    pump: Pump
    address: str
    """Where its last stream came from."""
    name: str
    """Of the unix socket that leads it to the gRPC server."""
    peer: str
    began: float
    """The event loop's time."""
    is_accepted: bool = False
    """Whether a call came through it of a peer that may take part in the run."""


class Tunnels:
    """Both ends of all tunnels of this node."""

    def __init__(self, streams: Streams, run_id: str) -> None:
        self.slabs = Slabs()
        self._streams = streams
        self._protocol = protocol_of(run_id)
        self._token = secrets.token_hex(8)
        self._numbers = count(1)
        self._names: dict[str, _Inbound] = {}
        self._sessions: dict[_Key, _Inbound] = {}
        self._finished: OrderedDict[_Key, int] = OrderedDict()
        self._greeted: dict[asyncio.Task[None], tuple[str, str]] = {}
        """Peer and place of those whose streams have still to say what they are for."""
        self._arrivals = Arrivals()
        self._pumps: set[Pump] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dialers: set[TunnelDialer] = set()
        self._server: str | None = None
        self._closed = False
        self._refused = self._resumed = self._repeated = 0

    def statistics(self) -> Statistics:
        """Counters of the tunnels so far."""
        resumed = sum(pump.resumed for pump in self._pumps)
        repeated = sum(pump.repeated for pump in self._pumps)
        return Statistics(self._refused, self._resumed + resumed, self._repeated + repeated)

    # the callee's end

    async def serve(self, server: str) -> None:
        """Lead sessions that others begin to the gRPC server's unix socket ``server``.

        Raises LinkLost.
        """
        self._server = server
        self._start(self._sweep())
        await self._streams.serve_streams(self._protocol, self._take)

    def peer_of(self, name: str) -> str | None:
        """Whose session is carried under the name of a unix socket that has dialed the gRPC server;
        None: not one of ours."""
        inbound = self._names.get(name)
        return inbound.peer if inbound is not None else None

    def place_of(self, name: str) -> str:
        """Where the session under a name comes from: an IP address, or the peer id of a relay,
        behind which none is seen."""
        inbound = self._names.get(name)
        return place_in(inbound.address) if inbound is not None else ""

    def accept(self, name: str) -> None:
        """A call that has come under a name was accepted: its session need not make room for
        strangers any more."""
        if (inbound := self._names.get(name)) is not None:
            inbound.is_accepted = True

    def break_off(self, name: str) -> None:
        """End the session that is carried under a name, with its calls."""
        if (inbound := self._names.get(name)) is not None:
            inbound.pump.fail(LinkLost("was ended: its caller takes nothing"))

    def caller_at(self, peer_id: str) -> str | None:
        """The address of the last stream that a peer has opened to us; None if it holds no
        session."""
        return next((held.address for held in reversed(self._held_by(peer_id).values()) if held.pump.carried), None)

    def _held_by(self, peer_id: str) -> dict[_Key, _Inbound]:
        return {key: inbound for key, inbound in self._sessions.items() if key[0] == peer_id}

    def _take(self, stream: OpenStream) -> None:
        peer, now = stream.peer_id, asyncio.get_running_loop().time()
        place = place_in(stream.address)
        too_many = sum(one == peer for one, _ in self._greeted.values()) >= MAX_TUNNELS_PER_PEER
        if self._closed or too_many or self._arrivals.is_flood(peer, now) or not self._has_ear(peer, place):
            self._refuse_at_once(stream)
            return
        task = self._start(self._greet(stream))
        self._greeted[task] = (peer, place)
        task.add_done_callback(partial(self._heard, stream))

    def _has_ear(self, peer: str, place: str) -> bool:
        """Whether we can hear what one more stream is for; one that is silent makes room for it."""
        if len(self._greeted) < MAX_TUNNELS:
            return True
        silent = choose_evicted(place, {task: where for task, (_, where) in self._greeted.items()}) or choose_evicted(
            peer, {task: one for task, (one, where) in self._greeted.items() if where == place}
        )
        if silent is None:
            return False
        del self._greeted[silent]
        silent.cancel()
        return True

    def _heard(self, stream: OpenStream, task: asyncio.Task[None]) -> None:
        self._greeted.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            stream.socket.close()

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
            if asked.number is None and self._has_room(peer, asked.session, place_in(stream.address)):
                self._begin(stream, asked.session)
            elif (
                (inbound := self._sessions.get((peer, asked.session)))
                and inbound.pump.began
                and asked.number is not None
            ):
                if inbound.pump.accept(stream.socket, asked.number):
                    inbound.address = stream.address
            else:
                await self._refuse(stream, asked)
        except (LowcommError, OSError, TimeoutError) as error:
            log.debug("tunnel.not_taken", peer=peer, reason=str(error) or "said nothing in time")
            stream.socket.close()

    def _has_room(self, peer: str, session_id: bytes, place: str) -> bool:
        """Whether a peer may begin a session; one that is of no use, or that of a stranger, makes
        room for it."""
        held = self._held_by(peer)
        if (again := (peer, session_id)) in held:
            self._sessions.pop(again).pump.fail(LinkLost("was begun anew"))
        elif len(held) >= MAX_TUNNELS_PER_PEER:
            lost = next((key for key, inbound in held.items() if inbound.pump.cut), None)
            if lost is None:
                return False
            self._sessions.pop(lost).pump.fail(LinkLost("gave way to a new tunnel of the same peer"))
        shares = Shares()
        for inbound in self._sessions.values():
            shares.take(place_in(inbound.address))
        if not shares.has_room(place, MAX_TUNNELS - len(self._sessions)):
            return False
        strange = {key: inbound.peer for key, inbound in self._sessions.items() if not inbound.is_accepted}
        if len(self._sessions) < MAX_TUNNELS and len(strange) < MAX_UNAUTHENTICATED:
            return True
        stranger = choose_evicted(peer, strange)
        if stranger is None:
            return False
        self._sessions.pop(stranger).pump.fail(
            LinkLost("gave way to another peer: no call of its own was accepted yet")
        )
        return True

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
            # Over QUIC the answer would be lost if we closed first. Nothing is due but the end of
            # the stream: whoever sends on and on must not keep us reading.
            await loop.sock_recv(stream.socket, 1)
        stream.socket.close()

    def _begin(self, stream: OpenStream, session_id: bytes) -> None:
        name = f"lowcomm.{self._token}.in.{stream.peer_id}.{next(self._numbers)}"
        pump = Pump(socket.socket(socket.AF_UNIX), Session(self.slabs), calls=False)
        now = asyncio.get_running_loop().time()
        inbound = self._sessions[stream.peer_id, session_id] = _Inbound(pump, stream.address, name, stream.peer_id, now)
        self._start(self._serve(stream, session_id, inbound))

    async def _serve(self, stream: OpenStream, session_id: bytes, inbound: _Inbound) -> None:
        peer, key, pump = stream.peer_id, (stream.peer_id, session_id), inbound.pump
        self._names[inbound.name] = inbound
        try:
            with self.minding(pump):
                async with asyncio.timeout(OPEN_DEADLINE):
                    await pump.dial(f"\0{inbound.name}", self._server or "")
                pump.accept(stream.socket, 0)
                while await pump.wait_cut():
                    log.debug("tunnel.cut", peer=peer, end="callee", reason=pump.cut)
                    await self._wait_resumed(pump)
            self._finish(key, pump)
        except (LowcommError, OSError, TimeoutError) as error:
            log.debug("tunnel.lost", peer=peer, end="callee", reason=str(error))
        finally:
            self._names.pop(inbound.name, None)
            if self._sessions.get(key) is inbound:
                del self._sessions[key]
            stream.socket.close()

    async def _wait_resumed(self, pump: Pump) -> None:
        reason = pump.cut
        try:
            async with asyncio.timeout(KEEP):
                await pump.wait_carried()
        except TimeoutError:
            raise LinkLost(f"{reason}, and was not resumed within {KEEP:.0f} s") from None

    def _finish(self, key: tuple[str, bytes], pump: Pump) -> None:
        self._finished[key] = pump.received
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    # the caller's end

    def dialer(self, peer_id: str) -> TunnelDialer:
        """A new way to a peer; its ``target`` is what gRPC dials."""
        dialer = TunnelDialer(self, peer_id, f"lowcomm.{self._token}.out.{next(self._numbers)}")
        self._dialers.add(dialer)
        return dialer

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of libp2p's connections to a peer."""
        return await self._streams.connected_at(peer_id)

    async def open(
        self, peer_id: str, entry_points: Sequence[str], session_id: bytes, received: int | None = None
    ) -> tuple[OpenStream, int]:
        """A stream that the other end has taken, and how many numbers that has received before.

        ``received``: what we have, if the session is not a new one. Raises LinkLost; Forgotten if
        it can't be resumed.
        """
        words = opening(session_id, received)
        try:
            async with asyncio.timeout(OPEN_DEADLINE):
                try:
                    return await self._connect_and_open(peer_id, entry_points, words)
                except TimeoutError:
                    if self._depends_on(peer_id):
                        raise
                # The connection may be dead, which libp2p takes half a minute to notice; nothing of
                # ours depends on it.
                await self._streams.disconnect(peer_id)
                return await self._connect_and_open(peer_id, entry_points, words)
        except TimeoutError:
            raise LinkLost("did not answer in time") from None

    async def _connect_and_open(
        self, peer_id: str, entry_points: Sequence[str], words: bytes
    ) -> tuple[OpenStream, int]:
        await self._streams.connect(peer_id, entry_points, OPEN_DEADLINE)
        async with asyncio.timeout(ANSWER_DEADLINE):
            return await self._open(peer_id, words)

    def _depends_on(self, peer_id: str) -> bool:
        """Whether there are streams to or from a peer."""
        held = self._held_by(peer_id).values()
        return any(inbound.pump.carried for inbound in held) or any(dialer.carries(peer_id) for dialer in self._dialers)

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
    def minding(self, pump: Pump) -> Iterator[None]:
        """Look after a pipe while it lives, and close it then."""
        self._pumps.add(pump)
        try:
            yield
        finally:
            pump.close()
            self._pumps.discard(pump)
            self._resumed += pump.resumed
            self._repeated += pump.repeated

    def forget(self, dialer: TunnelDialer) -> None:
        """A way was closed."""
        self._dialers.discard(dialer)

    async def close(self) -> None:
        """End all tunnels, and take no more."""
        self._closed = True
        await asyncio.gather(*(dialer.close() for dialer in list(self._dialers)))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

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
        for inbound in list(self._sessions.values()):
            if not inbound.is_accepted and now - inbound.began > UNACCEPTED:
                inbound.pump.fail(LinkLost(f"was closed, for no call was accepted within {UNACCEPTED:.0f} s"))
        for pump in list(self._pumps):
            local, stream = pump.blocked(now)
            if pump.idle(now) > IDLE or local > STALL:
                pump.fail(LinkLost("was closed, for nothing moved in it"))
            elif stream > STALL:
                pump.cut_off(f"took nothing for {STALL:.0f} s")
            elif pump.idle(now) > SWEEP_EVERY:
                pump.acknowledge()


async def _ask(stream: socket.socket, words: bytes) -> tuple[Signal, int]:
    """What the other end of a new stream answers to our first words. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, words)
        return read_answer(await read_exactly(stream, ANSWER))
    except OSError as error:
        raise LinkLost(f"does not take the stream: {error.strerror}") from None
    except LinkLost:
        raise LinkLost("does not take the stream") from None
