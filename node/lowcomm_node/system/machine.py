"""This machine: limits of the control groups around us, memory, the C library, the compiler."""

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def folders_of(controller: str, pid: int | str = "self") -> Iterator[list[Path]]:
    """Yield the folders of the groups around a process, outermost first: of version 2, then of
    version 1.

    The first folder is the root that this process sees. In a container without a namespace of its
    own, /proc names the path outside, so leading names that do not exist here are dropped.
    """
    hybrid = GROUPS / "unified"
    mounts = (hybrid if hybrid.is_dir() else GROUPS, GROUPS / controller)
    paths = ["", ""]
    with suppress(OSError, ValueError):  # none here, or not Linux
        for line in (PROC / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
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
        for folder in folders:
            for name in limits:
                with suppress(OSError, ValueError):  # no limit is written as "max"
                    limit, used = _number(folder / name), _number(folder / usage)
                    # The kernel drops what it keeps of files before it ends a process.
                    yield limit, max(0, limit - used + _statistic(folder / "memory.stat", cached))


def cores_allowed() -> float:
    """Cores' worth of time that this process may take; infinity if it is not bounded."""
    least = float("inf")
    v2, v1 = folders_of("cpu")
    for folder in v2:
        with suppress(OSError, ValueError):  # no limit is written as "max"
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            least = min(least, int(quota) / int(period))
    for folder in v1:
        with suppress(OSError, ValueError):
            quota, period = (_number(folder / f"cpu.cfs_{one}_us") for one in ("quota", "period"))
            least = min(least, quota / period) if quota > 0 else least
    return least


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))


def _statistic(path: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


GIB = 1024**3
_PROC = Path("/proc")
_PRIVATE, _SHARED = "RssAnon:", "RssShmem:"


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """Memory of daemon and trainer together, in bytes."""

    reckoned: int
    """The most that the run needs here, as reckoned before it began; 0 if that is not told."""
    taken: int
    """Now."""
    most: int
    """The most that was seen since the trainer started, looked at once a second."""


def memory_of_machine() -> tuple[int, int]:
    """Bytes in all, and those that are free: within the control groups around us, too."""
    found = psutil.virtual_memory()
    bounds = [(found.total, found.available), *memory_limits()]
    return min(total for total, _ in bounds), min(free for _, free in bounds)


def memory_of_node(daemon: int, trainer: int) -> int:
    """Bytes that both processes take; fragments, which they share, count once."""
    return memory_of(daemon, shared=False) + memory_of(trainer)


def memory_of(pid: int, shared: bool = True) -> int:
    """Bytes that a process takes; 0 if it has gone. ``shared``: with memory that others share.

    Mapped files do not count: the kernel drops them at need.
    """
    counted = (_PRIVATE, _SHARED) if shared else (_PRIVATE,)
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(counted))
    except (OSError, ValueError, IndexError):
        pass
    try:  # not Linux
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def too_much(taken: int, allowed: float | None) -> str | None:
    """Why a trainer must end if it and the daemon take this many bytes; None if they may.

    ``allowed`` is in GiB.
    """
    if allowed is None or taken <= allowed * GIB:
        return None
    return (
        f"out of memory: daemon and trainer take {taken / GIB:.2f} GiB, --max-memory allows "
        f"{allowed:g}: raise it, or take part from a larger machine"
    )


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
KEPT = 32 * 1024**2
"""Free bytes at the end of a heap that are kept."""
LARGE = 4 * 1024**2
"""Bytes of an allocation above which the kernel maps it separately."""


def keep_freed_memory() -> bool:
    """Have this process reuse freed memory. Returns whether that worked.

    Call it before threads exist.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE) and mallopt(_TRIM_THRESHOLD, KEPT))


def can_compile() -> bool:
    """Whether Triton is there, and what it builds with: a C compiler and Python's headers.

    torch's compiler for a GPU needs the same.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        compiler is not None and headers.exists() and importlib.util.find_spec("triton") is not None
    )
