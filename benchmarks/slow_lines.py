"""Exchanges over slow lines: four nodes in a star, each behind a line of its own. Needs root.

    python benchmarks/slow_lines.py [--lines 20/20 5/20 2/10] [--methods NAME ...] [--seconds 180]

Lines are Mbit/s up and down, with 50 ms there and back between any two nodes. The model has 10.8
million parameters. Every inner step takes ``--step`` seconds (`paced/`): the line is to limit
exchanges, not the cores of this machine. Told for each line and method, of all nodes together:

    due      fragments that came due in the time measured, by the steps that were taken
    fit      as many of those as the line carries, if it does nothing else and never waits
    applied  of those; bytes are those of contents, sent by one node
    steps    taken, of those that the time allows at one in ``--step`` seconds

The emulated links run with real-time priority, and tell how late they handed packets over. Trainers
do not step back for other programs (``--nice 0``).
Results into benchmarks/results/slow_lines.json.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic, sleep, time
from typing import Any

import kit
from laboratory import Lab
from namespaces import missing
from residents import START, Resident, Server
from shaping import Link

NODES = 4
DELAY = 0.0125
"""Seconds each way of one line: a packet passes two."""
OUT = kit.RESULTS / "slow_lines.json"
SPEC = """
[run]
name = "slow"
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


class AsUsers(Resident):
    """A node with the deadlines that users have."""

    pace = ()


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--lines", nargs="*", default=["20/20", "5/20", "2/10"])
    parser.add_argument("--methods", nargs="*", default=["lowcomm"])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--step", type=float, default=1.0, help="seconds of an inner step")
    parser.add_argument("--evaluate", type=int, default=60, help="steps between two looks")
    parser.add_argument("--keep", type=Path, help="folder for the logs of the nodes")
    parser.add_argument("--label", default="", help="written beside the results")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no laboratory on this machine: {reason}")
    print(f"{kit.loaded_machine()}; steps of {arguments.step} s, {arguments.seconds:.0f} s each")
    for line in arguments.lines:
        for method in arguments.methods:
            figure = measure(line, method, arguments)
            known = kit.read(OUT)
            known[" ".join(filter(None, (line, method, arguments.label)))] = figure
            kit.write(OUT, known)
            show(line, method, figure)


def show(line: str, method: str, figure: dict[str, Any]) -> None:
    """A few lines for one measurement."""
    fit = figure["fit"]
    share = f"{figure['applied'] / fit:.0%}" if fit else "-"
    print(
        f"{line:6} {method:16} applied {figure['applied']} of {fit} that fit ({share}), "
        f"{figure['due']} due; steps {figure['steps_share']:.1%} of {figure['step']} s; "
        f"median {figure['seconds']:.1f} s, {figure['bytes'] / 1e6:.2f} MB "
        f"of {figure['nominal'] / 1e6:.2f}; loss {figure['losses']}; emulator late "
        f"{1e3 * figure['late']:.0f} ms at worst, load {figure['load']:.1f}",
        flush=True,
    )
    for reason, count in Counter(figure["reasons"]).most_common(12):
        print(f"    {count:4} {reason}", flush=True)


def measure(line: str, method: str, arguments: Any) -> dict[str, Any]:
    """One method over one kind of line."""
    up, down = (float(rate) * 1e6 for rate in line.split("/"))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent / "paced")
    os.environ["STEP_SECONDS"] = str(arguments.step)
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder, Lab() as lab:
        os.environ["XDG_RUNTIME_DIR"] = folder
        run = Path(folder) / "run.toml"
        run.write_text(SPEC.format(nodes=NODES, evaluate_every=arguments.evaluate, method=method))
        host = lab.public("server")
        server = Server(host, Path(folder) / "server", "--host", host.address, "--run", str(run))
        address = server.address()
        homes = [
            lab.public(f"n{k}", link=Link(rate=up, delay=DELAY), down=Link(rate=down, delay=DELAY))
            for k in range(NODES)
        ]
        for home in homes:
            with suppress(PermissionError):  # it tells how late it was in any case
                os.sched_setscheduler(home.link.process.pid, os.SCHED_FIFO, os.sched_param(10))
        nodes = [AsUsers(home, Path(folder) / home.name, address, "--nice", "0") for home in homes]
        try:
            for node in nodes:
                node.until(lambda s: (s["trainer"]["steps"] or 0) > 3, "training", START)
            began, first = time(), [steps_of(node) for node in nodes]
            links = [home.link.traffic() for home in homes]
            ends = monotonic() + arguments.seconds
            losses: list[tuple[float, float]] = []
            while monotonic() < ends:
                sleep(min(10.0, max(0.0, ends - monotonic())))
                told = [node.status() for node in nodes]
                losses.append((round(time() - began), median(loss_of(one) for one in told)))
            last, lasted = [steps_of(node) for node in nodes], time() - began
            late = max(
                way.worst_late
                for home in homes
                for way in (home.link.traffic().up, home.link.traffic().down)
            )
            wire = [
                (now.up.delivered_bytes - before.up.delivered_bytes)
                for now, before in zip((home.link.traffic() for home in homes), links, strict=True)
            ]
            rounds = [[one for one in node.rounds() if one["time"] >= began] for node in nodes]
        finally:
            if arguments.keep:
                for home in homes:
                    log = Path(folder) / home.name / "log"
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    (arguments.keep / f"{home.name}.log").write_bytes(log.read_bytes())
    return figures(rounds, first, last, lasted, min(up, down), method) | {
        "step": arguments.step,
        "losses": [(at, round(loss, 3)) for at, loss in losses][-1:]
        and [(at, round(loss, 3)) for at, loss in losses[:: max(1, len(losses) // 4)]],
        "late": late,
        "wire": [round(8 * one / lasted / 1e6, 2) for one in wire],
        "steps_share": sum(b - a for a, b in zip(first, last, strict=True))
        * arguments.step
        / (lasted * NODES),
        "load": os.getloadavg()[0],
    }


def figures(
    rounds: list[list[dict[str, Any]]],
    first: list[int],
    last: list[int],
    lasted: float,
    rate: float,
    method: str,
) -> dict[str, Any]:
    """What the exchanges of all nodes come to; ``rate``: bits a second of the slower direction."""
    from lowcomm_protocol.spec.run import parse_toml

    spec = parse_toml(SPEC.format(nodes=NODES, evaluate_every=1, method=method), "slow lines")
    nominal = nominal_bytes(spec)
    steps = sum(b - a for a, b in zip(first, last, strict=True))
    due = steps * spec.sync.fragments // spec.sync.interval if spec.sync.group > 1 else 0
    carried = int(lasted * rate / 8 / nominal * NODES) if nominal else 0
    each = [one for node in rounds for one in node]
    done = [one for one in each if one["outcome"] == "applied"]
    reasons = Counter(
        f"{one['outcome']}: {plain(one['reason'])}" for one in each if one["outcome"] != "applied"
    )
    reasons.update(f"  left out: {plain(why)}" for one in each for why in one["left_out"].values())
    return {
        "due": due,
        "fit": min(due, carried),
        "carried": carried,
        "applied": len(done),
        "by_node": [sum(one["outcome"] == "applied" for one in node) for node in rounds],
        "nominal": nominal,
        "bytes": median([one["bytes_sent"] for one in done] or [0]),
        "seconds": median([one["seconds"] for one in done] or [0.0]),
        "longest": max([one["seconds"] for one in done] or [0.0]),
        "wasted": sum(one["bytes_sent"] for one in each if one["outcome"] != "applied"),
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


def plain(reason: str) -> str:
    """A reason without the names and numbers that differ each time."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"\b[0-9A-Za-z]{6} had", "P had", reason))[:150]


def steps_of(node: Resident) -> int:
    """Inner steps that it has taken."""
    return node.status()["trainer"]["steps"]


def loss_of(status: dict[str, Any] | None) -> float:
    """Its last loss on held-out text."""
    return (status["trainer"]["val_loss_last"] if status else None) or float("nan")


if __name__ == "__main__":
    main()
