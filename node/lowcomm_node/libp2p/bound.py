"""Which connections end with an address of ours that is gone. Pure, but for ``own_ends``."""

from collections.abc import Collection, Iterable, Mapping

import psutil

from lowcomm_node.libp2p.control import Connection
from lowcomm_node.libp2p.multiaddress import host_of, port_of

OwnEnds = Mapping[tuple[str, int], Collection[str]]
"""By host and port of the other end of a TCP connection: our addresses that lead there."""


def bound_to(gone: Collection[str], connections: Iterable[Connection], ends: OwnEnds) -> set[str]:
    """The peers with a connection that may use one of the ``gone`` addresses.

    A connection of the other version of IP uses none of them. Of TCP the system tells which address
    a connection uses; one over UDP is taken for lost. What goes through a relay uses what leads to
    the relay.
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
    """As the system tells it; empty where it does not."""
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
