"""This machine: disk, memory, GPU, how its TCP sends. Only looks; what it means is for ``judging``."""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from lowcomm_node.trainer.memory_watch import memory_of_machine

GPU_DEADLINE = 10.0
_PROC = Path("/proc/sys/net/ipv4")
_QUERY = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Disk:
    """Where the home lies."""

    free: int
    """Bytes that we may use."""
    checkpoint: int
    """Bytes of the largest checkpoint that is there; 0 if there is none."""
    writable: bool


@dataclass(frozen=True)
class Memory:
    """Of this machine, or of the container that we are in."""

    total: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """One that the driver tells of."""

    name: str
    total: int
    """Bytes."""
    free: int


@dataclass(frozen=True)
class Tcp:
    """How TCP sends."""

    congestion: str
    """Congestion control of new connections; empty if this system does not tell."""
    allowed: tuple[str, ...]
    """Those that any user may choose for a connection."""
    resent: float | None
    """Of all segments sent since this machine started, the part that was sent again."""


@dataclass(frozen=True)
class Machine:
    """All of it."""

    disk: Disk
    memory: Memory
    gpus: tuple[Gpu, ...]
    torch_sees_gpus: bool
    """Whether torch is built for GPUs."""
    tcp: Tcp


def look_at_machine(home: Path) -> Machine:
    """Look at everything; ``home`` need not exist yet. May take GPU_DEADLINE."""
    return Machine(_disk(home), _memory(), _gpus(), _torch_sees_gpus(), _tcp())


def own_hosts() -> tuple[str, ...]:
    """IP addresses of this machine, loopback included."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return tuple(dict.fromkeys(host for text in found if (host := _host(text))))


def outward_host(towards: str) -> str | None:
    """Which of our addresses packets to an IP address leave from; sends none. None if there is no way there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
    except OSError:
        return None


def _host(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return None


def _disk(home: Path) -> Disk:
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    sizes = (
        sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        for folder in home.glob("runs/*/checkpoints/*")
        if folder.is_dir()
    )
    try:
        largest = max(sizes, default=0)
    except OSError:  # one is being removed right now
        largest = 0
    return Disk(shutil.disk_usage(there).free, largest, os.access(there, os.W_OK | os.X_OK))


def _memory() -> Memory:
    return Memory(*memory_of_machine())


def _gpus() -> tuple[Gpu, ...]:
    # Asked of the driver's own tool: torch would take memory of the GPU only to look at it.
    try:
        told = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=GPU_DEADLINE, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_gpus(told.stdout)


def read_gpus(told: str) -> tuple[Gpu, ...]:
    """What nvidia-smi prints, a line a GPU; what can't be read is left out."""
    lines = (re.fullmatch(r"(.+), (\d+), (\d+)", line.strip()) for line in told.splitlines())
    return tuple(Gpu(line[1], int(line[2]) * 2**20, int(line[3]) * 2**20) for line in lines if line)


def _torch_sees_gpus() -> bool:
    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return False


def _tcp() -> Tcp:
    try:
        with socket.socket() as probe:
            raw = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            congestion = raw.rstrip(b"\0").decode()
        allowed = tuple((_PROC / "tcp_allowed_congestion_control").read_text().split())
    except (OSError, AttributeError):  # not Linux
        congestion, allowed = "", ()
    try:
        return Tcp(congestion, allowed, read_resent(Path("/proc/net/snmp").read_text()))
    except OSError:
        return Tcp(congestion, allowed, None)


def read_resent(snmp: str) -> float | None:
    """The part of TCP segments that were sent again, from /proc/net/snmp; None where too few were sent to tell."""
    lines = [line.split()[1:] for line in snmp.splitlines() if line.startswith("Tcp:")]
    counts = dict(zip(*lines, strict=False)) if len(lines) == 2 else {}
    sent, again = int(counts.get("OutSegs", 0)), int(counts.get("RetransSegs", 0))
    return again / sent if sent >= 10_000 else None
