"""No process outlives the tests that started it, however those end.

Every process of pytest, the controller of xdist and each of its workers, puts a mark of its own
into its environment, which all that it starts inherit. A keeper, a small process in a session of
its own, waits for the end of that process. However it ended, by any signal too, the keeper then
kills what still carries the mark.

Also a script: ``keeping.py PID`` is the keeper, so only what starts fast is imported here.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

DEADLINE = 20.0
"""Seconds in which what is killed must be gone."""
SPARED = (str(Path(__file__).name), "namespaces.py")
"""Keepers, and the wardens of laboratories: they end by themselves when their work is done."""
POLL = 0.1


def start() -> None:
    """Have a keeper watch over this process; on Linux, for it reads /proc."""
    if sys.platform != "linux":
        return
    os.environ[mark_of(os.getpid())] = "1"
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-S", __file__, str(os.getpid())]
    subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def mark_of(pid: int) -> str:
    """The variable that all have whom this process has started."""
    return f"KEPT_BY_{pid}"


def marked(mark: str) -> list[int]:
    """Processes that carry a mark, except those that end by themselves."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            has_mark = f"{mark}=1".encode() in (path / "environ").read_bytes().split(b"\0")
            if has_mark and not any(
                one.encode() in (path / "cmdline").read_bytes() for one in SPARED
            ):
                found.append(int(path.name))
    return found


def main() -> None:
    """Wait for the end of who started us, then kill what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = int(sys.argv[1])
    if os.getppid() == pid:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])
    end = monotonic() + DEADLINE
    while (left := marked(mark_of(pid))) and monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        sleep(POLL)


if __name__ == "__main__":
    main()
