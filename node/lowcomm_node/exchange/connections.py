"""The TCP connections of this process. gRPC hands out none of them, but its sockets are descriptors of ours."""

import os
import socket
import stat
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

INTERNET = ("ipv4", "ipv6")
"""With what gRPC begins the address of a peer that has come over TCP."""
_DESCRIPTORS = Path("/proc/self/fd")


def connections() -> Iterator[socket.socket]:
    """Every TCP connection of this process, as a duplicate that whoever iterates must close."""
    for number in [int(entry.name) for entry in _DESCRIPTORS.iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = os.dup(number)
        except OSError:  # closed meanwhile, as the listing's own descriptor is
            continue
        try:
            one = socket.socket(fileno=duplicate)
        except OSError:  # its number went to something else
            os.close(duplicate)
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            yield one
        else:
            one.close()


def break_off(peer: str) -> None:
    """End the connections to a peer, named as gRPC does: ``ipv4:192.0.2.1:5000``, ``ipv6:%5B2001:db8::1%5D:5000``."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    wanted = (plain(host.strip("[]")), int(port))
    for connection in connections():
        with connection:
            try:
                found = connection.getpeername()
                if (plain(found[0]), found[1]) == wanted:
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is not connected, or not any more
                continue


def plain(host: str) -> str:
    """An address in its shortest form, without the interface, and of IPv4 where it is one."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
