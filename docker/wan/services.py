"""What a container of compose.wan.yaml has to know: that it is one, and where those of other
services are."""

import socket
import sys
import time
from pathlib import Path

PATIENCE = 120.0
POLL = 0.5
"""Seconds between two questions: no engine tells a container when another one has begun to run."""
PLACE = Path("/opt/wan")
"""Where compose.wan.yaml and the router's image have these programs."""


def only_in_a_container() -> None:
    """End this program anywhere else: what it does to routes would cut a whole machine off its
    network."""
    if Path(__file__).parent != PLACE:
        sys.exit(
            f"error: {sys.argv[0]} changes the routes of the machine it runs on: it is for "
            "compose.wan.yaml alone"
        )


def find(name: str) -> str:
    """The IPv4 address of a service, once its container runs; ends this program where that takes
    longer than PATIENCE."""
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.gethostbyname(name)
        except OSError:
            if time.monotonic() > ends:
                sys.exit(
                    f"error: {name} has no address after {PATIENCE:.0f} s: does its container run?"
                )
            time.sleep(POLL)
