"""The TCP connections of this process. gRPC exposes none of them, but its sockets are descriptors
of ours."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

INTERNET = ("ipv4", "ipv6")
"""The prefixes of gRPC's names for peers that came over TCP."""
_DESCRIPTORS = Path("/proc/self/fd")
GATHER = 0.25
"""Seconds for which connections to end are collected."""

Place = tuple[str, int]
"""Address and port of the other end."""


def connections(port: int = 0) -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, or of those at one local port. The caller closes
    them."""
    for number in [int(entry.name) for entry in _DESCRIPTORS.iterdir()]:
        try:
            duplicate = os.dup(number)
        except OSError:  # closed meanwhile, as the listing's own descriptor is
            continue
        try:
            one = socket.socket(fileno=duplicate)
        except OSError:  # it is something else
            os.close(duplicate)
            continue
        if _is_tcp(one) and port in (0, _port(one)):
            yield one
        else:
            one.close()


def _is_tcp(one: socket.socket) -> bool:
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


def _port(one: socket.socket) -> int | None:
    try:
        return one.getsockname()[1]
    except OSError:  # it has ended, which not every system tells apart
        return None


class Endings:
    """Ends connections to callers. Listing all connections takes time, so requests are collected
    first."""

    def __init__(self) -> None:
        self._wanted: set[Place] = set()

    def end(self, peer: str) -> bool:
        """End the connection to a caller shortly. Returns whether this is the first request for it.

        ``peer``: as gRPC names it: ``ipv4:192.0.2.1:5000``, ``ipv6:%5B2001:db8::1%5D:5000``.
        """
        place = place_of(peer)
        if place in self._wanted:
            return False
        if not self._wanted:
            asyncio.get_running_loop().call_later(GATHER, self._end_all)
        self._wanted.add(place)
        return True

    def _end_all(self) -> None:
        wanted = self._wanted
        self._wanted = set()
        for connection in connections():
            with connection, suppress(OSError):  # it is not connected, or not any more
                host, port = connection.getpeername()[:2]
                if (plain(host), port) in wanted:
                    connection.shutdown(socket.SHUT_RDWR)


def place_of(peer: str) -> Place:
    """Address and port of a TCP caller, from its name in gRPC."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return plain(host.strip("[]")), int(port)


@lru_cache(maxsize=4096)
def plain(host: str) -> str:
    """An address in its shortest form, without the interface; IPv4 if it is mapped."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
