"""Exchanges over slow lines: four nodes in a star, each behind a line of its own. Needs root.

    python benchmarks/slow_lines.py [--lines 20/20 5/20 2/10] [--methods NAME ...] [--seeds 0 1 2]
                        [--seconds N]

Lines are Mbit/s up and down, with 50 ms there and back between any two nodes. The model has 10.8
million parameters. Every inner step takes ``--step`` seconds, so that the line limits exchanges,
not the cores of this machine (`tests/helpers/pacing.py`). Looks at held-out text, every ten
seconds, take no time from steps. Methods are the presets. Seconds count from when all have begun to
train. Printed for each line, method and seed, of all nodes together:

    due      fragments that came due in the time measured, by the steps that were taken
    fit      as many of those as the line carries, if it does nothing else and never waits
    applied  of those; bytes are those of contents, sent by one node
    reasons  why others failed or found no partner; *not begun* are rounds of which no node tells:
             its last exchange of the fragment went on, its line was full, or one was under way at
             the end
    steps    taken, of those that the time allows at one in ``--step`` seconds
    loss     on held-out text, the median of the nodes, against seconds

The emulated links run with real-time priority, and tell how late they handed packets over. Trainers
do not step back for other programs (``--nice 0``).

All methods train for as long on the same line: 80 s, and 200 s at 2/10; ``--seconds`` sets another
time for all lines.

Writes each result to benchmarks/results/slow_lines.json as soon as it is measured. It skips results
that are there and lasted as long, so that an interrupted run goes on.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from statistics import median
from time import monotonic, sleep, time
from typing import Any

import kit
from laboratory import Host, Lab
from namespaces import missing
from residents import START, Resident, Server
from shaping import Link

from helpers.pacing import SHORT_LOOK, pace

NODES = 4
DELAY = 0.0125
"""Seconds each way of one line: a packet passes two."""
CONGESTION = "reno"
"""What hosts begin connections with: of what every kernel has the nearest to CUBIC, which most
systems use. This machine's own may be another."""
OUT = kit.RESULTS / "slow_lines.json"
SPEC = """
[run]
name = "slow"
seed = {seed}
steps = 1000000
start_peers = {nodes}
[model]
layers = 6
width = 384
heads = 6
feed_forward = 1024
context = 32
[train]
optimizer = "adamw"
batch = 1
evaluate_every = {evaluate_every}
[sync]
method = "{method}"
"""
METHODS = ("lowcomm", "noloco", "gossip", "diloco", "streaming-diloco", "local")
SECONDS = {"2/10": 200.0}
"""How long to measure a line that needs longer than `USUAL_SECONDS`."""
USUAL_SECONDS, LOOK = 80.0, 10.0
"""Seconds of other lines; seconds between two looks at held-out text."""


class AsUsers(Resident):
    """A node with the deadlines that users have."""

    pace = ()


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--lines", nargs="*", default=["20/20", "5/20", "2/10"])
    parser.add_argument("--methods", nargs="*", default=["lowcomm"], choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--seconds", type=float, help="of all lines; default: see above")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of an inner step")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no laboratory on this machine: {reason}")
    print(f"{kit.loaded_machine()}; steps of {arguments.step} s")
    for seed, line, method in product(arguments.seeds, arguments.lines, arguments.methods):
        name = f"{line} {method}" + (f" seed {seed}" if seed else "")
        seconds = arguments.seconds or SECONDS.get(line, USUAL_SECONDS)
        figure = kit.read(OUT).get(name)
        if figure is None or figure["lasted"] < 0.9 * seconds:
            every = max(1, round(LOOK / arguments.step))
            spec = SPEC.format(nodes=NODES, evaluate_every=every, method=method, seed=seed)
            figure = measure(spec, line, seconds, arguments.step)
            kit.write(OUT, kit.read(OUT) | {name: figure})
        show(name, figure)


def show(name: str, figure: dict[str, Any]) -> None:
    """A few lines for one measurement."""
    fit = figure["fit"]
    share = f"{figure['applied'] / fit:.0%}" if fit else "-"
    print(
        f"{name:24} applied {figure['applied']} of {fit} that fit ({share}), "
        f"{figure['due']} due; "
        f"steps {figure['steps_share']:.1%} of {figure['step']} s; "
        f"median {figure['seconds']:.1f} s, {figure['bytes'] / 1e6:.2f} MB "
        f"of {figure['nominal'] / 1e6:.2f}; loss {figure['losses'][3::4]}; "
        f"{figure['wire']} Mbit/s up; "
        f"emulator late {1e3 * figure['late']:.0f} ms at worst, load {figure['load']:.1f}",
        flush=True,
    )
    for reason, count in Counter(figure["reasons"]).most_common(12):
        print(f"    {count:4} {reason}", flush=True)


@contextmanager
def star(up: float, down: float, count: int = NODES) -> Iterator[tuple[Lab, Path, list[Host]]]:
    """``count`` hosts, each behind a line of ``up`` and ``down`` bits a second."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder, Lab() as lab:
        os.environ["XDG_RUNTIME_DIR"] = folder
        homes = [
            lab.public(f"n{k}", link=Link(rate=up, delay=DELAY), down=Link(rate=down, delay=DELAY))
            for k in range(count)
        ]
        for home in homes:
            home.sysctl({"ipv4/tcp_congestion_control": CONGESTION})
            with suppress(PermissionError):  # without it, the emulator still says how late it was
                os.sched_setscheduler(home.link.process.pid, os.SCHED_FIFO, os.sched_param(10))
        yield lab, Path(folder), homes


def measure(spec: str, line: str, seconds: float, step: float) -> dict[str, Any]:
    """One method over one kind of line."""
    up, down = (float(rate) * 1e6 for rate in line.split("/"))
    with star(up, down) as (lab, folder, homes):
        return of_nodes(spec, lab, folder, homes, min(up, down), seconds, step)


def of_nodes(
    spec: str,
    lab: Lab,
    folder: Path,
    homes: list[Host],
    rate: float,
    seconds: float,
    step: float,
) -> dict[str, Any]:
    """What nodes come to in ``seconds``; ``rate``: bits a second of the slower direction."""
    pace(step, SHORT_LOOK)
    run = folder / "run.toml"
    run.write_text(spec)
    host = lab.public("server")
    server = Server(host, folder / "server", "--host", host.address, "--run", str(run))
    address = server.address()
    nodes = [AsUsers(home, folder / home.name, address, "--nice", "0") for home in homes]
    for node in nodes:
        node.until(lambda s: (s["trainer"]["steps"] or 0) > 0, "training", START)
    began, first = time(), [steps_of(node) for node in nodes]

    losses = [float("nan")] * NODES

    def look() -> list[float]:
        for number, node in enumerate(nodes):
            if (status := node.status()) is not None:  # else it is as it was a moment ago
                losses[number] = status["trainer"]["val_loss_last"] or float("nan")
        return losses

    watched = watch(homes, look, seconds)
    last = [steps_of(node) for node in nodes]
    each = [one for node in nodes for one in node.exchanges() if one["time"] >= began]
    steps = sum(b - a for a, b in zip(first, last, strict=True))
    row = figures(each, steps, watched["lasted"], rate, spec)
    share = steps * step / (watched["lasted"] * NODES)
    return row | watched | {"step": step, "steps": steps, "steps_share": share}


def watch(homes: list[Host], look: Callable[[], list[float]], seconds: float) -> dict[str, Any]:
    """Let them train; loss over time, and what went over the lines.

    ``look`` returns the loss of each node.
    """
    began, before = monotonic(), [home.link.traffic() for home in homes]
    curve: list[tuple[int, float]] = []
    while (left := began + seconds - monotonic()) > 0:
        sleep(min(5.0, left))
        curve.append((round(monotonic() - began), round(median(look()), 3)))
    lasted = monotonic() - began
    now = [home.link.traffic() for home in homes]
    sent = [a.up.delivered_bytes - b.up.delivered_bytes for a, b in zip(now, before, strict=True)]
    return {
        "lasted": lasted,
        "losses": curve,
        "late": max(way.worst_late for one in now for way in (one.up, one.down)),
        "wire": [round(8 * one / lasted / 1e6, 2) for one in sent],
        "load": os.getloadavg()[0],
    }


def figures(
    each: list[dict[str, Any]], steps: int, lasted: float, rate: float, text: str
) -> dict[str, Any]:
    """What the exchanges of all nodes come to; ``rate``: bits a second of the slower direction."""
    from lowcomm_protocol.spec.run import parse_toml

    spec = parse_toml(text, "slow lines")
    nominal = nominal_bytes(spec)
    due = steps * spec.sync.fragments // spec.sync.interval if spec.sync.group > 1 else 0
    carried = int(lasted * rate / 8 / nominal * NODES) if nominal else 0
    done = [one for one in each if one["outcome"] == "applied"]
    failed = (f"{one['outcome']}: {one['reason']}" for one in each if one not in done)
    reasons = Counter(map(plain, failed))
    reasons["not begun"] = max(0, due - len(each)) if due else 0
    return {
        "due": due,
        "fit": min(due, carried),
        "carried": carried,
        "applied": len(done),
        "nominal": nominal,
        "bytes": median([one["bytes_sent"] for one in done] or [0]),
        "seconds": median([one["seconds"] for one in done] or [0.0]),
        "reasons": dict(reasons),
    }


def nominal_bytes(spec: Any) -> float:
    """Bytes that a node sends for a fragment of mean size, when its codec knows what to expect."""
    from lowcomm_protocol.codecs import coder

    if spec.sync.group == 1:
        return 0.0
    numel = PARAMETERS // spec.sync.fragments
    name = spec.sync.codec
    size = (
        numel * int(name[3:]) / 8 + numel / 64
        if name.startswith("mod")
        else coder(name, numel).max_size
    )
    members = min(spec.sync.group, NODES)
    return size if members == 2 else size * 2 * (members - 1) / members


PARAMETERS = 10_820_000


def plain(text: str) -> str:
    """A reason without names and numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"\b[0-9A-Za-z]{6} had", "P had", text))[:150]


def steps_of(node: Resident) -> int:
    """Inner steps that it has taken."""
    return node.status()["trainer"]["steps"]


if __name__ == "__main__":
    main()
