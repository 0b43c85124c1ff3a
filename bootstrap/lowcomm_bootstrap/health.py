"""Health of a bootstrap server: it touches a file in its home; a check reads that.

serving.json  {"pid"}; its time of change is that of the last look at the swarm for which p2pd
              answered
"""

import json
import os
import time
from pathlib import Path

import psutil

from lowcomm_node.errors import DiskFull, Unhealthy
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.logs import log

PATIENCE = 60.0
"""Seconds without a look at the swarm. It is due every five, but may wait for silent peers."""
SIGN = "serving.json"


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
    if not psutil.pid_exists(pid):
        ended = f"The server of {home} (process {pid}) ended without a goodbye"
        raise Unhealthy(f"{ended}: start it again.")
    if age > PATIENCE:
        late = f"The server (process {pid}) has not looked around for {age:.0f} s"
        raise Unhealthy(f"{late}, or its p2pd does not answer: see its logs, or restart it.")
    return f"serving: looked around {max(0.0, age):.0f} s ago, p2pd answers"
