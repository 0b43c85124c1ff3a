"""The congestion control of our connections: those that lose go on with BBR, where this kernel has
it.

Most systems send with CUBIC or Reno, which take every lost packet for congestion: with 1 % lost at
50 ms they come to some 2.4 Mbit/s a connection, however wide the line is (Mathis et al. 1997, "The
Macroscopic Behavior of the TCP Congestion Avoidance Algorithm"). BBR goes by rate and round trip
instead (Cardwell et al. 2016). Linux lets any user choose among what is in
``net.ipv4.tcp_allowed_congestion_control``, for a connection that is in use, too. gRPC offers no
way to it, but its sockets are descriptors of this process, so they can be found, asked
(``TCP_INFO``) and told.

Only a sender can do this for what it sends: each end of an exchange looks after its own side.
Elsewhere than on Linux, and where BBR is not allowed, nothing is changed; ``doctor`` tells the
remedy.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.system.formatting import place
from lowcomm_node.system.logs import log
from lowcomm_node.transport.guard.connections import connections, plain

BBR = "bbr"
LOSSY = 0.005
"""Of the segments with data that a connection has sent, those sent again: from here on it matters
how a loss is taken."""
ENOUGH = 500
"""Segments from which on that part means something: some 0.7 MB."""
EVERY = 1.0
"""Seconds between two looks."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_ESTABLISHED = 1
_RESENT, _SENT = struct.Struct("<100xI"), struct.Struct("<156xI")
"""Where ``struct tcp_info`` of linux/tcp.h has tcpi_total_retrans and tcpi_data_segs_out;
tcpi_state is its first byte."""
_INFO_BYTES = 160


@dataclass(frozen=True)
class Sending:
    """How a connection has sent so far."""

    congestion: str
    """Its congestion control."""
    segments: int
    """With data, those sent again included."""
    resent: int

    @property
    def loses(self) -> bool:
        """Whether so much is sent again that a loss should not be taken for congestion."""
        return self.segments >= ENOUGH and self.resent > LOSSY * self.segments


class CongestionWatch:
    """Looks at this process's connections now and then."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        """``tell`` hears of each connection that is changed."""
        self._tell = tell

    async def run(self) -> None:
        """Look every second; returns at once where nothing could be changed."""
        while is_allowed():
            try:
                self.look()
            except OSError as error:  # such as too many open files: it passes
                log.warning("congestion.not_looked", reason=str(error))
            await asyncio.sleep(EVERY)

    def look(self) -> None:
        """Have every connection that loses go on with BBR."""
        for connection in connections():
            with connection:
                sending = read_sending(connection)
                if sending is None or sending.congestion == BBR or not sending.loses:
                    continue
                try:
                    peer = connection.getpeername()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR.encode())
                except OSError:  # it has ended meanwhile
                    continue
            self._tell(
                {
                    "event": "congestion.changed",
                    "address": place(plain(peer[0]), peer[1]),
                    "before": sending.congestion,
                    "resent": sending.resent / sending.segments,
                }
            )


def is_allowed() -> bool:
    """Whether this user may choose BBR here."""
    try:
        return BBR in _ALLOWED.read_text().split()
    except OSError:
        return False


def read_sending(connection: socket.socket) -> Sending | None:
    """How a connection has sent; None if it is not established, or the kernel doesn't tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        congestion = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return None
    if len(info) < _INFO_BYTES or info[0] != _ESTABLISHED:
        return None
    (resent,), (segments,) = _RESENT.unpack_from(info), _SENT.unpack_from(info)
    return Sending(congestion.rstrip(b"\0").decode(errors="replace"), segments, resent)
