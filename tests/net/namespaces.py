"""Network namespaces that do not outlive whoever made them.

Their names tell the process that made them: ``lc-<pid>-<when that process started>-<number of the
laboratory>-<name>``. A warden, a small process of its own, removes those of its laboratory when the
process that holds it dies, however it dies. Should the warden be killed as well, the next
laboratory on this machine finds and removes what is left.

Also a script: ``namespaces.py PREFIX`` is the warden, so only what starts fast is imported here.
"""

import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

FOLDER = Path("/run/netns")
DEADLINE = 20.0
"""Seconds for anything that the machine does at once when it is idle."""
TOOLS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "iptables-restore": "iptables",
    "ip6tables-restore": "iptables",
    "ipset": "ipset",
}
"""Commands, and Debian's packages of them."""
_NAME = re.compile(r"lc-(\d+)-(\d+)-\d+-.+")
_NET_ADMIN, _SYS_ADMIN = 12, 21
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class LaboratoryError(RuntimeError):
    """The laboratory could not do what it was asked to."""


def missing() -> str | None:
    """What this machine lacks for a laboratory, and the remedy; None: nothing."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    capabilities = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
    if not (capabilities >> _NET_ADMIN & 1 and capabilities >> _SYS_ADMIN & 1):
        return "network namespaces need root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    packages = sorted(
        {
            package
            for command, package in TOOLS.items()
            if shutil.which(command, path=_path()) is None
        }
    )
    if packages:
        return f"apt-get install -y {' '.join(packages)}"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun: modprobe tun, or start the container with --device /dev/net/tun"
    return None


def tool(*command: str, text: str | None = None) -> str:
    """Run a command of the system to its end; what it printed. Raises LaboratoryError with what it
    complained of."""
    environment = os.environ | {"PATH": _path(), "LC_ALL": "C"}
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise LaboratoryError(f"{' '.join(command)}: {done.stderr.strip()}\n{text or ''}".strip())
    return done.stdout


def prefix(number: int) -> str:
    """How the names of a laboratory of this process begin."""
    return f"lc-{os.getpid()}-{_started(os.getpid())}-{number}-"


def existing(prefix: str) -> list[str]:
    """The namespaces of a laboratory."""
    return sorted(path.name for path in FOLDER.glob(f"{prefix}*"))


def remove(prefix: str) -> None:
    """Kill whatever runs in the namespaces of a laboratory, and remove them. Raises
    LaboratoryError."""
    names = existing(prefix)
    kill(names)
    for name in names:
        try:
            tool("ip", "netns", "delete", name)
        except LaboratoryError:
            # Two processes may remove the same leftovers at the same time.
            if (FOLDER / name).exists():
                raise


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are dead."""
    for path in FOLDER.glob("lc-*"):
        match = _NAME.fullmatch(path.name)
        if match and _started(int(match[1])) != match[2]:
            remove(path.name)


def processes(names: Iterable[str]) -> list[int]:
    """Ids of the processes in these namespaces."""
    inodes = set()
    for name in names:
        with suppress(FileNotFoundError):
            inodes.add((FOLDER / name).stat().st_ino)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (path / "ns" / "net").stat().st_ino in inodes:
                found.append(int(path.name))
    return found


def kill(names: Iterable[str]) -> None:
    """Kill every process in these namespaces, and wait until none is left. Raises
    LaboratoryError."""
    end = monotonic() + DEADLINE
    names = list(names)
    # Again and again: what has been forked meanwhile was not in the list.
    while pids := processes(names):
        for pid in pids:
            with suppress(ProcessLookupError):
                watch = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(watch, signal.SIGKILL)
                    select.select([watch], (), (), max(0.0, end - monotonic()))
                finally:
                    os.close(watch)
        if monotonic() > end:
            raise LaboratoryError(f"processes {pids} of {', '.join(names)} survive SIGKILL")


def end_processes(namespaces: Sequence["Namespace"], grace: float) -> None:
    """End what ``popen`` has started in these, within ``grace`` seconds of its own accord, and
    close their sockets."""
    for namespace in namespaces:
        for made in namespace.sockets:
            made.close()
    children = [child for namespace in namespaces for child in namespace.children]
    for child in children:
        if child.poll() is None:
            child.terminate()
    end = monotonic() + grace
    for child in children:
        try:
            child.wait(max(0.0, end - monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Namespace:
    """A network namespace; the laboratory that made it removes it. Raises LaboratoryError."""

    def __init__(self, prefix: str, name: str) -> None:
        self.name = name
        self.namespace = prefix + name
        tool("ip", "netns", "add", self.namespace)
        self.children: list[subprocess.Popen[Any]] = []
        self.sockets: list[socket.socket] = []
        self.ip("link set lo up")

    @property
    def path(self) -> Path:
        """The file that stands for it."""
        return FOLDER / self.namespace

    def command(self, arguments: Sequence[str | Path]) -> list[str]:
        """The command line that runs a command line in here; its process id is that of the command
        itself."""
        return ["nsenter", f"--net={self.path}", "--", *map(str, arguments)]

    def run(
        self, arguments: Sequence[str | Path], timeout: float = 60, **options: Any
    ) -> subprocess.CompletedProcess:
        """Run a command in here to its end, as ``subprocess.run`` does: text, captured, and its
        exit code is left to the caller. ``timeout`` in seconds; raises
        subprocess.TimeoutExpired."""
        options = {"capture_output": True, "text": True, "check": False} | options
        return subprocess.run(self.command(arguments), timeout=timeout, **options)

    def popen(self, arguments: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in here, as ``subprocess.Popen`` does; the laboratory ends it."""
        child = subprocess.Popen(self.command(arguments), **options)
        self.children.append(child)
        return child

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is in here meanwhile: what it opens stays in here, what other threads open
        does not."""
        with Path("/proc/thread-self/ns/net").open() as home, self.path.open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def socket(
        self, kind: int = socket.SOCK_DGRAM, port: int = 0, version: int = 4
    ) -> socket.socket:
        """A socket of this host, bound to all addresses of IPv4 or IPv6, that waits for no longer
        than ``DEADLINE``. Others may bind the same port. The laboratory closes it."""
        with self.inside():
            made = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, kind)
        self.sockets.append(made)
        made.settimeout(DEADLINE)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("::" if version == 6 else "0.0.0.0", port))
        return made

    def ip(self, *lines: str) -> None:
        """Carry out commands of iproute2 in here, all or up to the first that fails. Raises
        LaboratoryError."""
        tool("ip", "-n", self.namespace, "-batch", "-", text="\n".join(lines) + "\n")

    def sysctl(self, settings: dict[str, object]) -> None:
        """Set kernel parameters of this namespace, named by their paths under /proc/sys/net."""
        with self.inside():
            for path, value in settings.items():
                (Path("/proc/sys/net") / path).write_text(f"{value}\n")


class Warden:
    """Watches over a laboratory: when this process dies, it removes what the laboratory has
    made."""

    def __init__(self, prefix: str) -> None:
        # A session of its own: what ends the tests from a terminal must not end it too.
        self.process = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", __file__, prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it go; it removes what is left."""
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _path() -> str:
    # Root's commands are not in everybody's PATH.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot: with its id it names one process for good."""
    try:
        # The second field is the command in brackets, and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
