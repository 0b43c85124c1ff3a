"""Unix sockets between processes of this machine: abstract ones, which a killed process does not
leave behind, and where only Linux has them, files in the folder of this user."""

import secrets
import socket
import struct
import sys
from pathlib import Path

from lowcomm_node.net.p2pd import runtime_folder

ABSTRACT = sys.platform == "linux"
_CREDENTIALS = "3i"
_SOL_LOCAL, _LOCAL_PEERPID = 0, 2  # of sys/un.h on macOS


def new_name(end: str = "sock") -> str:
    """A name that nobody has: a path where it is a file."""
    token = secrets.token_hex(8)
    return f"lowcomm.{token}.{end}" if ABSTRACT else str(runtime_folder() / f"{token}.{end}")


def bound(name: str) -> socket.socket:
    """A socket of this name, which does not wait."""
    found = socket.socket(socket.AF_UNIX)
    found.setblocking(False)
    found.bind(address_of(name))
    return found


def address_of(name: str) -> str:
    """The address of a name, as Python takes it."""
    return name if name.startswith("/") else f"\0{name}"


def target_of(name: str) -> str:
    """The address of a name, as gRPC takes it."""
    return f"unix:{name}" if name.startswith("/") else f"unix-abstract:{name}"


def remove(name: str) -> None:
    """Remove a file whose socket was closed."""
    if name.startswith("/"):
        Path(name).unlink(missing_ok=True)


def caller(connection: socket.socket) -> int:
    """The process id at the other end of a unix socket, from the kernel."""
    if not hasattr(socket, "SO_PEERCRED"):
        return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    size = struct.calcsize(_CREDENTIALS)
    return struct.unpack(
        _CREDENTIALS, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )[0]
