"""Detects whether somebody uses this machine, and whether it runs on its battery.

The machine is in use if one of these is true; ``only_idle`` waits until none was for a while:

    a key was pressed in a terminal   last access of /dev/tty[0-9]* and /dev/pts/*, local or by ssh
    logind says that it is in use     IdleHint, which desktops set, asked with `busctl` if installed
    other programs compute            over one core for a minute; without niced programs and us
"""

import os
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import psutil

from lowcomm_node.owner.rules import MachineUse
from lowcomm_node.system.formatting import seconds

BUSY_CORES = 1.0
"""If other programs take more cores than this, the machine is in use."""
BUSY_SECONDS = 60.0
LOGIND_EVERY = 15.0
LOGIND_DEADLINE = 5.0
_LOGIND = (
    *("busctl", "--system", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "IdleHint", "IdleSinceHint"),
)


@dataclass(frozen=True)
class Work:
    """Processor time up to a moment."""

    at: float
    """Monotonic seconds."""
    others: float
    """Seconds of all cores in which they were not idle and ran neither niced programs nor us."""


class Load:
    """Cores that other programs took over the last minute. Pure."""

    def __init__(self) -> None:
        self._seen: deque[Work] = deque()

    def saw(self, work: Work) -> float:
        """Add a measurement; returns the cores taken, 0 until a minute has been seen."""
        self._seen.append(work)
        while len(self._seen) > 2 and work.at - self._seen[1].at >= BUSY_SECONDS:
            self._seen.popleft()
        first = self._seen[0]
        elapsed = work.at - first.at
        return max(0.0, work.others - first.others) / elapsed if elapsed >= BUSY_SECONDS else 0.0


class OwnWork:
    """Processor time of our own processes, ended ones included. Pure."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._sum = 0.0

    def total(self, work: Mapping[int, float]) -> float:
        """Add what each process has used so far; returns the total of all."""
        self._sum += sum(max(0.0, used - self._last.get(pid, 0.0)) for pid, used in work.items())
        self._last = dict(work)
        return self._sum


class IdleDetector:
    """Looks at the machine, only for what the owner's rules need."""

    def __init__(self, use: bool, battery: bool) -> None:
        self._use = use
        self._battery = battery
        self._load = Load()
        self._own = OwnWork()
        self._busy_at: float | None = None
        self._cores = 0.0
        self._logind: tuple[float, float | None] = (-LOGIND_EVERY, None)

    def look(self) -> MachineUse:
        """The use of the machine now."""
        idle, by = self._idle() if self._use else (None, "")
        return MachineUse(
            idle=idle, used_by=by, on_battery=_on_battery() if self._battery else None
        )

    def _idle(self) -> tuple[float | None, str]:
        now = monotonic()
        work = Work(now, busy_seconds() - self._own.total(_family_work()))
        if (cores := self._load.saw(work)) > BUSY_CORES:
            self._busy_at = now
            self._cores = cores
        found: list[tuple[float, str]] = []
        if self._busy_at is not None:
            found.append((now - self._busy_at, f"other programs take {self._cores:.1f} cores"))
        if (typed := last_typed(_terminals())) is not None:
            idle = max(0.0, time() - typed)
            found.append((idle, f"a key was pressed in a terminal {seconds(idle)} ago"))
        if (idle := self._by_logind(now)) is not None:
            found.append((idle, f"logind saw it used {seconds(idle)} ago"))
        return min(found) if found else (None, "")

    def _by_logind(self, now: float) -> float | None:
        asked, since = self._logind
        if now - asked >= LOGIND_EVERY:
            since = ask_logind()
            self._logind = (now, since)
        return None if since is None else max(0.0, time() - since)


def last_typed(terminals: Iterable[Path]) -> float | None:
    """Unix time of the last key pressed in any of these terminals; None without terminals."""
    times: list[float] = []
    for terminal in terminals:
        with suppress(OSError):
            times.append(terminal.stat().st_atime)
    return max(times, default=None)


def _terminals() -> list[Path]:
    return [*Path("/dev").glob("tty[0-9]*"), *Path("/dev/pts").glob("[0-9]*")]


def ask_logind() -> float | None:
    """Unix time since which logind says it is idle, now if it is in use; None without logind."""
    try:
        done = subprocess.run(
            _LOGIND,
            capture_output=True,
            timeout=LOGIND_DEADLINE,
            check=True,
            encoding="utf-8",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return read_logind(done.stdout, time())


def read_logind(answer: str, now: float) -> float | None:
    """Read the answer of ``busctl``: ``b true`` and ``t MICROSECONDS``, one a line."""
    words = answer.split()
    if len(words) != 4 or words[0] != "b" or words[2] != "t" or not words[3].isdecimal():
        return None
    return int(words[3]) / 1e6 if words[1] == "true" else now


def busy_seconds() -> float:
    """Processor time of all cores, without niced programs, which an owner does not notice."""
    total = psutil.cpu_times()
    return total.user + total.system + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)


def _family_work() -> dict[int, float]:
    """Processor time of this process and its children, by process id."""
    own = psutil.Process(os.getpid())
    work: dict[int, float] = {}
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            work[process.pid] = times.system + (0.0 if process.nice() > 0 else times.user)
    return work


def _on_battery() -> bool | None:
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged
