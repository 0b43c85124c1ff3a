"""How training makes way for other programs of its machine: what works here, and for whom.

Linux shares processors out twice: between groups of processes by the weight of each group, then
within a group by nice level and scheduling class. A group is one of:

    a control group     where the cpu controller is on: services of systemd, containers, desktops
    a session           elsewhere, while kernel.sched_autogroup_enabled is 1, as it mostly is
    the whole machine   elsewhere

So a nice level alone makes way only within its session. ``step_back`` therefore moves the trainer
into a session of its own, and gives that session the level. The daemon keeps its share. A control
group's weight is its owner's to set, as the units in docker/systemd do; ``look`` tells what holds.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from time import sleep

from lowcomm_node.system.machine import folders_of

LAST = 19
"""The level at which training gets only what nobody else wants (SCHED_IDLE)."""
LIGHT = 0.05
"""A group with this part of the usual weight, or less, makes way for others."""
EVERYBODY, NOBODY, ITS_SESSION = "all", "nobody", "session"
_PROC = Path("/proc")
_IDLE_CLASS = 5
"""SCHED_IDLE, as stat(5) of a process shows it."""
_IDLE_WEIGHT = 0.003
"""Of a control group with cpu.idle = 1, compared with the usual weight."""
_AGAIN, _TRIES = 0.11, 3
"""Without privileges the kernel takes one change of a session's level in 0.1 s, of all of them."""


@dataclass(frozen=True, kw_only=True)
class Priority:
    """How a process makes way for others."""

    level: int
    """Nice level, 0 to 19."""
    by: str
    """The mechanism: `nothing`, `nice`, `idle` (SCHED_IDLE), `session` (the nice level of its
    session) or `group` (the weight of its control group)."""
    behind: str
    """For whom: `all` programs, `nobody`, those of its `session` only, or those of a control group,
    which is named."""


def step_back(level: int) -> None:
    """Have this process and its threads make way; 0: not at all."""
    if not level:
        return
    os.nice(level)
    if sys.platform != "linux":
        return
    if level >= LAST:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for thread in (_PROC / "self" / "task").glob("*"):
        with suppress(OSError):  # it has ended
            _lower(int(thread.name), level)
    if _weights(os.getpid()) or not _sessions_count():
        return
    with suppress(OSError):  # it leads a group
        if os.getsid(0) != os.getpid():
            os.setsid()
        _give_session(level)


def _lower(thread: int, level: int) -> None:
    """Libraries have started threads that keep their own level; ours goes to those that follow."""
    if thread == get_native_id():
        return
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0))
    if level >= LAST:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _give_session(level: int) -> None:
    for attempt in range(_TRIES):
        try:
            (_PROC / "self" / "autogroup").write_text(str(level), encoding="utf-8")
            return
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                sleep(_AGAIN)


def look(pid: int) -> Priority | None:
    """How a process makes way; None if it has gone."""
    try:
        level = os.getpriority(os.PRIO_PROCESS, pid)
        if sys.platform != "linux":
            return _within(EVERYBODY, level, "nice")
        by = "idle" if _is_idle_class(pid) else "nice"
        if groups := _weights(pid):
            return _in_groups(groups, level, by)
        session = _session_level(pid) if _sessions_count() else None
    except (OSError, ValueError, IndexError):
        return None
    if session:
        return Priority(level=session, by="session", behind=EVERYBODY)
    return _within(EVERYBODY if session is None else ITS_SESSION, level, by)


def _within(those: str, level: int, by: str) -> Priority:
    if not level and by == "nice":
        return Priority(level=0, by="nothing", behind=NOBODY)
    return Priority(level=level, by=by, behind=those)


def _in_groups(groups: list[tuple[str, float]], level: int, by: str) -> Priority:
    """A light group makes way for all in the group around it; the outermost one counts."""
    around = EVERYBODY
    for path, weight in groups:
        if weight <= LIGHT:
            return Priority(level=level, by="group", behind=around)
        around = path
    return _within(around, level, by)


def waited(pid: int) -> float:
    """Seconds for which a process was kept from running, the thread for which it was longest; 0 if
    that is not told."""
    longest = 0
    for thread in (_PROC / str(pid)).glob("task/*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            longest = max(longest, int(thread.read_text(encoding="utf-8").split()[1]))
    return longest / 1e9


def _is_idle_class(pid: int) -> bool:
    """Of the main thread, which starts the others."""
    after_name = (_PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(after_name[38]) == _IDLE_CLASS


def _sessions_count() -> bool:
    try:
        return (_PROC / "sys/kernel/sched_autogroup_enabled").read_text(
            encoding="utf-8"
        ).strip() == "1"
    except OSError:
        return False


def _session_level(pid: int) -> int:
    """From a line such as ``/autogroup-75 nice 19``."""
    return int((_PROC / str(pid) / "autogroup").read_text(encoding="utf-8").split()[-1])


def _weights(pid: int) -> list[tuple[str, float]]:
    """The control groups around a process that share out processors, outermost first, each with its
    part of the usual weight."""
    v2, v1 = folders_of("cpu", pid)
    # The root has no weight of its own; a container that sees itself as the root of version 2 has.
    for folders, first, file, usual in ((v2, 0, "cpu.weight", 100), (v1, 1, "cpu.shares", 1024)):
        found: list[tuple[str, float]] = []
        for group in folders[first:]:
            with suppress(OSError, ValueError):
                weight = int((group / file).read_text(encoding="utf-8")) / usual
                name = "/" + group.relative_to(folders[0]).as_posix().removeprefix(".")
                found.append((name, _IDLE_WEIGHT if _is_idle(group) else weight))
        if found:
            return found
    return []


def _is_idle(group: Path) -> bool:
    try:
        return (group / "cpu.idle").read_text(encoding="utf-8").strip() == "1"
    except OSError:
        return False
