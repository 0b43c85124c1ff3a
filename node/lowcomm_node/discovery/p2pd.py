"""The libp2p daemon ``p2pd`` as a child process.

We start it ourselves rather than through hivemind, so that it reads our Ed25519 key, ends with us even when we are killed
(Linux: parent-death signal; it then removes its own control socket), and gets every option that we need.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowcomm_node.errors import NodeError, PortInUse
from lowcomm_node.logs import log

START_DEADLINE = 60.0
STOP_DEADLINE = 5.0
_SOCKET_LIMIT = 100
"""Bytes of a unix socket's path that every platform takes."""


def runtime_folder() -> Path:
    """Where control sockets lie: one folder a user, 0700. Raises NodeError if somebody else owns it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "lowcomm" if base else Path(tempfile.gettempdir()) / f"lowcomm-{os.getuid()}"
    if len(str(folder)) > _SOCKET_LIMIT - 30:
        folder = Path("/tmp") / f"lowcomm-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise NodeError(f"{folder} is open to other users: remove it, or set XDG_RUNTIME_DIR to a folder of your own.")
    return folder


class P2pDaemon:
    """One running p2pd."""

    def __init__(self, key_file: Path, listen: Sequence[str]) -> None:
        self.control = runtime_folder() / f"{secrets.token_hex(8)}.sock"
        self._arguments = [
            f"-id={key_file}",
            f"-listen=/unix{self.control}",
            f"-hostAddrs={','.join(listen)}",
            "-dhtServer=1",
            "-autonat=1",
            "-natPortMap=0",
            "-relay=1",
            "-relayDiscovery=0",
            "-tls=1",
        ]
        # No -bootstrapPeers: p2pd ends at once if none of them answers, and can't be told of others later. We dial.
        self._listen = listen
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None
        self._last_line = ""

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it and wait until it listens. Raises PortInUse, or NodeError with what it printed last."""
        for address in self._listen:
            _check_free(address)
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(_binary()),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_FMT": "json", "GOLOG_LOG_LEVEL": "error"},
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise NodeError(f"p2pd can't run on this machine ({error.strerror}): lowcomm needs Linux x86-64.") from None
        try:
            async with asyncio.timeout(START_DEADLINE):
                await self._wait_ready(self._process)
        except TimeoutError:
            await self.stop()
            raise NodeError(f"p2pd did not start within {START_DEADLINE:.0f} s: is this machine overloaded?") from None
        self._draining = asyncio.create_task(self._drain(self._process))

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
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._last_line = line.decode(errors="replace").strip() or self._last_line
            if self._last_line.startswith("Peer ID:"):
                return
            if "address already in use" in self._last_line:
                await self.stop()
                raise PortInUse(f"{', '.join(self._listen)} is in use: choose another port, or 0 for any free one.")
        await process.wait()
        self.control.unlink(missing_ok=True)
        if "failed to listen" in self._last_line:
            raise PortInUse(
                f"{', '.join(self._listen)} can't be listened on: choose another port, or 0 for any free one."
            )
        raise NodeError(f"p2pd ended at once: {self._last_line[:300]}")

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the buffer
                continue
            if not line:
                return
            log.debug("p2pd", line=line.decode(errors="replace").strip()[:500])


def _check_free(listen: str) -> None:
    """Raise PortInUse if a TCP port is taken: p2pd would share it, and each connection reach one of the two by chance."""
    _, family, host, transport, port, *_ = [*listen.split("/"), "", "", ""]
    if transport != "tcp" or port == "0" or family not in ("ip4", "ip6"):
        return
    with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise PortInUse(
                f"{listen} can't be listened on ({error.strerror}): choose another port, or 0 for any."
            ) from None


def _binary() -> Path:
    import hivemind.hivemind_cli as cli  # takes seconds to import

    return Path(next(iter(cli.__path__))) / "p2pd"


def _end_with_parent() -> None:
    # Runs between fork and exec. SIGTERM, not SIGKILL: p2pd removes its control socket on the way out.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
