"""Memory of two real nodes by what they are doing: they start, train, exchange, save a checkpoint;
one is killed and resumes; both leave.

    python benchmarks/phases.py [SHAPE] [--exchanges 12]

Shapes: demo, 10M, 50M, 125M (12 layers of width 768, 32,000 words, tied). Prints and writes
(out/phases.json) the most that daemon and trainer took in each phase, in MiB: *anonymous* memory,
which only swapping frees; *shared*, the slots of fragments, counted once; and *files* that are
mapped, which the kernel drops at need. Resident memory as ``ps`` tells it is the sum of a process.
The last column is what was reckoned before anything was allocated."""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit
import psutil
import tomlkit

MIB = 2**20
POLL = 1.0
"""Seconds between two looks at whether something holds, which no event tells another process."""
LOOK = 0.05
"""Seconds between two looks at what a node takes."""
KINDS = {"anonymous": "RssAnon:", "shared": "RssShmem:", "files": "RssFile:"}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {},
    "10M": {"layers": 6, "width": 384, "heads": 6, "feed_forward": 1024},
    "50M": {"layers": 12, "width": 576, "heads": 9, "feed_forward": 1536},
    "125M": {
        "layers": 12, "width": 768, "heads": 12, "feed_forward": 2048, "vocab": 32_000,
        "tied": True,
    },
}  # fmt: skip
ORDER = ("start", "train", "exchange", "checkpoint", "resume", "leave")
"""Where two things happen at once, the later of these names the phase."""


@dataclass
class Watched:
    """One life of a node, and what it took."""

    node: Any
    name: str
    left: float | None = None
    looks: list[tuple[float, dict[str, int]]] = field(default_factory=list)


def main() -> int:
    """Measure; 1 if a node fails to do its part."""
    parser = kit.parser(__doc__)
    parser.add_argument("shape", nargs="?", default="125M", choices=SHAPES)
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=8)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    rows, told = measure(arguments)
    for name, found in rows.items():
        for phase, most in found.items():
            print(
                f"{name:14} {phase:11}" + "".join(f"  {k} {v / MIB:8.0f}" for k, v in most.items())
            )
    print(told)
    key = f"{arguments.shape}, {arguments.optimizer}"
    result = {"machine": kit.machine(), "phases": rows} | told
    path = kit.OUT / "phases.json"
    kit.write(path, kit.read(path) | {key: result})
    return 0


def measure(arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The phases of the lives of two nodes, and what else is told of them."""
    with nodes(arguments) as start:
        lives = [start("1"), start("2")]
        over = threading.Event()
        watching = threading.Thread(target=watch, args=(lives, over))
        watching.start()
        try:
            first = lives[0].node
            for life in lives:
                applied(life.node, arguments.exchanges // 2, arguments.timeout)
            saved(lives[1].node)
            lives[1].node.end(signal.SIGKILL)
            lives.append(start("2"))
            for life in (lives[0], lives[2]):
                applied(life.node, arguments.exchanges, arguments.timeout)
            status = first.status()
            seconds = []
            for life in (lives[0], lives[2]):
                life.left = time.time()
                life.node.end(signal.SIGINT, timeout=300)
                seconds.append(round(time.time() - life.left, 1))
                print(f"{life.name} left in {seconds[-1]} s", flush=True)
        finally:
            over.set()
            watching.join()
        rows = {life.name: phases(life) for life in lives}
        return rows, {
            "reckoned": status["trainer"]["memory"]["reckoned"],
            "most": status["trainer"]["memory"]["most"],
            "exchanges": status["exchanges"],
            "leave_seconds": seconds,
        }


@contextmanager
def nodes(arguments: Any) -> Iterator[Any]:
    """What starts a node, by its name."""
    from helpers.processes import Node, Swarm  # they take a second
    from lowcomm_node.swarm.run_template import write_template

    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            text = write_template(
                "memory", "lowcomm", 10_000_000, 0, 2,
                interval=arguments.interval, optimizer=arguments.optimizer,
            )  # fmt: skip
            document = tomlkit.parse(text)
            document["model"].update(SHAPES[arguments.shape])
            document["sync"].update({"fragments": arguments.fragments})
            document["train"].update({"batch": 1, "evaluate_every": 20})
            run = Path(folder) / "run.toml"
            run.write_text(tomlkit.dumps(document))
            swarm.bootstrap("--run", str(run))

            class Patient(Node):
                pace = ("--nice", "5", "--checkpoint-every", "20", "--keep", "1")

            def start(name: str) -> Watched:
                lives = sum(one.home.name == name for one in swarm.processes)
                began = time.time()
                node = Patient(Path(folder) / name, swarm.address)
                node.started = began
                swarm.processes.append(node)
                return Watched(node, f"node {name}" + (" again" if lives else ""))

            yield start
        finally:
            swarm.close()


def applied(node: Any, count: int, timeout: float) -> None:
    """Wait until a node has applied so many exchanges. Raises TimeoutError."""
    wait(lambda: outcomes(node, "applied") >= count, f"{count} exchanges applied", timeout, node)


def saved(node: Any) -> None:
    """Wait for a checkpoint."""
    wait(lambda: bool(events(node, "saved")), "a checkpoint", 300, node)


def outcomes(node: Any, outcome: str) -> int:
    """Exchanges of this life that have ended so."""
    return len(events(node, f"exchange.{outcome}"))


def events(node: Any, name: str) -> list[dict[str, Any]]:
    """Of this process alone: a home's log has those of all that ran in it."""
    return [one for one in node.events(name) if one["time"] >= node.started]


def wait(holds: Any, what: str, timeout: float, node: Any) -> None:
    """Wait until something holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while not holds():
        if node.child.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"no {what}:\n{node.output[-3000:]}")
        time.sleep(POLL)


def watch(lives: list[Watched], over: threading.Event) -> None:
    """Look at all nodes until it is over."""
    while not over.wait(LOOK):
        for life in list(lives):
            if life.node.child.poll() is None:
                life.looks.append((time.time(), taken(life.node.child.pid)))


def taken(daemon: int) -> dict[str, int]:
    """Bytes by process and kind."""
    found: dict[str, int] = {}
    try:
        processes = [psutil.Process(daemon), *psutil.Process(daemon).children()]
    except psutil.Error:
        return found
    for process in processes:
        try:
            name = role(process, daemon)
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except (psutil.Error, OSError):
            continue
        for kind, label in KINDS.items():
            amount = sum(1024 * int(line.split()[1]) for line in lines if line.startswith(label))
            if name != "p2pd":
                found[f"{name} {kind}"] = found.get(f"{name} {kind}", 0) + amount
    return found


def role(process: Any, daemon: int) -> str:
    """Daemon, trainer or p2pd."""
    if process.pid == daemon:
        return "daemon"
    return "p2pd" if "p2pd" in process.name() else "trainer"


def phases(life: Watched) -> dict[str, dict[str, int]]:
    """The most that each phase took; daemon and trainer at the same moment."""
    most: dict[str, dict[str, int]] = {}
    spans = list(spans_of(life))
    for moment, found in life.looks:
        names = [name for name, start, end in spans if start <= moment <= end]
        phase = max(names, key=ORDER.index, default="train")
        shared = max(found.get("daemon shared", 0), found.get("trainer shared", 0))
        sums = {
            "trainer anonymous": found.get("trainer anonymous", 0),
            "daemon anonymous": found.get("daemon anonymous", 0),
            "shared": shared,
            "files": found.get("daemon files", 0) + found.get("trainer files", 0),
        }
        sums["node"] = sum(sums.values()) - sums["files"]
        sums["resident"] = sums["node"] + sums["files"]
        here = most.setdefault(phase, dict.fromkeys(sums, 0))
        for key, amount in sums.items():
            here[key] = max(here[key], amount)
    return {phase: most[phase] for phase in ORDER if phase in most}


def spans_of(life: Watched) -> Iterator[tuple[str, float, float]]:
    """What a node did, from when to when."""
    node = life.node
    begun = (one["time"] for one in events(node, "phase") if one["phase"] == "training")
    yield "resume" if "again" in life.name else "start", 0, next(begun, float("inf"))
    for one in events(node, "exchange.applied"):
        yield "exchange", one["time"] - one["seconds"], one["time"]
    for one in events(node, "saved"):
        yield "checkpoint", one["time"] - one["seconds"] - 1, one["time"] + LOOK
    if life.left is not None:
        yield "leave", life.left, float("inf")


if __name__ == "__main__":
    sys.exit(main())
