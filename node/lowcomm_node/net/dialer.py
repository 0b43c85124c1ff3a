"""The caller's end of the tunnels to one peer: gRPC dials it, and it keeps the connections alive.

    gRPC ── unix socket ── TunnelDialer: Session, Pump ══ current stream ══ peer
                            └── interrupted: open another one, repeatedly for KEEP seconds, and
                            resume

Each gRPC connection is a session of its own.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import relay_of
from lowcomm_node.net.control import OpenStream, caller
from lowcomm_node.net.frames import SESSION
from lowcomm_node.net.pump import Pump
from lowcomm_node.net.pumps import Pumps
from lowcomm_node.net.session import Session
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import endure, log_defect
from lowcomm_protocol.errors import LowcommError

MAX_OPENING = 8
"""gRPC connections to one peer at once. Each gets a session."""
KEEP = 30.0
"""Seconds for which an interrupted session is kept. gRPC's ping timeouts must be longer (channels,
server)."""
PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each attempt to resume; the last value repeats."""
CLOSE_DEADLINE = 2.0
"""Seconds for sessions to end in order when the dialer is closed."""
OPEN_DEADLINE = 14.0
"""Seconds to open a stream that the other end takes: a relay may have to be dialed first, and a
dead connection noticed."""

Open = Callable[[str, Sequence[str], bytes, int | None], Awaitable[tuple[OpenStream, int]]]
"""Opens a stream: peer id, its entry points, session id, and how many bytes came before (None: a
new session). Returns the stream and how many bytes the other end has received."""


class Forgotten(LinkLost):
    """The other end does not know the session any more, so it can't be resumed."""


class TunnelDialer:
    """A unix socket for gRPC, and a session to one peer for each connection to it."""

    def __init__(
        self,
        peer_id: str,
        name: str,
        pumps: Pumps,
        open_: Open,
        on_close: Callable[["TunnelDialer"], None],
    ) -> None:
        """``name``: of the unix socket; ``pumps``: those of the node; ``on_close``: called once."""
        self._peer_id = peer_id
        self._all_pumps = pumps
        self._open = open_
        self._on_close = on_close
        self.target = f"unix-abstract:{name}"
        self.entry_points: tuple[str, ...] = ()
        """Where the peer can be dialed, by its newest record."""
        self.address = ""
        """Multiaddress of the connection that carries, or last carried, a stream."""
        self.reason = ""
        """Why the last session failed to begin, or was lost."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{name}")
        self._socket.listen(MAX_OPENING)
        self._socket.setblocking(False)
        self._pumps: dict[asyncio.Task[None], Pump] = {}
        self._news = asyncio.Event()
        """Set when a session gets a stream, or ends."""
        accept = endure("gRPC connections to a peer are not accepted", self._accept)
        self._accepting = asyncio.create_task(accept)

    def carries(self, peer_id: str) -> bool:
        """Whether it has a stream to a peer."""
        return peer_id == self._peer_id and any(pump.carried for pump in self._pumps.values())

    @property
    def cut(self) -> str:
        """Why all sessions are interrupted, while they are being resumed; empty otherwise."""
        pumps = self._pumps.values()
        return (
            ""
            if any(pump.carried for pump in pumps)
            else next((pump.cut for pump in pumps if pump.cut), "")
        )

    @property
    def relay(self) -> str | None:
        """The peer id of the relay of the last stream; None if there was none."""
        return relay_of(self.address)

    async def wait_carried(self) -> None:
        """Wait while it is ``cut``. The only deadline is KEEP."""
        while self.cut:
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """End its sessions."""
        self._on_close(self)
        self._accepting.cancel()
        tasks = [self._accepting, *self._pumps]
        ending = {task: pump for task, pump in self._pumps.items() if pump.carried}
        for pump in ending.values():
            pump.hang_up()
        try:
            if ending:  # or the other end would keep them for KEEP seconds
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
                self._take(local)
            # Such as too many open files: it passes, or nothing works any more
            except OSError as error:
                log.warning("tunnel.not_accepted", reason=str(error))
                await asyncio.sleep(1.0)

    def _take(self, local: socket.socket) -> None:
        """Begin a session for a gRPC connection."""
        try:
            # Any process of this machine can dial the name; ours alone is gRPC.
            if caller(local) != os.getpid() or len(self._pumps) >= MAX_OPENING:
                local.close()
                return
            pump = Pump(local, Session(self._all_pumps.slabs), calls=True)
        except BaseException:
            local.close()
            raise
        task = asyncio.create_task(self._carry(pump))
        self._pumps[task] = pump
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._pumps[task]
        self._news.set()
        log_defect(task)

    async def _carry(self, pump: Pump) -> None:
        """Carry a session to its end, over as many streams as it takes."""
        session_id = secrets.token_bytes(SESSION)
        try:
            with self._all_pumps.minding(pump):
                stream, number = await self._open(
                    self._peer_id, self.entry_points, session_id, None
                )
                self._attach(pump, stream, number)
                while await pump.wait_cut():
                    log.debug("tunnel.cut", peer=self._peer_id, end="caller", reason=pump.cut)
                    await self._resume(pump, session_id)
        except (LowcommError, OSError) as error:
            self.reason = str(error)
            log.debug("tunnel.lost", peer=self._peer_id, end="caller", reason=self.reason)

    def _attach(self, pump: Pump, stream: OpenStream, number: int) -> None:
        self.address = stream.address
        self.reason = ""
        pump.attach(stream.socket, number)
        self._news.set()

    async def _resume(self, pump: Pump, session_id: bytes) -> None:
        """Resume an interrupted session over another stream. Raises LinkLost."""
        why = pump.cut
        last = "did not answer in time"
        try:
            async with asyncio.timeout(KEEP):
                for attempt in count():
                    await asyncio.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
                    try:
                        stream, number = await self._open(
                            self._peer_id, self.entry_points, session_id, pump.received
                        )
                    except Forgotten as error:
                        raise LinkLost(f"{why}, and can't be resumed: {error}") from None
                    except (LowcommError, OSError) as error:
                        last = str(error)
                        continue
                    self._attach(pump, stream, number)
                    log.debug(
                        "tunnel.resumed",
                        peer=self._peer_id,
                        attempts=attempt + 1,
                        address=self.address,
                    )
                    return
        except TimeoutError:
            raise LinkLost(f"{why}, and could not be resumed within {KEEP:.0f} s: {last}") from None
