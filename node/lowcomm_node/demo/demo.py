"""A swarm on one machine: a bootstrap server and a few nodes, each a real process, talking over loopback."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import ConfigError, NodeError, RetryLater
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.lines import swarm_in_words
from lowcomm_node.status.model import Status
from lowcomm_node.status.panel import swarm_panel
from lowcomm_node.swarm.run_template import write_template
from lowcomm_node.system.formatting import clean, loss, seconds, short_peer, size
from lowcomm_node.system.support import program
from lowcomm_node.trainer.host import die_with_parent
from lowcomm_protocol.spec.run import parse_toml

POLL = 1.0
"""Seconds between two looks at all nodes: the panel shows single steps, of which their events do not tell."""
START_POLL = 0.1
"""Seconds between two looks at a log: nothing can wait for a line in a file."""
START_DEADLINE = 90.0
LEAVE_DEADLINE = 60.0
LINE_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""
SAMPLE_TOKENS = 400
LINE_WIDTH = 74
"""Characters of a line of the sample: what is longer goes on in the next."""
PASSING = ("data", "runs/*/snapshots", "runs/*/incoming")
"""What a node keeps to start faster, or for others; nobody needs it after a demo."""


@dataclass
class Child:
    """One process of the demo."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    home: Path


@dataclass
class Demo:
    """One demo, from start to result."""

    nodes: int
    steps: int
    method: str
    optimizer: str | None
    seed: int
    interval: int | None
    folder: Path | None
    timeout: float
    show: bool
    _children: list[Child] = field(default_factory=list)
    _began: float = 0.0

    def run(self) -> dict[str, Any]:
        """Train; the result as ``--json`` prints it. Raises NodeError if a process dies, RetryLater past the timeout,
        ConfigError if the folder holds a former demo.

        All processes have ended when this returns or raises.
        """
        home = self.folder or find_home() / "demo" / time.strftime("%Y%m%d-%H%M%S")
        home = home.expanduser().absolute()
        home.mkdir(parents=True, exist_ok=True)
        spec = home / "run.toml"
        if spec.exists():
            # Its nodes would resume from their checkpoints: a demo that has already finished shows nothing.
            raise ConfigError(f"{home} holds a former demo: name another folder with --home, or remove this one.")
        text = write_template("demo", self.method, self.steps, self.seed, self.nodes, self.interval, self.optimizer)
        spec.write_text(text)
        self.optimizer = parse_toml(text).train.optimizer
        self._began = time.monotonic()
        with _terminated_as_interrupt():
            try:
                address = self._start_bootstrap(home, spec)
                for index in range(1, self.nodes + 1):
                    self._start_node(home, index, address)
                statuses = self._watch()
                took = time.monotonic() - self._began
                self._tell("all nodes have finished: they say goodbye and leave")
                self._finish()
            finally:
                self._end_all()
        result = self._result(statuses, took)
        _tidy(
            [child.home for child in self._children[1:]],
            [Path(status.checkpoint.path) for status in statuses if status.checkpoint],
        )
        return result | {"home": str(home), "bytes": _bytes_in(home)}

    # processes

    def _start_bootstrap(self, home: Path, spec: Path) -> str:
        child = self._start(
            "bootstrap", home / "bootstrap", "lowcomm_bootstrap", "serve", "--json", "--host", "127.0.0.1",
            "--port", "0", "--run", str(spec), "--home", str(home / "bootstrap"),
        )  # fmt: skip
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            for line in child.log.read_text(errors="replace").splitlines():
                if line.startswith("{") and '"ready"' in line:
                    return str(json.loads(line)["addresses"][0])
            self._check_alive()
            time.sleep(START_POLL)
        raise RetryLater(f"The bootstrap server was not ready within {START_DEADLINE:.0f} s: see {child.log}.")

    def _start_node(self, home: Path, index: int, address: str) -> None:
        folder = home / f"node-{index}"
        # Checkpoints are made at the end and for joiners; a demo keeps the disk out of the picture otherwise.
        self._start(
            f"node {index}", folder, "lowcomm_node", "join", "--json", "--peers", address, "--home", str(folder),
            "--threads", "1", "--stay", "--poll", "1", "--record-life", "10", "--checkpoint-every", "200",
        )  # fmt: skip

    def _start(self, name: str, home: Path, module: str, *arguments: str) -> Child:
        home.mkdir(parents=True, exist_ok=True)
        log = home / "log.jsonl"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LOWCOMM_")}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
                process_group=0,  # Ctrl-C reaches the demo alone, which then ends its children in order
            )
        self._children.append(Child(name, process, log, home))
        return self._children[-1]

    def _check_alive(self) -> None:
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                last = child.log.read_text(errors="replace").strip().splitlines()[-3:]
                raise NodeError(f"{child.name} ended with code {code}: {' | '.join(last)[-600:]} (log: {child.log})")

    def _finish(self) -> None:
        for child in self._children[1:]:
            child.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + LEAVE_DEADLINE
        for child in self._children[1:]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline - time.monotonic()))
                self._tell(f"{child.name} has left")

    def _end_all(self) -> None:
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
        for child in self._children:
            try:
                child.process.wait(10)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    # watching

    def _watch(self) -> list[Status]:
        deadline = time.monotonic() + self.timeout
        title = f"{self.method}, {self.nodes} nodes, {self.steps} steps"
        console = Console(stderr=True)
        with _view(title, console) if self.show else nullcontext(_nothing) as show:
            while True:
                self._check_alive()
                statuses = [_status(child.home) for child in self._children[1:]]
                show(statuses, time.monotonic() - self._began)
                done = [status for status in statuses if status is not None and status.phase == "finished"]
                if len(done) == self.nodes:
                    return done
                if time.monotonic() > deadline:
                    waiting = [f"{status.phase}: {status.waiting}" for status in statuses if status is not None]
                    raise RetryLater(f"The demo did not end within {self.timeout:.0f} s ({'; '.join(waiting)}).")
                time.sleep(POLL)

    def _tell(self, text: str) -> None:
        """What is done once training is over: a line each, as it takes a while on a busy machine."""
        if self.show:
            print(f"{seconds(time.monotonic() - self._began):>6} {text}", file=sys.stderr, flush=True)

    # the result

    def _result(self, statuses: list[Status], took: float) -> dict[str, Any]:
        from lowcomm_node.trainer.swarm_weights import compare

        checkpoints = [Path(status.checkpoint.path) for status in statuses if status.checkpoint]
        compared = compare(checkpoints, self._children[1].home / "data", SAMPLE_TOKENS, self._tell)
        return {
            "method": self.method,
            "optimizer": self.optimizer,
            "seed": self.seed,
            "steps": self.steps,
            "seconds": round(took, 1),
            "parameters": statuses[0].trainer.parameters,
            "val_loss_average_weights": compared.average_loss,
            "weight_spread_rms": compared.spread,
            "nodes": [_node(status) for status in statuses],
            "sample": compared.sample,
            "checkpoint": str(checkpoints[0]),
        }


def render(result: dict[str, Any]) -> str:
    """The result for a person, in 80 columns: a table, a sample, and where the checkpoint is."""
    rows = [("node", "steps", "held-out loss", "applied", "no partner", "failed", "sent", "received")]
    rows += [
        (
            short_peer(node["peer_id"]),
            str(node["steps"]),
            f"{loss(node['val_loss_first'], 3)} -> {loss(node['val_loss_last'], 3)}",
            str(node["exchanges_completed"]),
            str(node["exchanges_no_partner"]),
            str(node["exchanges_failed"]),
            size(node["bytes_sent"]),
            size(node["bytes_received"]),
        )
        for node in result["nodes"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    home, checkpoint = Path(result["home"]), Path(result["checkpoint"])
    return "\n".join(
        [
            f"{result['method']}: {result['parameters']:,} parameters, {result['seconds']:.0f} s",
            "",
            *table,
            "",
            f"averaged weights: held-out loss {result['val_loss_average_weights']:.3f}; "
            f"spread of the nodes' weights {result['weight_spread_rms']:.1e}",
            "",
            "what the model writes:",
            *(f"  | {line}" for line in _sample_lines(result["sample"])),
            "",
            f"folder:     {_in_a_shell(home)}   ({size(result['bytes'])})",
            f"checkpoint: {checkpoint.relative_to(home)}, in it",
            f'try it:     {program()} generate "def " \\',
            f"            --home {_in_a_shell(_home_of(checkpoint))}",
            f"remove it:  rm -r {_in_a_shell(home)}",
        ]
    )


def _in_a_shell(path: Path) -> str:
    """A path as it is typed: from the user's own folder on where it lies there, so that it fits a line."""
    own = Path.home()
    if path.is_relative_to(own) and path != own:
        return f"~/{shlex.quote(str(path.relative_to(own)))}"
    return shlex.quote(str(path))


def _sample_lines(sample: str) -> Iterator[str]:
    """What a model has written, which may be anything, as lines that a terminal can show."""
    for line in sample.splitlines():
        shown = clean(line).rstrip()
        parts = textwrap.wrap(shown, LINE_WIDTH, drop_whitespace=False, break_on_hyphens=False) or [""]
        yield from (part.rstrip() for part in parts)


def _home_of(checkpoint: Path) -> Path:
    """The home of a node, from the path of one of its checkpoints."""
    return checkpoint.parents[3]


def _tidy(homes: Sequence[Path], checkpoints: Sequence[Path]) -> None:
    """Remove what nobody needs once a demo is over: tokens, snapshots, and all but the last checkpoints."""
    for home in homes:
        for pattern in PASSING:
            for folder in home.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in home.glob("runs/*/checkpoints/step-*"):
            if folder not in checkpoints:
                shutil.rmtree(folder, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _node(status: Status) -> dict[str, Any]:
    trainer, exchanges = status.trainer, status.exchanges
    return {
        "peer_id": status.peer_id,
        "steps": trainer.steps,
        "swarm_step": trainer.swarm_step,
        "tokens": trainer.tokens,
        "val_loss_first": trainer.val_loss_first,
        "val_loss_last": trainer.val_loss_last,
        "exchanges_completed": exchanges.completed,
        "exchanges_refused": exchanges.refused,
        "exchanges_no_partner": exchanges.no_partner,
        "exchanges_failed": exchanges.failed,
        "bytes_sent": status.bytes_sent,
        "bytes_received": status.bytes_received,
    }


def _status(home: Path) -> Status | None:
    try:
        with ControlClient(home, timeout=10.0) as client:
            return client.status()
    except NodeError:
        return None


Statuses = Sequence[Status | None]
Show = Callable[[Statuses, float], None]


@contextlib.contextmanager
def _view(title: str, console: Console) -> Iterator[Show]:
    """What shows how the nodes get on: a panel in a terminal, elsewhere a line now and then."""
    if not console.is_terminal:
        yield Lines(title)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda statuses, elapsed: live.update(swarm_panel(title, statuses, elapsed, console.width), refresh=True)


def _nothing(statuses: Statuses, elapsed: float) -> None: ...


class Lines:
    """Plain lines, where there is no terminal: the first one at once, so that nobody takes silence for a failure."""

    def __init__(self, title: str, every: float = LINE_EVERY) -> None:
        self._title, self._every = title, every
        self._next = 0.0

    def __call__(self, statuses: Statuses, elapsed: float) -> None:
        """Print where the nodes are, ``elapsed`` seconds after the start, if it is time for that."""
        if elapsed >= self._next:
            self._next = elapsed + self._every
            print(f"{seconds(elapsed):>6} {self._title}: {swarm_in_words(statuses)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminated_as_interrupt():  # noqa: ANN202
    """SIGTERM unwinds like Ctrl-C, so that no child is left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
