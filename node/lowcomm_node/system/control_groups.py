"""Control groups around a process: what its container, service or job may take of the machine."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
