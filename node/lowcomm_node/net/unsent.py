"""Bounds what our connections leave in the kernel, unsent.

The kernel takes up to 4 MiB of a connection before the line has carried any of it: 7 s at 5 Mbit/s,
in which the next content begins too early. ``TCP_NOTSENT_LOWAT`` bounds what is not sent yet. gRPC
offers no access to its sockets, but they are descriptors of this process. It acts on the sender:
each end of an exchange looks after what it sends. Elsewhere than on Linux nothing changes.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lowcomm_node.system.logs import log

UNSENT_SECONDS, LEAST_UNSENT, MOST_UNSENT = 0.2, 128 * 1024, 4 * 1024 * 1024
"""How long a connection sends what waits in the kernel at its present rate; bytes that may wait. On
a fast line with less there is nothing to send whenever this process has to wait for a core."""
EVERY = 1.0
"""Seconds between two looks."""
_RATE = struct.Struct("<104xQ")
"""Place of tcpi_pacing_rate in ``struct tcp_info`` of linux/tcp.h."""
_DESCRIPTORS = Path("/proc/self/fd")


async def keep_little_unsent() -> None:
    """Bound every connection of this process once a second. Returns at once elsewhere than on
    Linux."""
    while hasattr(socket, "TCP_NOTSENT_LOWAT") and _DESCRIPTORS.exists():
        try:
            for connection in connections():
                with connection, suppress(OSError):  # it may have ended meanwhile
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RATE.size)
                    rate = _RATE.unpack(info)[0] if len(info) == _RATE.size else 0
                    unsent = min(max(int(UNSENT_SECONDS * rate), LEAST_UNSENT), MOST_UNSENT)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
        except OSError as error:  # such as too many open files: it passes
            log.warning("unsent.not_bounded", reason=str(error))
        await asyncio.sleep(EVERY)


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
