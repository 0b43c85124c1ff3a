"""A whole exchange between two nodes, from capture to merge: seconds, seconds of CPU, memory, and
where they go.

    python benchmarks/exchange.py [--size 16] [--only lowcomm noloco ...] [--runs 5]
    python benchmarks/exchange.py --beside CHECKOUT      the same of another checkout, in turn
    python benchmarks/exchange.py --counts               counts in place of times, for tests

Two daemons, each with a trainer process, exchange one fragment of --size MB (fp32) over gRPC and
TLS on loopback. Beside them, in turn with them: gloo's all-reduce and hivemind's averager of a
vector of that size. CPU is that of all processes of both ends. Memory is the sum of the peaks of
all processes above what they held before the first exchange (*again*: before this one), memory that
both map counted once. *private* is the most that they hold at one moment beyond that, without the
pages of files, which the kernel drops at need. Medians of several runs; everything into
benchmarks/results/exchange.json, by size."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from subprocess import Popen
from threading import Event, Thread
from time import sleep
from typing import Any

import kit
import psutil
import uvloop
from ends import Ends, add_roles, answer, ask, cpu_of, end_all
from exchange_ends import ROLES, play

MIB = 2**20
METHODS = ("lowcomm", "noloco", "gossip", "diloco", "streaming-diloco")
STAGES = ("capture", "encode", "hash", "send", "receive", "decode", "outer", "merge")
BOUNDED = ("tensors", "chunks", "touched", "hashed", "python", "wire", "held")
BOUNDS = {
    "lowcomm": (0, 12, 36.5, 2.1, 1, 1.1, 10.4),
    "noloco": (0, 12, 46.5, 4.1, 2.6, 2.02, 10.4),
}
"""What an exchange may cost both ends together (exchange_counts.py), in the order of BOUNDED. A
chunk is half of the fragment of CI, and how many are held at once differs from run to run."""
WARM = 2
"""Exchanges before those that are measured: a modulo codec sends the first one in bf16."""
LOOK = 0.01
"""Seconds between two looks at what processes hold."""
REST = 0.2
"""Seconds until what an exchange leaves behind is done: descriptors closed, memory given back."""


@dataclass
class Pair:
    """Two processes that exchange with each other, and what was measured of them."""

    name: str
    children: list[Popen[str]]
    exchange: Callable[["Pair"], dict[str, Any]]
    runs: list[dict[str, Any]] = field(default_factory=list)
    extra: float = 0.0
    held: int = 0
    """Bytes before the first exchange."""
    held_private: int = 0
    """Those of them that are no pages of files."""

    @property
    def pids(self) -> list[int]:
        """Both."""
        return [child.pid for child in self.children]

    def all(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask both at once; their answers."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        return [answer(child) for child in self.children]

    def run(self) -> None:
        """One exchange, measured."""
        self.runs.append(self.exchange(self))


def main() -> int:
    """Measure and print; with --role, be one end of a measurement. With --counts: 1 if a count is
    too large."""
    parser = kit.parser(__doc__)
    parser.add_argument("--size", type=float, default=16, help="MB of the fragment in fp32")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without gloo and hivemind")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--counts", action="store_true", help="counts, which do not vary")
    add_roles(parser, *ROLES)
    arguments = parser.parse_args()
    if arguments.role:
        uvloop.run(play(arguments.role, arguments.told))
        return 0
    size = int(arguments.size * MIB)
    if arguments.counts:
        return count(arguments.only, size)
    rows: dict[str, Any] = {}
    about = {"machine": kit.loaded_machine(), "bytes": size}
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder, ExitStack() as stack:
        beside = [] if arguments.alone else baselines(Path(folder), size, stack)
        for method in arguments.only:
            with ExitStack() as ours:
                pairs = nodes(Path(folder), method, size, ours, arguments.beside)
                for _ in range(arguments.runs):
                    for pair in (*pairs, *beside):
                        pair.run()
                rows |= {pair.name: figures(pair.runs, pair.extra) for pair in pairs}
            rows |= {pair.name: figures(pair.runs) for pair in beside}
            keep(size, about, rows)
    show(rows, f"{about['machine']}; fragment of {size / MIB:g} MiB, {arguments.runs} runs")
    return 0


def keep(size: int, about: dict[str, Any], rows: dict[str, Any]) -> None:
    """Write what is measured so far: a run that is cut off loses one method, and goes on with
    --only."""
    results, name = kit.RESULTS / "exchange.json", f"{size / MIB:g} MiB"
    known = kit.read(results)
    before = known.get(name, {}).get("rows", {})
    kit.write(results, known | {name: {**about, "rows": before | rows}})


# The pairs


def baselines(folder: Path, size: int, stack: ExitStack) -> list[Pair]:
    """gloo and hivemind."""
    made = []
    for role, exchange in (("gloo", reduce_once), ("hivemind", average_once)):
        ends = Ends(str(Path(__file__)), str(folder))
        stack.callback(end_all, ends.children)
        told: dict[str, Any] = {"folder": str(folder), "size": size}
        _, first = ends.start(role, told | {"rank": 0})
        ends.start(role, told | first | {"rank": 1})
        made.append(Pair(role, ends.children, exchange))
        made[-1].run()  # warm
        made[-1].runs.clear()
    return made


def nodes(
    folder: Path,
    method: str,
    size: int,
    stack: ExitStack,
    beside: Path | None,
    counts: bool = False,
) -> list[Pair]:
    """Two nodes that have exchanged WARM times; of another checkout too."""
    made = []
    for place, name in ((None, method), (beside, f"{method} beside")):
        if name != method and beside is None:
            continue
        own = folder / name.replace(" ", "-")
        own.mkdir()
        ends = Ends(str(Path(__file__)), str(own))
        if place is not None:
            rooms = (place.resolve() / room for room in ("protocol", "node", "bootstrap"))
            ends._environment["PYTHONPATH"] = ":".join(map(str, rooms))
        stack.callback(end_all, ends.children)
        told = {"folder": str(own), "method": method, "size": size}
        for end in ("first", "second"):
            ends.start("node", told | {"name": end})
        pair = Pair(name, ends.children, exchange_once)
        for _ in range(WARM):  # slots and vectors are touched for the first time, kernels loaded
            pair.run()
        pair.extra = max(run["extra"] for run in pair.runs)
        pair.runs.clear()
        made.append(pair)
    return made


def exchange_once(pair: Pair) -> dict[str, Any]:
    """One exchange of two nodes. Raises RuntimeError if it is not applied."""
    first, second = pair.children
    for child, other in ((first, second), (second, first)):
        ask(other, ask(child, {"train": True}))
    now = resident(pair.pids)
    pair.held = pair.held or now
    pair.held_private = pair.held_private or private(family(pair.pids), pair.pids)
    forget_peaks(pair.pids)
    cpu = cpu_of(pair.pids)
    with most_private(pair.pids) as most:
        began = ask(first, {"go": True})["began"]
        ended = pair.all({"end": True})
    sleep(REST)
    peak = resident(pair.pids, "VmHWM")
    return figures_of(began, ended) | {
        "cpu": cpu_of(pair.pids) - cpu,
        "extra": peak - pair.held,
        "again": peak - now,
        "private": max(most) - pair.held_private,
    }


def figures_of(began: float, ended: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What both ends tell of an exchange. Raises RuntimeError if it was not applied."""
    if any(one["outcome"] != "applied" for one in ended):
        raise RuntimeError(f"the exchange was not applied: {[one['reason'] for one in ended]}")
    return {
        "seconds": max(one["ended"] for one in ended) - began,
        "bytes": ended[0]["bytes"],
        "stages": {stage: max(one["stages"].get(stage, 0.0) for one in ended) for stage in STAGES},
    }


def resident(pids: list[int], name: str = "VmRSS") -> int:
    """Bytes that processes hold, what both of a node map counted once."""
    return sum(memory_of(pids, name)) - sum(memory_of(pids, "RssShmem", False))


def reduce_once(pair: Pair) -> dict[str, Any]:
    """One all-reduce."""
    return between(pair, lambda: pair.all({"go": True}))


def average_once(pair: Pair) -> dict[str, Any]:
    """One averaging of a group that has met."""
    pair.all({"meet": True})
    pair.all({"met": True})
    return between(pair, lambda: pair.all({"go": True}))


def between(pair: Pair, work: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """What work costs that both ends do at once."""
    held = sum(memory_of(pair.pids, "VmRSS"))
    forget_peaks(pair.pids)
    cpu = cpu_of(pair.pids)
    ended = work()
    return {
        "seconds": max(one["ended"] for one in ended) - min(one["began"] for one in ended),
        "cpu": cpu_of(pair.pids) - cpu,
        "again": sum(memory_of(pair.pids, "VmHWM")) - held,
    }


# Memory


def family(pids: list[int], children: bool = True) -> list[int]:
    """Processes and what they have started."""
    roots = [psutil.Process(pid) for pid in pids]
    below = [one for root in roots for one in root.children(recursive=True)] if children else []
    return [one.pid for one in (*roots, *below)]


def memory_of(pids: list[int], name: str, children: bool = True) -> list[int]:
    """A figure of /proc/PID/status, bytes, of each process."""
    return [figure_of(pid, name) for pid in family(pids, children)]


def figure_of(pid: int, name: str) -> int:
    """A figure of /proc/PID/status, bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
    return int(kilobytes) * 1024


@contextmanager
def most_private(pids: list[int]) -> Iterator[list[int]]:
    """What `private` was, seen LOOK after LOOK until it is left."""
    every, over, found = family(pids), Event(), [0]

    def look() -> None:
        while not over.wait(LOOK):
            found.append(private(every, pids))

    thread = Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def private(every: list[int], roots: list[int]) -> int:
    """Bytes of processes that only swapping would free; what a daemon and its trainer share, both
    map, and it counts once."""
    anonymous = sum(figure_of(pid, "RssAnon") for pid in every)
    return anonymous + sum(figure_of(pid, "RssShmem") for pid in roots)


def forget_peaks(pids: list[int]) -> None:
    """Have peaks counted from now on."""
    for pid in family(pids):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


# Counts


def count(methods: list[str], size: int) -> int:
    """Print the counts of one exchange of each method; 1 if one of them is above its bound."""
    import exchange_counts

    excesses = 0
    for method in methods:
        told = asyncio.run(exchange_counts.count(method, size))
        show(
            {method: figures([figures_of(told["began"], told["ends"])])},
            f"fragment of {size / MIB:g} MiB",
        )
        for name, number in told["counts"].items():
            bound = dict(zip(BOUNDED, BOUNDS.get(method, ()), strict=False)).get(name)
            excess = bound is not None and number > bound
            excesses += excess
            limit = "" if bound is None else f"  at most {bound:g}{', EXCEEDED' * excess}"
            print(f"    {name:8} {number:10.2f}{limit}")
    return int(excesses > 0)


# Showing


def figures(runs: list[dict[str, Any]], extra: float = 0.0) -> dict[str, Any]:
    """Medians, and all runs; ``extra``: memory of the first exchange."""
    row: dict[str, Any] = {
        name: median(run[name] for run in runs)
        for name in ("seconds", "cpu", "bytes")
        if name in runs[0]
    }
    for name, least in (("extra", extra), ("again", 0.0), ("private", 0.0)):
        row[name] = max(least, *(run.get(name, 0.0) for run in runs))
    if "stages" in runs[0]:
        row["stages"] = {stage: median(run["stages"][stage] for run in runs) for stage in STAGES}
    return row | {"runs": runs}


def show(rows: dict[str, Any], title: str) -> None:
    """The table; stages in milliseconds, of the end that took longer."""
    print(title)
    print(
        f"{'':24} {'s':>6} {'CPU s':>6} {'+MB':>5} {'again':>5} {'private':>7} {'MB sent':>8} ",
        end="",
    )
    print("".join(f"{stage:>8}" for stage in STAGES))
    for name, row in rows.items():
        print(
            f"{name:24} {row['seconds']:6.3f} {row.get('cpu', 0):6.2f} {row['extra'] / 1e6:5.0f} "
            f"{row['again'] / 1e6:5.0f} {row['private'] / 1e6:7.0f}",
            end="",
        )
        if "stages" in row:
            print(f" {row['bytes'] / 1e6:8.2f} ", end="")
            print("".join(f"{1000 * row['stages'][stage]:8.0f}" for stage in STAGES), end="")
        print()


if __name__ == "__main__":
    sys.exit(main())
