"""Health of a bootstrap server: it touches a file in its home; a check reads that and dials p2pd.

serving.json  {"pid"}; its time of change is that of the last look at the swarm
dial          where children of that process listen; p2pd greets, as all peers of libp2p do
"""

import json
import os
import socket
import time
from pathlib import Path

import psutil

from lowcomm_node.errors import DiskFull, Unhealthy
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.logs import log
from lowcomm_node.system.units import place

PATIENCE = 60.0
"""Seconds without a look at the swarm. It is due every five, but may wait for silent peers."""
DIAL_DEADLINE = 5.0
SIGN = "serving.json"
_GREETING = b"\x13/multistream/1.0.0\n"
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to dial for a socket that listens everywhere."""


def begin_sign(home: Path) -> None:
    """Write the file in the home, which the server removes when it leaves."""
    try:
        write_atomic(home / SIGN, json.dumps({"pid": os.getpid()}).encode())
    except (OSError, DiskFull) as error:  # no reason to stop serving
        log.warning("health.untold", reason=str(error))


def check_health(home: Path, now: float | None = None) -> str:
    """Why the server of a home is well, in a line. Raises Unhealthy that says why it is not."""
    path = home / SIGN
    try:
        pid = int(json.loads(path.read_text(encoding="utf-8"))["pid"])
        age = (time.time() if now is None else now) - path.stat().st_mtime
    except FileNotFoundError:
        start = "start it with `lowcomm-bootstrap serve`, or name its --home"
        raise Unhealthy(f"No server runs in {home}: {start}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unhealthy(f"{path} can't be read ({error}): start the server again.") from None
    try:
        children = psutil.Process(pid).children()
        sockets = [entry for child in children for entry in child.net_connections("tcp")]
    except (psutil.Error, OverflowError):
        ended = f"The server of {home} (process {pid}) ended without a goodbye"
        raise Unhealthy(f"{ended}: start it again.") from None
    if age > PATIENCE:
        late = f"The server (process {pid}) has not looked around for {age:.0f} s"
        raise Unhealthy(f"{late}: see its logs, or restart it.")
    reasons: list[str] = []
    for entry in sockets:
        if entry.status == psutil.CONN_LISTEN:
            host, port = _ANY.get(entry.laddr.ip, entry.laddr.ip), entry.laddr.port
            reason = _silent(host, port)
            if reason is None:
                return f"serving: looked around {max(0.0, age):.0f} s ago, p2pd answers"
            reasons.append(f"{place(host, port)} ({reason})")
    at = ", ".join(reasons) or "any port"
    raise Unhealthy(f"p2pd does not answer at {at}: restart the server.")


def _silent(host: str, port: int) -> str | None:
    """Why no libp2p answers there; None if it does."""
    try:
        with socket.create_connection((host, port), DIAL_DEADLINE) as dialed:
            dialed.sendall(_GREETING)
            heard = b""
            while (missing := len(_GREETING) - len(heard)) and (more := dialed.recv(missing)):
                heard += more
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None if heard == _GREETING else "what answers is no peer"
