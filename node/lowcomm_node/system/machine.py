"""This machine: its limits and memory, and how training makes way for others.

Linux shares processors out twice: between groups of processes by weight, then within a group by
nice level and scheduling class. A group is a control group where the cpu controller is on (services
of systemd, containers, desktops), else a session (kernel.sched_autogroup_enabled), else the whole
machine. So ``step_back`` gives the trainer a session of its own, and the level to that session. The
weight of a control group is its owner's to set, as the units in docker/systemd do.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import sleep

import psutil

GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
GIB = 1024**3


def _read(*path: Path | str | int) -> str:
    return Path(*map(str, path)).read_text(encoding="utf-8", errors="replace").strip()


# control groups


def folders_of(controller: str) -> Iterator[list[Path]]:
    """Yield the folders of the groups around this process, outermost first: of version 2, then of
    version 1.

    The first folder is the root that this process sees. In a container without a namespace of its
    own, /proc names the path outside, so leading names that do not exist here are dropped.
    """
    hybrid = GROUPS / "unified"
    mounts = (hybrid if hybrid.is_dir() else GROUPS, GROUPS / controller)
    paths = ["", ""]
    with suppress(OSError, ValueError):  # none here, or not Linux
        for line in _read(PROC, "self", "cgroup").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                paths[0] = path
            elif controller in controllers.split(","):
                paths[1] = path
    for mount, path in zip(mounts, paths, strict=True):
        names = [name for name in path.split("/") if name]
        while names and not mount.joinpath(*names).is_dir():
            del names[0]
        yield [mount.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def memory_limits() -> Iterator[tuple[int, int]]:
    """Yield each limit on this process's memory, and the part of it that is free, in bytes."""
    v2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
    v1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    for folders, (limits, usage, cached) in zip(folders_of("memory"), (v2, v1), strict=True):
        for folder, name in product(folders, limits):
            with suppress(OSError, ValueError):  # no limit is written as "max"
                limit, free = int(_read(folder, name)), -int(_read(folder, usage))
                # The kernel drops what it keeps of files before it ends a process.
                with suppress(OSError):
                    kept = re.findall(rf"^{cached} (\d+)$", _read(folder, "memory.stat"), re.M)
                    free += sum(map(int, kept))
                yield limit, max(0, limit + free)


def cores_allowed() -> float:
    """Cores' worth of time that this process may take; infinity if it is not bounded."""
    least = float("inf")
    for folder in (folder for folders in folders_of("cpu") for folder in folders):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # no limit is written as "max", or as -1
                quota, period = " ".join(_read(folder, file) for file in files).split()
                least = min(least, int(quota) / int(period)) if int(quota) > 0 else least
    return least


# memory


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """Memory of daemon and trainer together, in bytes."""

    reckoned: int
    """The most that the run needs here, as estimated before it began; 0 if unknown."""
    taken: int
    """Now."""
    most: int
    """Peak since the trainer started, sampled once a second."""


def memory_of_machine() -> tuple[int, int]:
    """Bytes in all, and free bytes: within the control groups around us, too."""
    memory = psutil.virtual_memory()
    bounds = [(memory.total, memory.available), *memory_limits()]
    return min(total for total, _ in bounds), min(free for _, free in bounds)


def memory_of(pid: int, shared: bool = True) -> int:
    """Bytes that a process takes; 0 if it has gone. ``shared``: with memory that others share.

    Mapped files do not count: the kernel drops them at need.
    """
    kinds = "RssAnon|RssShmem" if shared else "RssAnon"
    with suppress(OSError):
        sizes = re.findall(rf"^(?:{kinds}):\s+(\d+) kB", _read(PROC, pid, "status"), re.M)
        return 1024 * sum(map(int, sizes))
    with suppress(psutil.Error):  # not Linux
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def too_much(taken: int, allowed: float | None) -> str | None:
    """Why a trainer must end if it and the daemon take ``taken`` bytes of ``allowed`` GiB; None if
    they may."""
    if allowed is None or taken <= allowed * GIB:
        return None
    return (
        f"out of memory: daemon and trainer take {taken / GIB:.2f} GiB, --max-memory allows "
        f"{allowed:g}: raise it, or take part from a larger machine"
    )


def keep_freed_memory() -> None:
    """Have the C library of Linux reuse freed memory: buffers of up to 4 MiB, and 32 MiB of heap.

    Call it before threads exist.
    """
    trim_threshold, mmap_threshold = -1, -3  # parameters of mallopt(3)
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 4 * 1024**2)
        mallopt(trim_threshold, 32 * 1024**2)


def can_compile() -> bool:
    """Whether Triton is there, and what it builds with: a C compiler and Python's headers.

    torch's compiler for a GPU needs the same.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return bool(compiler) and headers.exists() and importlib.util.find_spec("triton") is not None


# priority

LAST = 19
"""The level at which training gets only what nobody else wants (SCHED_IDLE)."""


def step_back(level: int) -> None:
    """Have this process and its threads make way; 0: not at all."""
    if not level:
        return
    level_now = os.nice(level)
    if sys.platform != "linux":
        return
    for path in (PROC / "self" / "task").iterdir():
        thread = int(path.name)
        with suppress(OSError):  # it has ended; threads that libraries start keep their own level
            os.setpriority(os.PRIO_PROCESS, thread, level_now)
            if level >= LAST:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    if _has_weight():
        return
    with suppress(OSError):  # it leads a group, or sessions don't count
        if _read(PROC, "sys/kernel/sched_autogroup_enabled") != "1":
            return
        if os.getsid(0) != os.getpid():
            os.setsid()
        for _ in range(3):  # without privileges the kernel takes one such change in 0.1 s
            try:
                (PROC / "self" / "autogroup").write_text(str(level), encoding="utf-8")
                return
            except BlockingIOError:
                sleep(0.11)


def waited(pid: int) -> float:
    """Seconds for which a process was kept from running, of its slowest thread; 0 if unknown."""
    longest = 0
    for thread in (PROC / str(pid)).glob("task/*/schedstat"):
        with suppress(OSError, ValueError, IndexError):
            longest = max(longest, int(_read(thread).split()[1]))
    return longest / 1e9


def _has_weight() -> bool:
    """Whether control groups share out the processors: where they do, sessions don't count."""
    v2, v1 = folders_of("cpu")
    # The root of version 1 always has a weight.
    files = [folder / "cpu.weight" for folder in v2] + [folder / "cpu.shares" for folder in v1[1:]]
    return any(file.exists() for file in files)
