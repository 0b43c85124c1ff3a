"""Which connections end when one of our addresses is gone. Pure, but for ``own_ends``."""

from collections.abc import Collection, Iterable, Mapping

import psutil

from lowcomm_node.net.addresses import host_of, port_of
from lowcomm_node.net.control import Connection

OwnEnds = Mapping[tuple[str, int], Collection[str]]
"""Our local addresses, by host and port of the other end of a TCP connection."""


def bound_to(gone: Collection[str], connections: Iterable[Connection], ends: OwnEnds) -> set[str]:
    """The peers with a connection that may use one of the ``gone`` addresses.

    A connection of the other IP version uses none of them. The system tells which address a TCP
    connection uses; a UDP connection counts as lost. A relayed connection uses what leads to the
    relay.
    """
    versions = {":" in address for address in gone}
    found = set[str]()
    for connection in connections:
        first_hop = connection.address.partition("/p2p/")[0]
        host, port = host_of(first_hop), port_of(first_hop)
        if host is not None and (":" in host) not in versions:
            continue
        ours = None
        if host is not None and port is not None and "/tcp/" in first_hop:
            ours = ends.get((host, port))
        if not ours or set(ours) & set(gone):
            found.add(connection.peer_id)
    return found


def own_ends() -> OwnEnds:
    """As the system reports them; empty if it does not."""
    found: dict[tuple[str, int], set[str]] = {}
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return found
    for one in sockets:
        if one.raddr and one.laddr:
            host = one.raddr.ip.partition("%")[0].removeprefix("::ffff:")
            own = one.laddr.ip.partition("%")[0].removeprefix("::ffff:")
            found.setdefault((host, one.raddr.port), set()).add(own)
    return found
