"""The libp2p daemon ``p2pd`` as a child process, started by us instead of through hivemind: with
our Ed25519 key and our options, and to end with us even if we are killed.
"""

import asyncio
import contextlib
import ctypes
import errno
import importlib.util
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.errors import ConfigError, NodeError, PortInUse
from lowcomm_node.system.logs import log

START_DEADLINE = 60.0
STOP_DEADLINE = 5.0
RELAY_BUFFER = 256 * 1024
"""Bytes that a relay buffers per circuit and direction. p2pd's default of 16 MiB makes it no
faster."""
ANY_HOSTS = ("0.0.0.0", "::")
HAS_PRCTL = sys.platform == "linux"
_ENDING = """(while kill -0 $1 && kill -0 $2; do sleep 1; done
kill -0 $1 || kill $2) </dev/null >/dev/null 2>&1 &"""
"""Ends a second process once the first one has ended."""
_SOCKET_LIMIT = 100
"""Bytes of a unix socket's path that every platform accepts."""


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """What this machine gives as a relay, as its owner decides. p2pd enforces these."""

    peers: int = 128
    """Peers that can hold a place; 0: none."""
    circuits: int = 16
    """Circuits of one peer at once."""
    bytes: int = 4 * 1024**3
    """Of one circuit, per direction."""
    seconds: int = 1800
    """Of one circuit."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments for p2pd."""
        return (
            f"-relayService={int(self.peers > 0)}",
            f"-relayMaxReservations={self.peers}",
            f"-relayMaxCircuits={self.circuits}",
            f"-relayDataLimit={self.bytes}",
            f"-relayTimeLimit={self.seconds}s",
            # It relays for nobody that it takes for private, and nobody runs a relay where it can't
            # be reached.
            "-forceReachabilityPublic=1",
        )


def runtime_folder() -> Path:
    """The folder of control sockets: one per user, mode 0700. Raises NodeError if another user owns
    it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "lowcomm" if base else Path(tempfile.gettempdir()) / f"lowcomm-{os.getuid()}"
    )
    if len(os.fsencode(folder)) > _SOCKET_LIMIT - 30:
        folder = Path("/tmp") / f"lowcomm-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise NodeError(
            f"{folder}: {error.strerror}: set XDG_RUNTIME_DIR to a folder of your own."
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise NodeError(
            f"{folder} is open to other users: remove it, or set XDG_RUNTIME_DIR to a folder of "
            "your own."
        )
    return folder


class P2pDaemon:
    """A p2pd process. Without a ``key_file`` it gets a temporary identity."""

    def __init__(
        self,
        key_file: Path | None,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        relay: RelayLimits | None = None,
        punching: bool = True,
        relays: bool = True,
    ) -> None:
        """``relay``: its limits as a relay; None: p2pd's own, once it knows itself to be public.

        ``punching``: whether it asks others if it can be dialed (AutoNAT), which replacing relayed
        connections needs. ``relays``: False: without ``relay`` it carries nothing for others.
        """
        self.control = runtime_folder() / f"{secrets.token_hex(8)}.sock"
        # No -bootstrapPeers: p2pd exits if none of them answers, and can't learn others later. We
        # dial them ourselves.
        self._arguments = [
            *([f"-id={key_file}"] if key_file else []),
            f"-listen=/unix{self.control}",
            f"-hostAddrs={','.join(listen)}",
            *([f"-announceAddrs={','.join(announce)}"] if announce else []),
            "-dhtServer=1",
            f"-autonat={int(punching)}",
            "-natPortMap=0",
            "-relay=1",
            "-relayDiscovery=0",
            f"-relayBufferSize={RELAY_BUFFER}",
            "-tls=1",
            *(relay.arguments if relay else () if relays else ("-relayService=0",)),
        ]
        # With one thread p2pd keeps its limits as a relay more often: see relays.py
        self._environment = {"GOMAXPROCS": "1"} if relay and relay.peers > 0 else {}
        self._listen = listen
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it and wait until it listens. Raises PortInUse, ConfigError if an address can't be
        listened on, NodeError with what it printed last."""
        for address in self._listen:
            _check_free(address)
        try:
            await self._start()
        except _EndedMute as error:
            # A fork of a process with threads may abort before it has become p2pd.
            log.info("p2pd.again", reason=str(error))
            await self._start()

    async def _start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(find_p2pd()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={
                    **os.environ,
                    "GOLOG_LOG_FMT": "json",
                    "GOLOG_LOG_LEVEL": "error",
                    **self._environment,
                },
                preexec_fn=_ending_with(os.getpid()) if HAS_PRCTL else None,
                start_new_session=True,  # Ctrl-C and SIGHUP are ours: the goodbye needs p2pd
            )
        except OSError as error:
            raise NodeError(
                f"p2pd can't run on this machine ({error.strerror}): lowcomm needs Linux on x86-64 "
                "or ARM64."
            ) from None
        if not HAS_PRCTL:
            command = ["sh", "-c", _ENDING, "sh", str(os.getpid()), str(self._process.pid)]
            await asyncio.to_thread(subprocess.run, command, start_new_session=True)
        try:
            async with asyncio.timeout(START_DEADLINE):
                await self._wait_ready(self._process)
        except TimeoutError:
            raise NodeError(
                f"p2pd did not start within {START_DEADLINE:g} s: is this machine overloaded?"
            ) from None
        finally:
            # Also when we are cancelled: a child that nobody drains or stops must not stay.
            if self._draining is None:
                await self.stop()

    async def stop(self) -> None:
        """End it by its own process id, and remove its socket."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_DEADLINE):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
        self.control.unlink(missing_ok=True)

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        last = ""
        while (line := await _read_line(process)) is not None:
            last = line or last
            if line.startswith("Peer ID:"):
                self._draining = asyncio.create_task(_drain(process))
                return
        await process.wait()
        if "address already in use" in last or "failed to listen" in last:
            raise PortInUse(
                f"{', '.join(self._listen)} is in use: choose another port, or 0 for any free one."
            )
        if not last and (process.returncode or 0) < 0:
            raise _EndedMute(
                f"p2pd ended at once: a signal ended it ({-(process.returncode or 0)})"
            )
        raise NodeError(f"p2pd ended at once: {last[:300] or f'exit code {process.returncode}'}")


class _EndedMute(NodeError):
    """A signal ended it before it printed anything."""


async def _read_line(process: asyncio.subprocess.Process) -> str | None:
    """The next line of its output; None at the end. A line longer than the buffer is lost."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except ValueError:
        return ""
    return line.decode(errors="replace").strip() if line else None


async def _drain(process: asyncio.subprocess.Process) -> None:
    while (line := await _read_line(process)) is not None:
        log.debug("p2pd", line=line[:500])


def numeric(host: str) -> str:
    """The IP address of this machine that an owner means: by an address, with brackets or without,
    or by a name. Raises ConfigError."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        answers = socket.getaddrinfo(bare or "?", None, type=socket.SOCK_STREAM)
        # Most peers have IPv4.
        number = min((str(answer[4][0]) for answer in answers), key=lambda one: ":" in one)
        return str(ipaddress.ip_address(number.partition("%")[0]))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise ConfigError(
            f"--host {host} can't be looked up ({reason}): give an address of this machine, such "
            "as 0.0.0.0 or :: for all."
        ) from None


def listeners(host: str, port: int) -> tuple[str, ...]:
    """Listening addresses for a host, over TCP and QUIC. "0.0.0.0" and "::" include the other
    version if the machine has IPv6."""
    hosts = ANY_HOSTS if host in ANY_HOSTS and has_ipv6() else (host,)
    places = [f"/{'ip6' if ':' in one else 'ip4'}/{one}" for one in hosts]
    return tuple(
        f"{place}/{rest}" for place in places for rest in (f"tcp/{port}", f"udp/{port}/quic-v1")
    )


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _check_free(listen: str) -> None:
    """Raise PortInUse if a port is taken. p2pd would share it, and each connection would reach one
    of the two by chance."""
    _, family, host, transport, port, *_ = [*listen.split("/"), "", "", "", "", ""]
    is_known = family in ("ip4", "ip6") and transport in ("tcp", "udp")
    if not is_known or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{listen!r} can't be listened on: expected an address such as /ip4/0.0.0.0/tcp/31337."
        )
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    free_port(host, int(port), kind, listen, "another port")


def free_port(
    host: str,
    port: int,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    name: str = "",
    choice: str = "another with --port",
) -> int:
    """A port that nobody listens on: ``port``, or any if that is 0.

    Raises PortInUse, and ConfigError for an address that is not of this machine. ``name``,
    ``choice``: what they say is taken, and is to be chosen.
    """
    host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=kind)[0]
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            if kind is socket.SOCK_STREAM:
                probe.listen()
            return probe.getsockname()[1]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = name or f"Port {port} of {host}"
            raise PortInUse(f"{taken} is in use: choose {choice}, or 0 for any free one.") from None
        raise ConfigError(
            f"{name or f'{host}:{port}'} can't be listened on ({error.strerror}): choose an "
            f"address of this machine with --host, such as 0.0.0.0 for all, and {choice}, or 0 for "
            "any free one."
        ) from None


def find_p2pd() -> Path:
    """The p2pd in hivemind's package, found without the import, which would take seconds. Raises
    NodeError."""
    package = importlib.util.find_spec("hivemind")
    if package is None or not package.submodule_search_locations:
        raise NodeError("hivemind is not installed: install lowcomm-node again.")
    return Path(package.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"


def _ending_with(parent: int) -> Callable[[], None]:
    """A function to run in the child between fork and exec: end the child when this process
    dies."""
    prctl = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        # SIGTERM, not SIGKILL: p2pd removes its control socket on the way out.
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before prctl took effect
            os._exit(1)

    return end_with_parent
