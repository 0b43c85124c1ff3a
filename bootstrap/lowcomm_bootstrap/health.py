"""Is a bootstrap server well? It leaves a sign of life in its home; whoever asks reads that, and dials its p2pd.

serving.json  {"pid"}; its time of change is that of the last look around
dial          where children of that process listen; p2pd says first that it speaks multistream, as all peers of libp2p do
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lowcomm_node.errors import DiskFull, Unhealthy
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.formatting import place
from lowcomm_node.system.logs import log

PATIENCE = 60.0
"""Seconds without a look around, which is due every five, though one may wait for peers that do not answer."""
DIAL_DEADLINE = 5.0
_GREETING = b"\x13/multistream/1.0.0\n"
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to dial what listens everywhere."""


class SignOfLife:
    """The file in the home, while the server runs."""

    def __init__(self, home: Path) -> None:
        self._path = _path(home)

    def begin(self) -> None:
        """Tell that we serve."""
        try:
            write_atomic(self._path, json.dumps({"pid": os.getpid()}).encode())
        except (OSError, DiskFull) as error:  # nobody should lose the door for it
            log.warning("health.untold", reason=str(error))

    def renew(self) -> None:
        """A look around is done."""
        with suppress(OSError):
            os.utime(self._path)

    def end(self) -> None:
        """The server leaves."""
        self._path.unlink(missing_ok=True)


def check_health(home: Path, now: float | None = None) -> str:
    """What makes the server of a home well, in a line. Raises Unhealthy with the reason if it is not."""
    path = _path(home)
    try:
        pid = int(json.loads(path.read_text(encoding="utf-8"))["pid"])
        age = (time.time() if now is None else now) - path.stat().st_mtime
    except FileNotFoundError:
        raise Unhealthy(
            f"No server runs in {home}: start it with `lowcomm-bootstrap serve`, or name its --home."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unhealthy(f"{path} can't be read ({error}): start the server again.") from None
    try:
        places = _listening(pid)
    except (psutil.Error, OverflowError):
        raise Unhealthy(f"The server of {home} (process {pid}) ended without a goodbye: start it again.") from None
    if age > PATIENCE:
        raise Unhealthy(
            f"The server (process {pid}) has not looked around for {age:.0f} s: see its logs, or restart it."
        )
    reasons = [f"{place(*where)} ({reason})" for where in places if (reason := _silent(*where))]
    if len(reasons) == len(places):
        raise Unhealthy(f"p2pd does not answer at {', '.join(reasons) or 'any port'}: restart the server.")
    return f"serving: looked around {max(0.0, age):.0f} s ago, p2pd answers"


def _path(home: Path) -> Path:
    return home / "serving.json"


def _listening(pid: int) -> list[tuple[str, int]]:
    """Hosts and ports over TCP of the children of a process, where they can be dialed. Raises psutil.Error."""
    found = [entry for child in psutil.Process(pid).children() for entry in child.net_connections("tcp")]
    heard = (entry.laddr for entry in found if entry.status == psutil.CONN_LISTEN)
    return [(_ANY.get(address.ip, address.ip), address.port) for address in heard]


def _silent(host: str, port: int) -> str | None:
    """Why nobody of libp2p answers there; None if somebody does."""
    try:
        with socket.create_connection((host, port), DIAL_DEADLINE) as dialed:
            dialed.sendall(_GREETING)
            heard = b""
            while len(heard) < len(_GREETING) and (more := dialed.recv(len(_GREETING) - len(heard))):
                heard += more
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None if heard == _GREETING else "what answers is no peer"
