"""All tunnels of a node: the Exchange service over streams of libp2p, for peers that can't be
dialed.

    gRPC ── unix socket ── TunnelDialer ══ stream: p2pd, punched or relayed, p2pd ══ Callee ── unix
    socket ── gRPC server

Each gRPC connection is a session of its own. Streams break off, because a relay ends them at its
limits or goes away; gRPC does not notice:

    the stream breaks off
      └──► both ends keep their gRPC socket and unacknowledged bytes
             ├──► the caller opens another stream, by any route:
             │    RESUME with session and numbers; both send on from there
             └──► not within KEEP: the session ends, and with it its calls

All names are abstract unix sockets, so a killed process leaves nothing behind. The gRPC server's
own socket has no name at all (server.py).
"""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.callee import Callee
from lowcomm_node.net.control import OpenStream, Streams, read_exactly
from lowcomm_node.net.dialer import OPEN_DEADLINE, Forgotten, TunnelDialer
from lowcomm_node.net.frames import ANSWER, Signal, opening, read_answer
from lowcomm_node.net.pumps import Pumps

ANSWER_DEADLINE = 4.0
"""Seconds for an answer before the connection counts as dead."""


def protocol_of(run_id: str) -> str:
    """The name of our streams in libp2p, by run: peers of other runs don't get through."""
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


class Tunnels:
    """Both ends of all tunnels of this node."""

    def __init__(self, streams: Streams, run_id: str) -> None:
        self._streams = streams
        self._protocol = protocol_of(run_id)
        self._pumps = Pumps()
        self._token = secrets.token_hex(8)
        self._numbers = count(1)
        self._dialers: set[TunnelDialer] = set()
        self.callee = Callee(self._pumps)

    def statistics(self) -> Statistics:
        """Counters of the tunnels so far."""
        return Statistics(self.callee.refused, self._pumps.resumed, self._pumps.repeated)

    async def serve(self, server: str) -> None:
        """Carry other peers' sessions to the gRPC server's unix socket ``server``.

        Raises LinkLost.
        """
        self.callee.start(server)
        await self._streams.serve_streams(self._protocol, self.callee.take)

    def dialer(self, peer_id: str) -> TunnelDialer:
        """A new dialer of a peer; gRPC dials its ``target``."""
        name = f"lowcomm.{self._token}.out.{next(self._numbers)}"
        dialer = TunnelDialer(peer_id, name, self._pumps, self.open, self._dialers.discard)
        self._dialers.add(dialer)
        return dialer

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of libp2p's connections to a peer."""
        return await self._streams.connected_at(peer_id)

    async def open(
        self,
        peer_id: str,
        entry_points: Sequence[str],
        session_id: bytes,
        received: int | None = None,
    ) -> tuple[OpenStream, int]:
        """A stream that the other end has accepted, and how many bytes it has received before.

        ``received``: our own count, unless the session is new. Raises LinkLost; Forgotten if it
        can't be resumed.
        """
        words = opening(session_id, received)
        try:
            async with asyncio.timeout(OPEN_DEADLINE):
                try:
                    return await self._connect_and_open(peer_id, entry_points, words)
                except TimeoutError:
                    if self._depends_on(peer_id):
                        raise
                # The connection may be dead, which libp2p takes half a minute to notice. No stream
                # of ours depends on it, so we open another one.
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
        return self.callee.carries(peer_id) or any(
            dialer.carries(peer_id) for dialer in self._dialers
        )

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

    async def close(self) -> None:
        """End all tunnels, and take no more."""
        self.callee.refuse_all()
        await asyncio.gather(*(dialer.close() for dialer in list(self._dialers)))
        await self.callee.close()


async def _ask(stream: socket.socket, words: bytes) -> tuple[Signal, int]:
    """The other end's answer to our first words on a new stream. Raises LinkLost."""
    try:
        await asyncio.get_running_loop().sock_sendall(stream, words)
        return read_answer(await read_exactly(stream, ANSWER))
    except OSError as error:
        raise LinkLost(f"does not take the stream: {error.strerror}") from None
    except LinkLost:
        raise LinkLost("does not take the stream") from None
