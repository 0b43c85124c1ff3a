"""Puts a container behind its router, then becomes the command as a user without any rights:
behind.py ROUTER COMMAND...

The only thing that needs rights is the default route; whoever takes part in training has none of
them any more."""

import os
import socket
import struct
import sys
from fcntl import ioctl

from services import find, only_in_a_container

USER = "lowcomm"
_SIOCADDRT, _SIOCDELRT = 0x890B, 0x890C
_UP, _GATEWAY = 1, 2


def route_by(gateway: str) -> None:
    """Let all that is not on our own network go to ``gateway``. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            while True:
                ioctl(any_socket, _SIOCDELRT, _route("0.0.0.0", _UP))
        except ProcessLookupError:  # there is no default route any more
            ioctl(any_socket, _SIOCADDRT, _route(gateway, _UP | _GATEWAY))


def _route(gateway: str, flags: int) -> bytes:
    """A default route, as linux/route.h has it."""
    nowhere = struct.pack("=H14x", socket.AF_INET)
    by = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(gateway))
    return struct.pack(
        "@L16s16s16sHhLPhPLLH", 0, nowhere, by, nowhere, flags, 0, 0, 0, 0, 0, 0, 0, 0
    )


def main() -> None:
    """Route, drop all rights, become the command."""
    only_in_a_container()
    route_by(find(sys.argv[1]))
    drop = (
        "--reuid",
        USER,
        "--regid",
        USER,
        "--clear-groups",
        "--bounding-set=-all",
        "--inh-caps=-all",
    )
    os.execvp("setpriv", ["setpriv", *drop, "--no-new-privs", *sys.argv[2:]])


if __name__ == "__main__":
    main()
