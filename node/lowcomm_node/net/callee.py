"""The callee's end of the tunnels: sessions that other peers hold with us.

    stream ──► _take: flood? ──► _greet: NEW or RESUME ──► Inbound: Session, Pump ── unix socket ──
    gRPC server

It binds a name of its own before it dials the gRPC server, and remembers whose session it carries
under that name. So the server knows the caller, whom libp2p has authenticated.
"""

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import place_in
from lowcomm_node.net.control import OpenStream, read_exactly
from lowcomm_node.net.dialer import KEEP, OPEN_DEADLINE
from lowcomm_node.net.eviction import Arrivals, choose_evicted
from lowcomm_node.net.frames import OPENING, Opening, Signal, numbered, read_opening
from lowcomm_node.net.pump import Pump
from lowcomm_node.net.pumps import SWEEP_EVERY, Pumps
from lowcomm_node.net.session import Session
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Shares
from lowcomm_node.system.tasks import endure, log_defect
from lowcomm_protocol.errors import LowcommError

MAX_TUNNELS = 64
"""Sessions that others hold with us at once."""
MAX_UNAUTHENTICATED = MAX_TUNNELS // 2
"""Sessions among these without an accepted call: libp2p lets anybody open one."""
MAX_TUNNELS_PER_PEER = 4
"""gRPC needs one; there are two for a moment when a better connection has been found."""
MAX_FINISHED = 256
"""Ended sessions remembered for callers that missed the last word."""
OPENING_DEADLINE = 5.0
"""Seconds for a caller's first words, and for a refused caller to close its stream."""
UNACCEPTED = 20.0
"""Seconds for the first accepted call over a session. A session without one is of no use."""

_Key = tuple[str, bytes]
"""Peer id and session id: a peer can't resume another peer's session."""


@dataclass(eq=False)
class Inbound:
    """A session that another peer holds with us."""

    pump: Pump
    address: str
    """Where its last stream came from."""
    name: str
    """Of the unix socket that connects it to the gRPC server."""
    peer: str
    began: float
    """The event loop's time."""
    is_accepted: bool = False
    """Whether a call through it came from an admitted peer."""


class Callee:
    """The sessions that other peers hold with us, and who may have one."""

    def __init__(self, pumps: Pumps) -> None:
        self._pumps = pumps
        self._token = secrets.token_hex(8)
        self._numbers = count(1)
        self._names: dict[str, Inbound] = {}
        self._sessions: dict[_Key, Inbound] = {}
        self._finished: OrderedDict[_Key, int] = OrderedDict()
        self._greeted: dict[asyncio.Task[None], tuple[str, str]] = {}
        """Peer and place of streams whose first words have not come yet."""
        self._arrivals = Arrivals()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = ""
        self._closed = False
        self.refused = 0
        """Streams refused because there were too many."""

    def start(self, server: str) -> None:
        """Carry the sessions to the gRPC server's unix socket ``server`` from now on."""
        self._server = server
        self._start(endure("useless tunnels are not ended", self._sweep))

    def peer_of(self, name: str) -> str | None:
        """The peer whose session has this unix socket name; None: not one of ours."""
        inbound = self._names.get(name)
        return inbound.peer if inbound is not None else None

    def place_of(self, name: str) -> str:
        """Where a session comes from: an IP address, or a relay, behind which no address is
        visible."""
        inbound = self._names.get(name)
        return place_in(inbound.address) if inbound is not None else ""

    def accept(self, name: str) -> None:
        """A call of this session was accepted: it need not make room for other peers any more."""
        if (inbound := self._names.get(name)) is not None:
            inbound.is_accepted = True

    def break_off(self, name: str) -> None:
        """End a session, with its calls."""
        if (inbound := self._names.get(name)) is not None:
            inbound.pump.fail(LinkLost("was ended: its caller takes nothing"))

    def caller_at(self, peer_id: str) -> str | None:
        """The address of the last stream that a peer has opened to us; None if it holds no
        session."""
        return next(
            (
                held.address
                for held in reversed(self._held_by(peer_id).values())
                if held.pump.carried
            ),
            None,
        )

    def carries(self, peer_id: str) -> bool:
        """Whether there is a stream from a peer."""
        return any(inbound.pump.carried for inbound in self._held_by(peer_id).values())

    def _held_by(self, peer_id: str) -> dict[_Key, Inbound]:
        return {key: inbound for key, inbound in self._sessions.items() if key[0] == peer_id}

    def take(self, stream: OpenStream) -> None:
        peer, now = stream.peer_id, asyncio.get_running_loop().time()
        place = place_in(stream.address)
        # libp2p lets anybody open streams, so their costs are bounded before a task begins.
        too_many = sum(one == peer for one, _ in self._greeted.values()) >= MAX_TUNNELS_PER_PEER
        if (
            self._closed
            or too_many
            or self._arrivals.is_flood(peer, now)
            or not self._can_greet(peer, place)
        ):
            self._refuse_at_once(stream)
            return
        task = self._start(self._greet(stream))
        self._greeted[task] = (peer, place)
        task.add_done_callback(partial(self._heard, stream))

    def _can_greet(self, peer: str, place: str) -> bool:
        """Whether we can hear one more stream's first words; a silent one is evicted if needed."""
        if len(self._greeted) < MAX_TUNNELS:
            return True
        # By place first: identities cost nothing, addresses do.
        silent = choose_evicted(
            place, {task: where for task, (_, where) in self._greeted.items()}
        ) or choose_evicted(
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
        self.refused += 1
        with suppress(OSError):
            stream.socket.send(numbered(Signal.BUSY, 0))
        stream.socket.close()

    async def _greet(self, stream: OpenStream) -> None:
        """Hear a stream's first words."""
        peer = stream.peer_id
        try:
            async with asyncio.timeout(OPENING_DEADLINE):
                asked = read_opening(await read_exactly(stream.socket, OPENING))
            if asked.number is None and self._has_room(
                peer, asked.session, place_in(stream.address)
            ):
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
        """Whether a peer may begin a session; a useless or unaccepted one is evicted if needed."""
        held = self._held_by(peer)
        if (again := (peer, session_id)) in held:
            self._sessions.pop(again).pump.fail(LinkLost("was begun anew"))
        elif len(held) >= MAX_TUNNELS_PER_PEER:
            lost = next((key for key, inbound in held.items() if inbound.pump.cut), None)
            if lost is None:
                return False
            self._sessions.pop(lost).pump.fail(
                LinkLost("gave way to a new tunnel of the same peer")
            )
        shares = Shares()
        for inbound in self._sessions.values():
            shares.take(place_in(inbound.address))
        if not shares.has_room(place, MAX_TUNNELS - len(self._sessions)):
            return False
        unauthenticated = {
            key: inbound.peer for key, inbound in self._sessions.items() if not inbound.is_accepted
        }
        if len(self._sessions) < MAX_TUNNELS and len(unauthenticated) < MAX_UNAUTHENTICATED:
            return True
        evicted = choose_evicted(peer, unauthenticated)
        if evicted is None:
            return False
        self._sessions.pop(evicted).pump.fail(
            LinkLost("gave way to another peer: no call of its own was accepted yet")
        )
        return True

    async def _refuse(self, stream: OpenStream, asked: Opening) -> None:
        """Tell a caller why its stream is refused."""
        if asked.number is None:
            self.refused += 1
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
        pump = Pump(socket.socket(socket.AF_UNIX), Session(self._pumps.slabs), calls=False)
        now = asyncio.get_running_loop().time()
        inbound = self._sessions[stream.peer_id, session_id] = Inbound(
            pump, stream.address, name, stream.peer_id, now
        )
        self._start(self._serve(stream, session_id, inbound))

    async def _serve(self, stream: OpenStream, session_id: bytes, inbound: Inbound) -> None:
        peer, key, pump = stream.peer_id, (stream.peer_id, session_id), inbound.pump
        self._names[inbound.name] = inbound
        try:
            with self._pumps.minding(pump):
                async with asyncio.timeout(OPEN_DEADLINE):
                    await pump.dial(f"\0{inbound.name}", self._server)
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

    def refuse_all(self) -> None:
        """Take no more streams."""
        self._closed = True

    async def close(self) -> None:
        """End all sessions, and take no more streams."""
        self.refuse_all()
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
        """End useless sessions periodically."""
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """End sessions without an accepted call or movement; ``now``: the event loop's time."""
        for inbound in list(self._sessions.values()):
            if not inbound.is_accepted and now - inbound.began > UNACCEPTED:
                inbound.pump.fail(
                    LinkLost(f"was closed, for no call was accepted within {UNACCEPTED:.0f} s")
                )
        self._pumps.sweep(now)
