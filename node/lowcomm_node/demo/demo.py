"""A swarm on one machine: a bootstrap server and a few nodes, real processes on loopback."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live

from lowcomm_node.demo.result import DemoResult, node_result, tidy
from lowcomm_node.errors import ConfigError, NodeError, RetryLater
from lowcomm_node.owner.sources import find_home
from lowcomm_node.planner.run_template import Sections, write_template
from lowcomm_node.status.model import Status
from lowcomm_node.status.panel import swarm_panel
from lowcomm_node.status.report import write_report
from lowcomm_node.status.words import swarm_in_words
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.storage.paths import absolute
from lowcomm_node.system.command import die_with_parent, unwinding_signals
from lowcomm_node.system.units import seconds
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.spec.run import RunSpec, parse_toml
from lowcomm_protocol.spec.sections import STORY_TOKENS

POLL, START_POLL = 1.0, 0.1
"""Seconds between two looks at all nodes, and at a log: nothing can wait for a line in a file."""
START_DEADLINE = 90.0
LEAVE_DEADLINE = 60.0
SAMPLE_TOKENS = 400
LOOPBACK = "127.0.0.1"
# Checkpoints are made at the end and for joiners; a demo keeps the disk out of the picture.
# Its user waits for it, so it takes its share of a busy machine instead of stepping back for all.
NODE_FLAGS = (
    "--json --threads 1 --stay --poll 1 --record-life 10 --checkpoint-every 200 --nice 5 "
    "--show-sample"
)
LINE_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""
TEXTS: Mapping[str, Sections] = {
    "stories": {
        "data": {"source": "builtin:stories", "tokenizer": "builtin:stories"},
        "model": {"vocab": STORY_TOKENS, "context": 128},
    },
    "python": {},
}
"""Settings for each text that comes with every node, by the name that `--text` takes."""
WIDTH = 80
"""Columns; what is longer goes on below. Links stay whole."""

Show = Callable[[Sequence[Status | None], float], None]
"""Takes the statuses of all nodes, and the seconds since the start."""


@contextmanager
def view(title: str, is_shown: bool) -> Iterator[Show]:
    """A function that shows statuses in a terminal, else in lines, or ignores them."""
    console = Console(stderr=True)
    if not is_shown:
        yield lambda statuses, elapsed: None
    elif not console.is_terminal:
        next_line, begin = 0.0, f"{title}: "

        def show(statuses: Sequence[Status | None], elapsed: float) -> None:
            nonlocal next_line, begin
            if elapsed >= next_line:
                tell(begin + swarm_in_words(statuses), elapsed)
                next_line, begin = elapsed + LINE_EVERY, ""

        yield show
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda statuses, elapsed: live.update(
                swarm_panel(title, statuses, elapsed), refresh=True
            )


def tell(text: str, elapsed: float) -> None:
    """Print a text with the seconds since the start."""
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{seconds(elapsed):>6} ",
        subsequent_indent=7 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(lines, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Child:
    """One process of the demo."""

    name: str
    process: subprocess.Popen[bytes]
    home: Path

    @property
    def log(self) -> Path:
        """File with its output."""
        return self.home / "log.jsonl"


@dataclass(kw_only=True)
class Demo:
    """One demo, from start to result."""

    nodes: int
    steps: int
    method: str
    text: str
    """A key of `TEXTS`."""
    optimizer: str | None
    """None: that of the method; so is ``interval``."""
    seed: int
    interval: int | None
    folder: Path | None
    """None: a new one."""
    timeout: float
    show: bool
    _children: list[Child] = field(default_factory=list, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)

    def run(self) -> DemoResult:
        """Train.

        Raises NodeError if a process dies, RetryLater past the timeout, ConfigError if the folder
        holds a former demo. All processes have ended when this returns or raises.
        """
        home = absolute(self.folder or find_home() / "demo" / time.strftime("%Y%m%d-%H%M%S"))
        spec = home / "run.toml"
        if spec.exists():
            # Its nodes would resume from their checkpoints and have nothing left to show.
            other = "name another folder with --home, or remove this one"
            raise ConfigError(f"{home} holds a former demo: {other}.")
        run = {"name": "demo", "seed": self.seed, "steps": self.steps, "start_peers": self.nodes}
        sync = {"method": self.method, "interval": self.interval}
        train = {"optimizer": self.optimizer}
        text = write_template({"run": run, "sync": sync, "train": train, **TEXTS[self.text]})
        write_atomic(spec, text.encode())
        with unwinding_signals():
            try:
                address = self._start_bootstrap(home / "bootstrap", spec)
                join = ("join", *NODE_FLAGS.split(), "--peers", address)
                for index in range(1, self.nodes + 1):
                    self._start(f"node {index}", home / f"node-{index}", "lowcomm_node", *join)
                statuses = self._watch()
                took = time.monotonic() - self._began
                self._tell("all nodes have finished: they say goodbye and leave")
                self._finish()
            except KeyboardInterrupt:
                self._tell(f"interrupted: all nodes end; what they did is in {home}")
                raise
            finally:
                self._end_all()
        return self._result(statuses, home, parse_toml(text), took)

    def _start_bootstrap(self, home: Path, spec: Path) -> str:
        flags = ["serve", "--json", "--host", LOOPBACK, "--port", "0"]
        flags += ["--web", "0"] if self.show else []
        child = self._start("bootstrap", home, "lowcomm_bootstrap", *flags, "--run", str(spec))
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline:
            for line in child.log.read_text(errors="replace", encoding="utf-8").splitlines():
                if line.startswith("{") and '"ready"' in line:
                    ready = json.loads(line)
                    if ready["web"] is not None:
                        page = f"http://{LOOPBACK}:{ready['web']}/"
                        self._tell(f"watch the swarm in a browser: {page}")
                    return str(ready["addresses"][0])
            self._check_alive()
            time.sleep(START_POLL)
        raise RetryLater(
            f"The bootstrap server was not ready within {START_DEADLINE:.0f} s: see {child.log}."
        )

    def _start(self, name: str, home: Path, module: str, *arguments: str) -> Child:
        home.mkdir(parents=True, exist_ok=True)
        inherited = {key: os.environ[key] for key in os.environ if not key.startswith("LOWCOMM_")}
        with (home / "log.jsonl").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--home", str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
                process_group=0,  # Ctrl-C reaches the demo alone, which ends its children in order
            )
        self._children.append(Child(name, process, home))
        return self._children[-1]

    def _check_alive(self) -> None:
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                text = child.log.read_text(errors="replace", encoding="utf-8")
                words = " | ".join(text.strip().splitlines()[-3:])[-600:]
                raise NodeError(f"{child.name} ended with code {code}: {words} (log: {child.log})")

    def _finish(self) -> None:
        for child in self._children[1:]:
            child.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + LEAVE_DEADLINE
        for child in self._children[1:]:
            with suppress(subprocess.TimeoutExpired):
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

    def _watch(self) -> list[Status]:
        deadline = time.monotonic() + self.timeout
        title = f"{self.method}, {self.nodes} nodes, {self.steps} steps"
        with view(title, self.show) as show:
            linked = False
            while True:
                self._check_alive()
                statuses = [_status(child.home) for child in self._children[1:]]
                linked = linked or self._tell_links(statuses)
                show(statuses, time.monotonic() - self._began)
                known = [status for status in statuses if status is not None]
                if [status.phase for status in known] == ["finished"] * self.nodes:
                    return known
                if time.monotonic() > deadline:
                    waiting = "; ".join(f"{status.phase}: {status.waiting}" for status in known)
                    late = f"The demo did not end within {self.timeout:.0f} s"
                    raise RetryLater(f"{late} ({waiting}).")
                time.sleep(POLL)

    def _tell_links(self, statuses: Sequence[Status | None]) -> bool:
        """Print links to the pages of all nodes, once they have something to show."""
        if any(status is None or status.trainer.loss is None for status in statuses):
            return False
        self._tell("a page for each node, to steer it; each link opens once:")
        for child in self._children[1:]:
            with suppress(NodeError), ControlClient(child.home) as client:
                self._tell(f"  {child.name}: {client.link()}")
        return True

    def _tell(self, text: str) -> None:
        """Print progress: each step takes a while on a busy machine."""
        if self.show:
            tell(text, time.monotonic() - self._began)

    def _result(
        self, statuses: Sequence[Status], home: Path, spec: RunSpec, took: float
    ) -> DemoResult:
        from lowcomm_node.models.evaluation import compare

        checkpoints = [Path(status.checkpoint.path) for status in statuses if status.checkpoint]
        homes = [child.home for child in self._children[1:]]
        compared = compare(checkpoints, homes[0] / "data", SAMPLE_TOKENS, spec.data, self._tell)
        write_report(home, home / "report.html", sample=compared.sample)
        tidy(homes, checkpoints)
        return DemoResult(
            method=self.method,
            optimizer=spec.train.optimizer,
            text=self.text,
            seed=self.seed,
            steps=self.steps,
            seconds=round(took, 1),
            parameters=statuses[0].trainer.parameters,
            val_loss_average_weights=compared.average_loss,
            weight_spread_rms=compared.spread,
            nodes=tuple(map(node_result, statuses)),
            sample=compared.sample,
            checkpoint=str(checkpoints[0]),
            home=str(home),
            report=str(home / "report.html"),
            bytes=sum(path.lstat().st_size for path in home.rglob("*") if path.is_file()),
        )


def _status(home: Path) -> Status | None:
    try:
        with ControlClient(home, timeout=10.0) as client:
            return client.status()
    except NodeError:
        return None
