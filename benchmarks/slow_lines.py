"""Training over slow lines: four nodes in a star, each behind a line of its own. Needs root.

    python benchmarks/slow_lines.py [--lines 20/20 5/20 2/10] [--methods NAME ...] [--seeds 0 1 2]
                        [--seconds N]

Lines are Mbit/s up and down, with 50 ms there and back between any two nodes. The model has 10.8
million parameters. Every inner step takes ``--step`` seconds, so that the line limits exchanges,
not the cores of this machine (`tests/helpers/pacing.py`). Looks at held-out text, every ten
seconds, take no time from steps. Methods are the presets. Seconds count from when all have begun to
train. Printed for each line, method and seed, of all nodes together: exchanges that were applied,
and why others were not; steps, of those that the time allows; bytes of contents that one node sends
in an exchange; and held-out loss, the median of the nodes, against seconds.

The emulated links run with real-time priority, and tell how late they handed packets over. Trainers
do not step back for other programs (``--nice 0``).

All methods train for as long on the same line: 80 s, and 200 s at 2/10; ``--seconds`` sets another
time for all lines.

Writes each result to benchmarks/results/slow_lines.json as soon as it is measured. It skips results
that are there and lasted as long, so that an interrupted run goes on.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from statistics import median
from time import sleep, time
from typing import Any

import kit
from laboratory import Host
from residents import START, Resident, Swarm
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
    print(
        f"{name:24} applied {figure['applied']}, median {figure['seconds']:.1f} s, "
        f"{figure['bytes'] / 1e6:.2f} MB; steps {figure['steps_share']:.1%} of {figure['step']} s; "
        f"loss {figure['losses'][3::4]}; {figure['wire']} Mbit/s up; "
        f"emulator late {1e3 * figure['late']:.0f} ms at worst, load {figure['load']:.1f}",
        flush=True,
    )
    for reason, count in Counter(figure["reasons"]).most_common(12):
        print(f"    {count:4} {reason}", flush=True)


@contextmanager
def star(
    spec: str, up: float, down: float, count: int = NODES
) -> Iterator[tuple[list[Host], list[AsUsers]]]:
    """``count`` hosts, each behind a line of ``up`` and ``down`` bits a second, and their nodes."""
    with kit.laboratory() as (lab, folder):
        homes = [
            lab.public(f"n{k}", link=Link(rate=up, delay=DELAY), down=Link(rate=down, delay=DELAY))
            for k in range(count)
        ]
        for home in homes:
            home.sysctl({"ipv4/tcp_congestion_control": CONGESTION})
            with suppress(PermissionError):  # without it, the emulator still says how late it was
                os.sched_setscheduler(home.link.process.pid, os.SCHED_FIFO, os.sched_param(10))
        swarm = Swarm(folder, spec)
        swarm.serve(lab.public("server"))
        options = swarm.address, "--nice", "0"
        yield homes, [AsUsers(home, folder / home.name, *options) for home in homes]


def measure(spec: str, line: str, seconds: float, step: float) -> dict[str, Any]:
    """One method over one kind of line."""
    pace(step, SHORT_LOOK)
    losses, curve = [float("nan")] * NODES, list[tuple[int, float]]()
    up, down = (float(rate) * 1e6 for rate in line.split("/"))
    with star(spec, up, down) as (homes, nodes):
        for node in nodes:
            node.until(lambda s: (s["trainer"]["steps"] or 0) > 0, "training", START)
        began, first = time(), [steps_of(node) for node in nodes]
        before = [home.link.traffic() for home in homes]
        while (left := began + seconds - time()) > 0:
            sleep(min(5.0, left))
            for number, node in enumerate(nodes):
                if (status := node.status()) is not None:  # else it is as it was a moment ago
                    losses[number] = status["trainer"]["val_loss_last"] or float("nan")
            curve.append((round(time() - began), round(median(losses), 3)))
        lasted, last = time() - began, [steps_of(node) for node in nodes]
        now = [home.link.traffic() for home in homes]
        each = [one for node in nodes for one in node.exchanges() if one["time"] >= began]
    sent = [a.up.delivered_bytes - b.up.delivered_bytes for a, b in zip(now, before, strict=True)]
    done = [one for one in each if one["outcome"] == "applied"]
    steps = sum(last) - sum(first)
    return {
        "applied": len(done),
        "bytes": median([one["bytes_sent"] for one in done] or [0]),
        "seconds": median([one["seconds"] for one in done] or [0.0]),
        "reasons": Counter(reason_of(one) for one in each if one not in done),
        "lasted": lasted,
        "losses": curve,
        "late": max(way.worst_late for one in now for way in (one.up, one.down)),
        "wire": [round(8 * one / lasted / 1e6, 2) for one in sent],
        "load": os.getloadavg()[0],
        "step": step,
        "steps": steps,
        "steps_share": steps * step / (lasted * NODES),
    }


def reason_of(one: dict[str, Any]) -> str:
    """Why an exchange was not applied, without names and numbers."""
    text = re.sub(r"\b[0-9A-Za-z]{6} had", "P had", f"{one['outcome']}: {one['reason']}")
    return re.sub(r"\d+(\.\d+)?", "N", text)[:150]


def steps_of(node: Resident) -> int:
    """Inner steps that it has taken."""
    return node.status()["trainer"]["steps"]


if __name__ == "__main__":
    main()
