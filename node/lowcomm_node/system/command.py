"""The first and last moments of a command: standard streams, imports, Ctrl-C, exit code.

Imports little itself, because Ctrl-C prints a traceback before ``run_command`` runs.
"""

import ctypes
import gc
import io
import logging
import os
import platform
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import Any, NoReturn

from lowcomm_node.errors import ConfigError, Incompatible

INTERRUPTED = 130
_LOG = logging.getLogger("lowcomm")


def run_command(module: str) -> NoReturn:
    """Import a module, call its ``main``, and end the process with the exit code."""
    open_streams()
    code = 0
    try:
        with importing():
            loaded = import_module(module)
        loaded.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        if not was_interrupted(error):
            raise
        code = INTERRUPTED
    end(code)


def end(code: int) -> NoReturn:
    """End the process at once: unloading torch and gRPC takes seconds, which Docker may not
    wait."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or nobody reads any more
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line at once; go on where nobody reads it, or the disk behind it is full."""
    with suppress(OSError):
        print(text, flush=True)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C led to this error: imports and clean-up may turn one into another."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def importing() -> Iterator[None]:
    """Context for large imports: a sixth faster without searches for garbage, now and later.

    Ctrl-C ends the process at once: as an exception, it could be lost in a callback of the import
    system. Another handler, or none, is a choice to keep.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


def open_streams() -> None:
    """Open standard streams that the caller has closed, and print any text in any locale.

    Otherwise a socket would get the number of a closed stream, and receive what is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that closes, unless ``nohup`` has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding_signals() -> Iterator[None]:
    """Context in which signals that end a process unwind it like Ctrl-C, as its children need."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, also by SIGKILL."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


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


def program() -> str:
    """How the owner starts this program in a shell: by its name, else its path, else through
    Python."""
    name = "lowcomm-node"
    script, in_path = Path(sys.executable).parent / name, shutil.which(name)
    if in_path is not None and (not script.exists() or script.samefile(in_path)):
        return name
    if not script.exists():
        return shlex.join([sys.executable, "-m", "lowcomm_node"])
    with suppress(OSError, ValueError):  # the folder was removed, or is another one
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))


def install(library: str) -> str:
    """The command that adds a library to this installation; ``library``: a requirement, or one of
    our own extras, such as ``[gguf]``."""
    prefix, names = Path(sys.prefix), [library]
    is_pipx = prefix.parent.name == "venvs" and "pipx" in prefix.parts
    is_uv = prefix.parent.name == "tools" and "uv" in prefix.parts
    if not is_pipx and not is_uv:
        package = "lowcomm-node" if library.startswith("[") else ""
        return f"{shlex.quote(sys.executable)} -m pip install '{package}{library}'"
    if library.startswith("["):
        extra = f'extra == "{library[1:-1]}"'
        required = (text.partition(";") for text in requires("lowcomm-node") or ())
        names = [name.strip() for name, _, when in required if extra in when.replace("'", '"')]
    if is_pipx:
        return f"pipx inject {prefix.name} {shlex.join(names)}"
    return f"uv tool install {prefix.name} " + " ".join(f"--with {shlex.quote(n)}" for n in names)


def load_optional(module: str, user: str, extra: str) -> Any:
    """A module that an extra brings. Raises ConfigError that says how its ``user`` gets it."""
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise ConfigError(f"{user} needs the library {library}: {install(f'[{extra}]')}.") from None


def raise_descriptors(limit: int = DESCRIPTORS) -> int:
    """Raise the soft limit of open files towards the hard one; returns the limit then in force.

    Many systems begin with 1024, less than the sum of our limits on connections.
    """
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError) as error:  # such as a sandbox that does not let us
        _LOG.warning("The limit of open files stays %d: %s", soft, error)
        return soft
    return most


def check_system(find_p2pd: Callable[[], Path]) -> None:
    """Raise Incompatible with what this system lacks; errors of ``find_p2pd`` pass through."""
    if sys.platform == "win32":
        raise Incompatible(WINDOWS)
    p2pd, system = find_p2pd(), f"{platform.system()} on {platform.machine()}"
    if not p2pd.is_file():
        raise Incompatible(
            f"This installation of hivemind has no p2pd for {system}, without which no peer is "
            "found: its wheels for Linux (glibc) and macOS on x86-64 and ARM64 have one. Use such "
            "a machine, or a container of that kind."
        )
    if not os.access(p2pd, os.X_OK):
        raise Incompatible(
            f"{p2pd} can't be executed: install lowcomm-node again, on a file system that is "
            "not mounted noexec."
        )
    if sys.platform != "linux":
        _LOG.warning("lowcomm is tried on Linux only, not on %s: tell us how it went", system)
