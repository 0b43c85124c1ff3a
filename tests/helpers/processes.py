"""Real processes on loopback: a bootstrap server and nodes, started by the real command line,
always ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import until
from lowcomm_node.errors import NodeError
from lowcomm_node.status.model import to_json
from lowcomm_node.web.client import ControlClient

START = 150.0
TINY = """
[run]
name = "test"
steps = {steps}
start_peers = {start_peers}
[model]
layers = 1
width = 32
heads = 2
feed_forward = 64
context = 32
[train]
batch = 4
evaluate_every = {evaluate_every}
[sync]
method = "{method}"
interval = {interval}
"""


def command(module: str, *arguments: str) -> list[str]:
    """A command line of this checkout."""
    return [sys.executable, "-m", module, *arguments]


def run(module: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(module, *arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """The environment of a child: no settings of whoever runs the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOWCOMM_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Process:
    """A child whose output goes to a file."""

    launch = staticmethod(subprocess.Popen)
    """What starts it; elsewhere than on this machine's own network, another."""

    def __init__(self, home: Path, module: str, *arguments: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.log = home, home / "log"
        with self.log.open("ab") as file:
            self.child = self.launch(
                command(module, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(),
            )

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self.log.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one name that it has printed."""
        found = []
        for line in self.output.splitlines():
            if line.startswith("{"):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        return found

    def end(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal by its own id, and wait; the exit code."""
        if self.child.poll() is None:
            self.child.send_signal(number)
        try:
            return self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise AssertionError(
                f"did not end within {timeout} s:\n{self.output[-3000:]}"
            ) from None


class Node(Process):
    """One ``lowcomm-node join``."""

    pace: tuple[str, ...] = (
        "--poll",
        "1",
        "--record-life",
        "10",
        "--exchange-deadline",
        "15",
        "--nice",
        "5",
    )
    """Options to notice sooner what a test waits for, and to train beside other programs."""

    threads = "1"
    """Of its trainer."""

    def __init__(self, home: Path, address: str, *arguments: str) -> None:
        super().__init__(
            home, "lowcomm_node", "join", "--json", "--home", str(home), "--threads", self.threads,
            *self.pace,
            *(("--peers", address) if address else ()), *arguments,
        )  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        """Its status; None while it does not answer."""
        assert self.child.poll() is None, (
            f"ended with {self.child.returncode}:\n{self.output[-3000:]}"
        )
        try:
            status = to_json(self.ask(ControlClient.status))
        except NodeError:
            return None
        return status if status["pid"] == self.child.pid else None

    def peers(self) -> list[dict[str, Any]]:
        """The peers that it sees."""
        return to_json(self.ask(ControlClient.peers))

    def ask(self, question: Callable[[ControlClient], Any]) -> Any:
        """Ask its control API. Raises NodeError while it does not answer."""
        with ControlClient(self.home, timeout=20) as client:
            return question(client)

    def until(self, condition: Any, what: str, deadline: float = START) -> dict[str, Any]:
        """The first status for which ``condition`` holds."""

        def holds() -> dict[str, Any] | None:
            status = self.status()
            return status if status is not None and condition(status) else None

        return until(holds, deadline, what)

    def until_completed(self, more: int, deadline: float = START) -> dict[str, Any]:
        """Wait for so many more completed exchanges."""
        status = self.until(lambda s: s["phase"] == "training", "training", deadline)
        wanted = status["exchanges"]["completed"] + more
        return self.until(
            lambda s: s["exchanges"]["completed"] >= wanted,
            f"{wanted} exchanges completed",
            deadline,
        )

    def completed(self) -> int:
        """Exchanges that it has applied; 0 while it does not answer."""
        status = self.status()
        return status["exchanges"]["completed"] if status else 0


def until_exchanged(
    nodes: Collection[Node], more: int, deadline: float = START, what: str = "exchanges are applied"
) -> None:
    """Wait until each of these has completed so many more exchanges than when it answers first."""
    wanted = {
        node: node.until(bool, "an answer", deadline)["exchanges"]["completed"] + more
        for node in nodes
    }
    # All are asked: one that has ended is told at once.
    until(lambda: min(node.completed() - wanted[node] for node in nodes) >= 0, deadline, what)


class Swarm:
    """A bootstrap server and nodes; ``close`` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.port = "0"
        self.address = ""

    def bootstrap(self, *arguments: str) -> Process:
        """Start the bootstrap server; started again it has the same identity and port."""
        home = self.folder / "bootstrap"
        told = (home / "log").read_text().count('"ready"') if (home / "log").exists() else 0
        server = Process(
            home, "lowcomm_bootstrap", "serve", "--json", "--host", "127.0.0.1", "--port",
            self.port,
            "--home", str(home), *arguments,
        )  # fmt: skip
        self.processes.append(server)
        before = self.address

        def ready() -> list[dict[str, Any]]:
            assert server.child.poll() is None, server.output[-3000:]
            return server.events("ready")[told:]

        self.address = until(ready, START, "bootstrap ready")[-1]["addresses"][0]
        assert before in ("", self.address)
        self.port = self.address.split("/")[4]
        return server

    def spec(
        self,
        method: str = "noloco",
        steps: int = 1_000_000,
        start_peers: int = 1,
        evaluate_every: int = 100_000,
        interval: int = 10,
    ) -> Path:
        """Write a run.toml of a tiny model."""
        path = self.folder / "run.toml"
        path.write_text(
            TINY.format(
                method=method,
                steps=steps,
                start_peers=start_peers,
                evaluate_every=evaluate_every,
                interval=interval,
            )
        )
        return path

    def node(self, name: str, *arguments: str, address: str | None = None) -> Node:
        """Start a node, or start it again; ``address``: where it enters, if not at the bootstrap
        server; empty: nowhere."""
        node = Node(self.folder / name, self.address if address is None else address, *arguments)
        self.processes.append(node)
        return node

    def defects(self) -> list[str]:
        """What its processes have logged of errors of ours that they survived."""
        # The disk that a test has given to a node may be gone by now.
        outputs = (process.output for process in self.processes if process.log.exists())
        lines = (line for output in outputs for line in output.splitlines())
        return sorted({line for line in lines if '.defect"' in line})

    def close(self) -> None:
        """End everything."""
        for process in self.processes:
            if process.child.poll() is None:
                process.child.terminate()
        for process in self.processes:
            try:
                process.child.wait(30)
            except subprocess.TimeoutExpired:
                process.child.kill()
                process.child.wait()


@contextmanager
def lonely_swarm(folder: Path) -> Iterator[Swarm]:
    """A swarm with sockets in a folder of its own, so that others on this machine do not disturb;
    ended in any case.

    Raises AssertionError if a process has survived a defect: a swarm that works hides them well.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as runtime,  # short, as sockets need
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        swarm = Swarm(folder)
        try:
            yield swarm
        finally:
            swarm.close()
    assert not swarm.defects(), "\n".join(swarm.defects())[-3000:]


class Notified:
    """A service manager's socket, and what it is told, in order."""

    def __init__(self, path: Path, watchdog: float) -> None:
        self._environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": f"{watchdog * 1e6:.0f}"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read)
        self.told: list[str] = []
        self._thread.start()

    @contextmanager
    def manages(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """What starts meanwhile tells this."""
        with monkeypatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            yield

    def count(self, text: str) -> int:
        """How often it was told something that begins so."""
        return sum(one.startswith(text) for one in self.told)

    def until(self, text: str, times: int = 1, deadline: float = START) -> None:
        """Wait until it was told so many things that begin so."""
        until(lambda: self.count(text) >= times, deadline, f"the service manager is told {text}")

    def close(self) -> None:
        """Hear no more."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while told := self._socket.recv(4096):  # nothing: it was shut down
            self.told.append(told.decode())


def environments(pids: list[int]) -> list[dict[str, str]]:
    """What these processes were started with."""
    import psutil

    return [psutil.Process(pid).environ() for pid in pids]


def descendants(pid: int) -> list[int]:
    """Process ids of all children of a process, and theirs."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pids: list[int]) -> list[int]:
    """Which of these processes still run."""
    import psutil

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def assert_one_clear_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on stderr that names the thing and the remedy."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("{")]
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0]
    assert done.returncode == code, (done.returncode, done.stderr)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
