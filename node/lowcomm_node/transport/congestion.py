"""How our connections send: those that lose segments switch to BBR, if the kernel has it, and no
connection keeps much in the kernel that the network does not carry yet.

Most systems send with CUBIC or Reno, which take every lost packet for congestion. At 1 % loss and
50 ms they reach some 2.4 Mbit/s per connection, however wide the link is (Mathis et al. 1997, "The
Macroscopic Behavior of the TCP Congestion Avoidance Algorithm"). BBR models rate and round trip
instead (Cardwell et al. 2016). Linux lets any user choose among
``net.ipv4.tcp_allowed_congestion_control``, also for a connection in use. gRPC offers no access to
it, but its sockets are descriptors of this process, so we can find, query (``TCP_INFO``) and set
them.

The kernel takes up to 4 MiB of a connection before the line has carried any of it: 7 s at 5 Mbit/s,
for which a content that has its turn next already goes beside the one before it. So each connection
gets a bound on what is not sent yet (``TCP_NOTSENT_LOWAT``); what is on its way is not bounded.

Both act on the sender: each end of an exchange looks after what it sends. Elsewhere than on Linux
nothing changes; where BBR is not allowed ``doctor`` names the remedy.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.system.formatting import place
from lowcomm_node.system.logs import log
from lowcomm_node.transport.guard.connections import connections, plain
from lowcomm_node.transport.records import CongestionChanged

BBR = "bbr"
LOSSY = 0.005
"""Share of retransmitted data segments above which a connection switches."""
ENOUGH = 500
"""Data segments before that share is significant: some 0.7 MB."""
UNSENT_BYTES = 128 * 1024
"""Bytes of a connection that wait in the kernel until they can be sent."""
EVERY = 1.0
"""Seconds between two looks."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_ESTABLISHED = 1
_RESENT, _SENT = struct.Struct("<100xI"), struct.Struct("<156xI")
"""Offsets in ``struct tcp_info`` of linux/tcp.h: tcpi_total_retrans and tcpi_data_segs_out. Its
first byte is tcpi_state."""
_INFO_BYTES = 160


@dataclass(frozen=True)
class Sending:
    """What a connection has sent so far."""

    congestion: str
    """Name of its congestion control."""
    segments: int
    """Data segments, retransmissions included."""
    resent: int

    @property
    def loses(self) -> bool:
        """Whether so many segments are resent that loss should not be taken for congestion."""
        return self.segments >= ENOUGH and self.resent > LOSSY * self.segments


class CongestionWatch:
    """Checks this process's connections once a second."""

    def __init__(self, tell: Callable[[CongestionChanged], None] = lambda event: None) -> None:
        """``tell`` receives an event for each connection that is switched."""
        self._tell = tell

    async def run(self) -> None:
        """Check every second. Returns at once where the kernel has neither."""
        while is_allowed() or hasattr(socket, "TCP_NOTSENT_LOWAT"):
            try:
                self.look()
            except OSError as error:  # such as too many open files: it passes
                log.warning("congestion.not_looked", reason=str(error))
            await asyncio.sleep(EVERY)

    def look(self) -> None:
        """Bound what every connection keeps unsent, and switch every lossy one to BBR."""
        bbr = is_allowed()
        for connection in connections():
            with connection:
                bound_unsent(connection)
                sending = read_sending(connection) if bbr else None
                if sending is None or sending.congestion == BBR or not sending.loses:
                    continue
                try:
                    peer = connection.getpeername()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR.encode())
                except OSError:  # it has ended meanwhile
                    continue
            self._tell(
                CongestionChanged(
                    address=place(plain(peer[0]), peer[1]),
                    before=sending.congestion,
                    resent=sending.resent / sending.segments,
                )
            )


def bound_unsent(connection: socket.socket) -> None:
    """Let the kernel keep no more than `UNSENT_BYTES` that can't be sent yet."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):  # it has ended meanwhile
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def is_allowed() -> bool:
    """Whether this user may choose BBR here."""
    try:
        return BBR in _ALLOWED.read_text().split()
    except OSError:
        return False


def read_sending(connection: socket.socket) -> Sending | None:
    """What a connection has sent; None if it is not established or the kernel does not report
    it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        congestion = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
        return None
    if len(info) < _INFO_BYTES or info[0] != _ESTABLISHED:
        return None
    (resent,), (segments,) = _RESENT.unpack_from(info), _SENT.unpack_from(info)
    return Sending(congestion.rstrip(b"\0").decode(errors="replace"), segments, resent)
