"""Whether this system can take part in a swarm, and how this program is called here.

Checked before anything is loaded, so that the answer is one line.
"""

import errno
import os
import platform
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import requires
from pathlib import Path

from lowcomm_node.errors import Incompatible, PortInUse
from lowcomm_node.system.logs import log

ONLY_ELSEWHERE = ("fcntl", "hivemind")
"""Modules missing on systems where no command that needs them can work."""
DESCRIPTORS = 65_536
"""Open files: authenticated connections (1024), others (256), streams of p2pd, shards of a
corpus."""
WINDOWS = (
    "lowcomm can't take part in a swarm on Windows: hivemind, by which peers find each other, has "
    "no package for it. Install lowcomm-node inside WSL 2 (`wsl --install`), which is a Linux on "
    "the same machine."
)


def program(name: str = "lowcomm-node") -> str:
    """How the owner starts this program in a shell: by its name, else its path, else through
    Python."""
    script = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and (not script.exists() or script.samefile(found)):
        return name
    if not script.exists():
        return shlex.join([sys.executable, "-m", "lowcomm_node"])
    with suppress(OSError):  # the current folder has been removed
        here = Path.cwd()
        script = script.relative_to(here) if script.is_relative_to(here) else script
    return shlex.quote(str(script))


def install(wanted: str) -> str:
    """The command that adds a library to this installation: a requirement, or one of our own
    extras, written such as ``[gguf]``."""
    prefix, names = Path(sys.prefix), [wanted]
    is_pipx = prefix.parent.name == "venvs" and "pipx" in prefix.parts
    is_uv = prefix.parent.name == "tools" and "uv" in prefix.parts
    if wanted.startswith("[") and (is_pipx or is_uv):
        ours = f'extra == "{wanted[1:-1]}"'
        needed = (one.partition(";") for one in requires("lowcomm-node") or ())
        names = [name.strip() for name, _, when in needed if ours in when.replace("'", '"')]
    if is_pipx:
        return f"pipx inject {prefix.name} {shlex.join(names)}"
    if is_uv:
        return f"uv tool install {prefix.name} " + " ".join(
            f"--with {shlex.quote(one)}" for one in names
        )
    pip = Path(sys.executable).parent / "pip"
    found = shutil.which("pip")
    is_ours = found is not None and pip.exists() and pip.samefile(found)
    command = "pip" if is_ours else f"{shlex.quote(sys.executable)} -m pip"
    return f"{command} install '{'lowcomm-node' if wanted.startswith('[') else ''}{wanted}'"


def raise_descriptors(wanted: int = DESCRIPTORS) -> int:
    """Raise the soft limit of open files towards the hard one; returns the limit then in force.

    Many systems begin with 1024, less than the sum of our limits on connections.
    """
    if sys.platform == "win32":
        return 0
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:  # such as a sandbox that does not let us
        log.warning("system.descriptors", limit=soft, reason=str(error))
        return soft
    return most


def check_system(find_p2pd: Callable[[], Path]) -> None:
    """Raise Incompatible with what this system lacks; errors of ``find_p2pd`` pass through."""
    if sys.platform == "win32":
        raise Incompatible(WINDOWS)
    program, here = find_p2pd(), f"{platform.system()} on {platform.machine()}"
    if not program.is_file():
        raise Incompatible(
            f"This installation of hivemind has no p2pd for {here}, without which no peer is "
            "found: its wheels for Linux (glibc) and macOS on x86-64 and ARM64 have one. Use such "
            "a machine, or a container of that kind."
        )
    if not os.access(program, os.X_OK):
        raise Incompatible(
            f"{program} can't be executed: install lowcomm-node again, on a file system that is "
            "not mounted noexec."
        )
    if sys.platform != "linux":
        log.warning(
            "system.untried",
            system=here,
            told="lowcomm is tried on Linux only: tell us how it went",
        )


def check_port(host: str, port: int, option: str) -> None:
    """Raise PortInUse if another program listens at a port of a host. Other troubles with it show
    when it is used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} of {host} is in use: choose another with --{option}, or 0 for any "
                "free one."
            ) from None
