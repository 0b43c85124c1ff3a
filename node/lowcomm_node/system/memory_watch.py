"""The machine's memory: how much there is, what processes take, and whether the owner allows it."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from lowcomm_node.system.control_groups import memory_limits

GIB = 1024**3
_PROC = Path("/proc")
_PRIVATE, _SHARED = "RssAnon:", "RssShmem:"


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """What daemon and trainer take together, in bytes."""

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
    """Why a trainer must end if it and the daemon take so many bytes; None if they may.

    ``allowed`` is in GiB.
    """
    if allowed is None or taken <= allowed * GIB:
        return None
    return (
        f"out of memory: daemon and trainer take {taken / GIB:.2f} GiB, --max-memory allows "
        f"{allowed:g}: raise it, or take part from a larger machine"
    )
