"""Checks of this machine: how its TCP sends, disk, memory, GPU."""

import os
import re
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from lowcomm_node.doctor.findings import Finding, Observations, Severity
from lowcomm_node.net.congestion import BBR, LOSSY
from lowcomm_node.system.machine import memory_of_machine
from lowcomm_node.system.priority import EVERYBODY, ITS_SESSION, NOBODY
from lowcomm_node.system.units import size

LITTLE_DISK, TOO_LITTLE_DISK = 2e9, 2e8
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 1e9, 256e6
LITTLE_GPU = 1e9
GPU_DEADLINE = 10.0
FEWEST_SEGMENTS = 10_000
"""TCP segments sent since the machine started: fewer show nothing of what is lost."""
_MEANS = {
    "nice": "nice {level}",
    "idle": "SCHED_IDLE",
    "session": "its session has nice {level}",
    "group": "its control group has a low weight",
}
_QUERY = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]


class Gpu(NamedTuple):
    """A GPU that the driver reports; sizes in bytes."""

    name: str
    total: int
    free: int


def congestion(seen: Observations) -> Finding:
    """Whether TCP copes with a line that loses packets."""
    used, allowed = congestion_controls()
    if not used:
        return Finding("congestion", Severity.UNKNOWN, "this system does not show it")
    resent = resent_share()
    figures = {"tcp": used, "allowed": allowed, "resent": resent}
    value = f"TCP uses {used}"
    if resent is not None:
        value += f"; {100 * resent:.2f} % of segments were sent again"
    if used == BBR or resent is None or resent <= LOSSY:
        return Finding("congestion", Severity.OK, value, "", figures)
    if BBR in allowed:
        value += "; a node's connections that lose go on with bbr"
        return Finding("congestion", Severity.OK, value, "", figures)
    remedy = (
        "run `sysctl -w net.ipv4.tcp_congestion_control=bbr net.core.default_qdisc=fq` as root "
        f"(now it is {used}), and put both lines into /etc/sysctl.d/ to keep them"
    )
    return Finding("congestion", Severity.WARNING, value, remedy, figures)


def congestion_controls() -> tuple[str, list[str]]:
    """That of new connections, and those that any user may choose; empty where not known."""
    try:
        with socket.socket() as probe:
            raw = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        allowed = (
            Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
            .read_text(encoding="utf-8")
            .split()
        )
    except (OSError, AttributeError):  # not Linux
        return "", []
    return raw.rstrip(b"\0").decode(), allowed


def resent_share(counters: Path = Path("/proc/net/snmp")) -> float | None:
    """The share of TCP segments that were sent again; None if unknown, or too few were sent."""
    try:
        lines = [line.split() for line in counters.read_text(encoding="utf-8").splitlines()]
        names, counts = (words for words in lines if words[0] == "Tcp:")
    except (OSError, ValueError):
        return None
    by_name = dict(zip(names, counts, strict=False))
    sent, again = int(by_name.get("OutSegs", 0)), int(by_name.get("RetransSegs", 0))
    return again / sent if sent >= FEWEST_SEGMENTS else None


def disk(seen: Observations) -> Finding:
    """Room at the home, which need not exist yet."""
    home = seen.home
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free, checkpoint = shutil.disk_usage(there).free, largest_checkpoint(home)
    figures = {"free": free, "checkpoint": checkpoint}
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = f"make {home} writable for this user, or choose another --home"
        return Finding("disk", Severity.FAULT, f"{home} is not writable", remedy, figures)
    each = f"; a checkpoint has {size(checkpoint)}" if checkpoint else ""
    value = f"{size(free)} free at {home}{each}"
    if free >= max(LITTLE_DISK, 5 * checkpoint):
        return Finding("disk", Severity.OK, value, "", figures)
    state = Severity.FAULT if free < max(TOO_LITTLE_DISK, 2 * checkpoint) else Severity.WARNING
    remedy = f"make room ({value}), lower --keep, or choose another --home"
    return Finding("disk", state, value, remedy, figures)


def largest_checkpoint(home: Path) -> int:
    """Bytes; 0 if there is none."""
    folders = (folder for folder in home.glob("runs/*/checkpoints/*") if folder.is_dir())
    sizes = (sum(file.stat().st_size for file in folder.iterdir()) for folder in folders)
    try:
        return max(sizes, default=0)
    except OSError:  # one is being removed right now
        return 0


def memory(seen: Observations) -> Finding:
    """Memory of this machine, or of its container."""
    total, free = memory_of_machine()
    value = f"{size(free)} free of {size(total)}"
    node = seen.status.trainer.memory if seen.status is not None else None
    figures = {"free": free, "total": total, "node": node and vars(node)}
    if node is not None:
        value += f"; the node takes {size(node.taken)} of {size(node.reckoned)} that it may need"
    if free >= LITTLE_MEMORY:
        return Finding("memory", Severity.OK, value, "", figures)
    state = Severity.FAULT if free < TOO_LITTLE_MEMORY else Severity.WARNING
    remedy = f"end other programs ({value}), or train a smaller model"
    return Finding("memory", state, value, remedy, figures)


def priority(seen: Observations) -> Finding | None:
    """Whether training steps back for the other programs of this machine."""
    found = seen.status.trainer.priority if seen.status is not None else None
    if found is None:
        return None
    figures = found.__dict__
    if found.behind == NOBODY:
        value = "training takes its share of the processors like any program (--nice 0)"
        return Finding("priority", Severity.OK, value, "", figures)
    by = _MEANS[found.by].format(level=found.level)
    if found.behind == EVERYBODY:
        value = f"training steps back for all other programs ({by})"
        return Finding("priority", Severity.OK, value, "", figures)
    those = f"the control group {found.behind}"
    if found.behind == ITS_SESSION:
        those = "its session"
    remedy = (
        "give the control group of the node a low weight: docker/systemd has services with "
        "CPUWeight, and containers take --cpu-shares 40"
    )
    value = f"training steps back for programs of {those} alone ({by})"
    return Finding("priority", Severity.WARNING, value, remedy, figures)


def gpu(seen: Observations) -> Finding:
    """Whether a GPU that is there is used."""
    found = gpus()
    figures = {"gpus": [gpu._asdict() for gpu in found]}
    if not found:
        value = "no driver reports any: trains on the CPU"
        return Finding("gpu", Severity.OK, value, "", figures)
    value = ", ".join(f"{gpu.name} ({size(gpu.free)} free of {size(gpu.total)})" for gpu in found)
    device = seen.status.trainer.device if seen.status is not None else None
    name, remedy = found[0].name, ""
    if not torch_sees_gpus():
        remedy = f"install a build of torch for CUDA to use the {name}: this one is for CPUs"
    elif device == "cpu":
        remedy = f"start the node with --device cuda: it trains on the CPU beside the {name}"
    elif device is None and max(gpu.free for gpu in found) < LITTLE_GPU:
        remedy = f"end what else uses the {name}: `nvidia-smi` shows it"
    return Finding("gpu", Severity.WARNING if remedy else Severity.OK, value, remedy, figures)


def gpus() -> list[Gpu]:
    """What the driver reports; what can't be read is left out."""
    # The driver's own tool: torch would take memory of the GPU only to look at it.
    command = ["nvidia-smi", *_QUERY]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GPU_DEADLINE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = re.findall(r"^(.+), (\d+), (\d+)\s*$", done.stdout.decode(errors="replace"), re.M)
    return [Gpu(name, int(total) << 20, int(free) << 20) for name, total, free in lines]


def torch_sees_gpus() -> bool:
    """Whether torch is built for GPUs."""
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return False
