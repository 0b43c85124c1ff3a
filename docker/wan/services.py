"""Where the containers of other services are."""

import socket
import sys
import time

PATIENCE = 120.0
POLL = 0.5
"""Seconds between two questions: no engine tells a container when another one has begun to run."""


def find(name: str) -> str:
    """The IPv4 address of a service, once its container runs; ends this program where that takes longer than PATIENCE."""
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.gethostbyname(name)
        except OSError:
            if time.monotonic() > ends:
                sys.exit(f"error: {name} has no address after {PATIENCE:.0f} s: does its container run?")
            time.sleep(POLL)
