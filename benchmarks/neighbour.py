"""What a job that compiles loses beside a node that trains.

    python benchmarks/neighbour.py [--rounds 5]

The job compiles Python files, a process for each few, as many at once as there are cores, in a
session of its own. It runs in turns: alone, while all nodes are stopped; beside one node; beside
two that exchange; and beside one with ``--nice 0``, which does not step back. *Trainers* is the
part of the processor time of job and trainers, which both want all of, that trainers got; other
work on the machine slows the job, too, but does not change that. *Daemons* is the part of all
processors that daemons and p2pd took. Together they are what the job loses. As root it is done
twice, with and without autogroups (``kernel.sched_autogroup_enabled``), which is set back. Then
each node trains for some seconds beside nothing: one that steps back must be as fast as one that
does not, if nothing else runs on the machine.

Prints and writes (out/neighbour.json)."""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from statistics import median
from time import monotonic, sleep
from typing import Any

import kit
import psutil

from helpers.processes import Node, Swarm
from lowcomm_node.swarm.run_template import write_template

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
COMPILE = """
import pathlib, sys
for path in sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))[:30]:
    compile(path.read_bytes(), str(path), "exec", optimize=2)
"""
COMPILER = shlex.join([sys.executable, "-I", "-S", "-c", COMPILE])
START = 300.0
SETTLE = 3.0
"""Seconds for what a node makes up for that was stopped."""
LOOK = 1.0
"""Seconds between two questions to the node while the job runs."""


class Trains(Node):
    """A node as users start it, with a thread on each core."""

    pace = ()
    threads = str(os.cpu_count())


@dataclass
class Turn:
    """One run of the job."""

    seconds: float
    job: float
    """CPU seconds of the job."""
    trainers: float
    """CPU seconds of the trainers meanwhile."""
    daemons: float
    """The same of daemons and p2pd."""
    slowest: float
    """Seconds that a daemon took to answer, at most."""

    @property
    def of_trainers(self) -> float:
        """The part of what job and trainers got that went to trainers."""
        return self.trainers / (self.trainers + self.job)

    @property
    def of_daemons(self) -> float:
        """The part of all processors that went to daemons."""
        return self.daemons / (self.seconds * (os.cpu_count() or 1))


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=12, help="processes of the job")
    parser.add_argument("--alone", type=float, default=4.0, help="seconds of training alone")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": kit.machine(), "loads": []}
    print(kit.loaded_machine(), flush=True)
    for on in settings():
        with autogroups(on):
            name = "autogroups on" if on else "autogroups off"
            results[name] = measure(arguments.rounds, arguments.files, arguments.alone)
        results["loads"].append(os.getloadavg()[0])
        show(name, results[name])
        kit.write(kit.OUT / "neighbour.json", results)


def settings() -> Sequence[bool]:
    """With autogroups and without, where that can be chosen."""
    if os.access(AUTOGROUP, os.W_OK):
        return (True, False)
    return (AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1",)


@contextmanager
def autogroups(on: bool) -> Iterator[None]:
    """What starts meanwhile is in autogroups, or not."""
    before = AUTOGROUP.read_text() if os.access(AUTOGROUP, os.W_OK) else None
    try:
        if before is not None:
            AUTOGROUP.write_text(str(int(on)))
        yield
    finally:
        if before is not None:
            AUTOGROUP.write_text(before)


def measure(rounds: int, files: int, alone: float) -> dict[str, Any]:
    """All turns of one setting."""
    with tempfile.TemporaryDirectory() as folder:
        swarm, nodes = Swarm(Path(folder)), list[Trains]()
        try:
            run = Path(folder) / "run.toml"
            run.write_text(write_template("neighbour", "lowcomm", 10_000_000, 0, interval=8))
            swarm.bootstrap("--run", str(run))
            nodes += [
                Trains(Path(folder) / name, swarm.address, *options)
                for name, *options in (("1",), ("2",), ("3", "--nice", "0"))
            ]
            swarm.processes += nodes
            first, second, plain = nodes
            for node in nodes:
                node.until(lambda status: status["trainer"]["pid"], "a trainer")
            with hurried(nodes):
                for node in nodes:
                    node.until(lambda status: (status["trainer"]["steps"] or 0) > 3, "steps", START)
            arms = {
                "alone": [],
                "one node": [first],
                "two that exchange": [first, second],
                "one with --nice 0": [plain],
            }
            turns: dict[str, list[Turn]] = {name: [] for name in arms}
            for _ in range(rounds):
                for name, those in arms.items():
                    turns[name].append(beside(those, nodes, files))
            go(nodes, nodes)
            return {
                "by": {node.home.name: priority_of(node) for node in nodes},
                "completed": first.until(bool, "status")["exchanges"]["completed"],
                "turns": {name: [asdict(turn) for turn in all_] for name, all_ in turns.items()},
                "training alone": speeds(first, plain, nodes, alone, rounds),
            }
        finally:
            go(nodes, nodes)
            swarm.close()


@contextmanager
def hurried(nodes: Sequence[Node]) -> Iterator[None]:
    """As root: have trainers not step back meanwhile, or building takes minutes on a busy
    machine."""
    pids = [process.pid for node in nodes for process in family(node) if is_trainer(process)]
    if os.geteuid() != 0:
        pids = []
    before = {
        pid: (session_level(pid), os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid))
        for pid in pids
    }
    for pid in pids:
        give(pid, "0", 0, os.SCHED_OTHER)
    yield
    for pid, levels in before.items():
        give(pid, *levels)


def session_level(pid: int) -> str:
    """The nice level of its session."""
    return Path(f"/proc/{pid}/autogroup").read_text().split()[-1]


def give(pid: int, session: str, level: int, policy: int) -> None:
    """Give a process's session a nice level, and its threads another and a scheduling class."""
    Path(f"/proc/{pid}/autogroup").write_text(session)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), level)
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def priority_of(node: Node) -> dict[str, Any]:
    """How it makes way for others."""
    return node.until(lambda status: status["trainer"]["priority"], "priority")["trainer"][
        "priority"
    ]


def beside(those: Sequence[Node], nodes: Sequence[Node], files: int) -> Turn:
    """Run the job while only these nodes go on."""
    go(those, nodes)
    before, began = work(those), monotonic()
    job = subprocess.Popen(
        ["sh", "-c", f"seq {files} | xargs -P {os.cpu_count()} -n 1 {COMPILER}"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    over = threading.Event()
    with ThreadPoolExecutor(1) as asker:
        slowest = asker.submit(slowest_answer, those, over)
        _, _, used = os.wait4(job.pid, 0)
        seconds, after = monotonic() - began, work(those)
        over.set()
    job_seconds = used.ru_utime + used.ru_stime
    trainers, daemons = (late - early for late, early in zip(after, before, strict=True))
    return Turn(seconds, job_seconds, trainers, daemons, slowest.result())


def slowest_answer(those: Sequence[Node], over: threading.Event) -> float:
    """Seconds that a daemon took to answer, at most."""
    slowest = 0.0
    while those and not over.wait(LOOK):
        asked = monotonic()
        those[0].status()
        slowest = max(slowest, monotonic() - asked)
    return slowest


def speeds(
    first: Node, plain: Node, nodes: Sequence[Node], seconds: float, rounds: int
) -> dict[str, float]:
    """Inner steps a second beside nothing, of the node that steps back and of the one that does
    not."""
    found: dict[str, list[float]] = {"steps back": [], "--nice 0": []}
    for _ in range(rounds):
        for name, node in zip(found, (first, plain), strict=True):
            go([node], nodes)
            before, began = steps(node), monotonic()
            sleep(seconds)
            found[name].append((steps(node) - before) / (monotonic() - began))
    return {name: median(rates) for name, rates in found.items()}


def steps(node: Node) -> int:
    """Inner steps that a node has taken."""
    status = node.status()
    return int(status["trainer"]["steps"]) if status else 0


def family(node: Node) -> list[psutil.Process]:
    """The daemon and its children."""
    daemon = psutil.Process(node.child.pid)
    return [daemon, *daemon.children(recursive=True)]


def is_trainer(process: psutil.Process) -> bool:
    """Whether it is a trainer."""
    return "lowcomm_node.node.host" in process.cmdline()


def go(those: Sequence[Node], nodes: Sequence[Node]) -> None:
    """Have only these go on."""
    for node in nodes:
        for process in family(node):
            process.send_signal(SIGCONT if node in those else SIGSTOP)
    sleep(SETTLE)


def work(those: Sequence[Node]) -> tuple[float, float]:
    """CPU seconds of trainers, and of daemons and p2pd, up to now."""
    trainers = others = 0.0
    for node in those:
        for process in family(node):
            times = process.cpu_times()
            if is_trainer(process):
                trainers += times.user + times.system
            else:
                others += times.user + times.system
    return trainers, others


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of one setting."""
    print(f"\n{name}: {found['by']['1']}; {found['completed']} exchanges")
    print("job                  seconds  longer  trainers  daemons  slowest answer")
    alone = found["turns"]["alone"]
    for arm, told in found["turns"].items():
        turns = [Turn(**turn) for turn in told]
        pairs = zip(told, alone, strict=True)
        longer = median(turn["seconds"] / before["seconds"] - 1 for turn, before in pairs)
        print(
            f"{arm:20} {median(turn.seconds for turn in turns):7.2f} {longer:+7.1%} "
            f"{median(turn.of_trainers for turn in turns):9.1%} "
            f"{median(turn.of_daemons for turn in turns):8.1%} "
            f"{max(turn.slowest for turn in turns):13.2f} s"
        )
    print("inner steps a second beside nothing:", found["training alone"])


if __name__ == "__main__":
    main()
