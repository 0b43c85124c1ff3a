"""How our connections send: with BBR where segments are lost, if the kernel has it and it loses no
more of them, and without much in the kernel that the network does not carry yet.

CUBIC and Reno take every lost packet for congestion: at 1 % loss and 50 ms they reach 2.4 Mbit/s a
connection (Mathis et al. 1997). BBR models rate and round trip instead (Cardwell et al. 2016).
Linux lets any user choose among ``net.ipv4.tcp_allowed_congestion_control``, also for a connection
in use. gRPC offers no access to its sockets, but they are descriptors of this process.

Where several connections share a slow line with a short queue, BBR loses more: up to 27 % of the
bytes at 5 Mbit/s, where Reno sent 3 % again. So a connection that loses much with BBR, while
packets wait in a queue, goes on without it.

The kernel takes up to 4 MiB of a connection before the line has carried any of it: 7 s at 5 Mbit/s,
in which the next content begins too early. ``TCP_NOTSENT_LOWAT`` bounds what is not sent yet.

Both act on the sender: each end of an exchange looks after what it sends. Elsewhere than on Linux
nothing changes. docs/trouble.md says how to allow BBR.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.system.logs import Event, log
from lowcomm_node.system.units import place

BBR = "bbr"
LOSSY = 0.005
"""Share of retransmitted data segments above which a connection switches."""
ENOUGH = 500
"""Data segments before such a share is significant: some 0.7 MB."""
WASTED = 0.05
"""The same share, of those sent while a queue is seen, above which a connection leaves BBR."""
QUEUED = 1.5
"""Round trips, of the shortest, from which on packets wait in a queue of the path."""
OTHERS = ("cubic", "reno")
"""Instead of BBR, the best first; every kernel has the last one."""
UNSENT_SECONDS, LEAST_UNSENT, MOST_UNSENT = 0.2, 128 * 1024, 4 * 1024 * 1024
"""How long a connection sends what waits in the kernel at its present rate; bytes that may wait. On
a fast line with less there is nothing to send whenever this process has to wait for a core."""
EVERY = 1.0
"""Seconds between two looks."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_ESTABLISHED = 1
_ROUND_TRIP, _RESENT, _SHORTEST, _SENT = (
    struct.Struct(f"<{offset}xI") for offset in (68, 100, 148, 156)
)
_RATE = struct.Struct("<104xQ")
"""Places in ``struct tcp_info`` of linux/tcp.h: tcpi_rtt, tcpi_total_retrans, tcpi_min_rtt and
tcpi_data_segs_out; tcpi_pacing_rate. Its first byte is tcpi_state."""
_INFO_BYTES = 160
_DESCRIPTORS = Path("/proc/self/fd")
Ends = tuple[Any, Any]
"""Addresses of both ends."""


@dataclass(frozen=True)
class Sending:
    """What a connection has sent so far."""

    congestion: str
    """Name of its congestion control."""
    segments: int
    """Data segments, retransmissions included."""
    resent: int
    round_trips: float
    """The recent round trip, in shortest ones."""


class CongestionChanged(Event, name="congestion.changed"):
    """A connection that loses segments goes on with BBR, or without it where that loses more."""

    address: str
    """The other end, `HOST:PORT`."""
    before: str
    """Congestion control that it had."""
    now: str
    """The one that it has."""
    resent: float
    """Share of the segments that were sent again."""


class SendingHistory:
    """The losses of one connection so far."""

    def __init__(self) -> None:
        self._last = Sending("", 0, 0, 0.0)
        self._segments = self._resent = 0
        """Sent with BBR while a queue was seen."""
        self._left_bbr = False

    def better(self, sending: Sending, names: Sequence[str]) -> tuple[str, float] | None:
        """What congestion control it should go on with, and the share of segments resent that says
        so; None if with the one that it has.

        ``sending``: what it has sent so far; ``names``: those that may be chosen.
        """
        last, self._last = self._last, sending
        if sending.congestion != BBR:
            share = lost(sending.segments, sending.resent)
            return (BBR, share) if share > LOSSY and not self._left_bbr and BBR in names else None
        if last.congestion in ("", BBR) and sending.round_trips >= QUEUED:
            self._segments += sending.segments - last.segments
            self._resent += sending.resent - last.resent
        share = lost(self._segments, self._resent)
        self._left_bbr = share > WASTED
        other = next((name for name in OTHERS if name in names), OTHERS[-1])
        return (other, share) if self._left_bbr else None


def lost(segments: int, resent: int) -> float:
    """The share of segments that were resent; 0 while there are too few to tell."""
    return resent / segments if segments >= ENOUGH else 0.0


class CongestionWatch:
    """Checks this process's connections once a second."""

    def __init__(self, tell: Callable[[CongestionChanged], None] = lambda event: None) -> None:
        """``tell`` receives an event for each connection that is switched."""
        self._tell = tell
        self._histories: dict[Ends, SendingHistory] = {}

    async def run(self) -> None:
        """Check every second. Returns at once where the kernel has neither."""
        while BBR in allowed() or hasattr(socket, "TCP_NOTSENT_LOWAT"):
            try:
                self.look()
            except OSError as error:  # such as too many open files: it passes
                log.warning("congestion.not_looked", reason=str(error))
            await asyncio.sleep(EVERY)

    def look(self) -> None:
        """Bound what every connection keeps unsent, and have each go on with the congestion control
        that is better for it."""
        names, before, self._histories = allowed(), self._histories, {}
        for connection in connections():
            with connection, suppress(OSError):  # it may have ended meanwhile
                bound_unsent(connection)
                if BBR not in names or (sending := read_sending(connection)) is None:
                    continue
                peer = connection.getpeername()
                ends = (connection.getsockname(), peer)
                history = self._histories[ends] = before.get(ends) or SendingHistory()
                if (better := history.better(sending, names)) is None:
                    continue
                name, resent = better
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
                host = peer[0].partition("%")[0].removeprefix("::ffff:")
                self._tell(
                    CongestionChanged(
                        address=place(host, peer[1]),
                        before=sending.congestion,
                        now=name,
                        resent=resent,
                    )
                )


def bound_unsent(connection: socket.socket) -> None:
    """Let the kernel keep little of a connection that can't be sent yet. Raises OSError."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        rate = _RATE.unpack_from(info)[0] if len(info) == _INFO_BYTES else 0
        unsent = min(max(int(UNSENT_SECONDS * rate), LEAST_UNSENT), MOST_UNSENT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)


def allowed() -> Sequence[str]:
    """The congestion controls that this user may choose here."""
    try:
        return _ALLOWED.read_text(encoding="utf-8").split()
    except OSError:
        return ()


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
    round_trip, resent, shortest, segments = (
        place.unpack_from(info)[0] for place in (_ROUND_TRIP, _RESENT, _SHORTEST, _SENT)
    )
    name = congestion.rstrip(b"\0").decode(errors="replace")
    return Sending(name, segments, resent, round_trip / max(1, shortest))


def connections() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets. The caller closes them."""
    for number in [int(entry.name) for entry in _DESCRIPTORS.iterdir()]:
        try:
            duplicate = os.dup(number)
        except OSError:  # closed meanwhile, as the listing's own descriptor is
            continue
        try:
            found = socket.socket(fileno=duplicate)
        except OSError:  # it is something else
            os.close(duplicate)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()
