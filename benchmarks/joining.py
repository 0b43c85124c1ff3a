"""How long a node takes from its start to its first step in a swarm that trains, and where it goes.

    python benchmarks/joining.py [--nodes 3] [--joins 3]

``--nodes`` nodes train the demo's model on this machine, as the demo starts them, and others join
them, each with a home of its own, one after the other; each leaves again. Printed are seconds in
each phase and in what a node says that it waits for, medians of the joins. CPU seconds are those of
daemon, p2pd and trainer together, from the start to the first step: on a busy machine they say more
than seconds.

Writes benchmarks/results/joining.json after each join.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import kit

from helpers.processes import Node, Swarm
from lowcomm_node.demo.demo import NODE_FLAGS
from lowcomm_node.planner.run_template import write_template

OUT = kit.RESULTS / "joining.json"
LOOK = 0.05
"""Seconds between two looks at what it does."""
PATIENCE = 900.0
"""Seconds for anything to happen, on a machine that has more to do."""


class AsInDemo(Node):
    """A node with the options of the demo's."""

    pace = tuple(NODE_FLAGS.split()[3:])


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--joins", type=int, default=3)
    arguments = parser.parse_args()
    print(kit.loaded_machine())
    name = f"{arguments.nodes} nodes"
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        swarm = Swarm(Path(folder))
        try:
            found = list[dict[str, float]]()
            for one in measure(swarm, arguments):
                found.append(one)
                print(", ".join(f"{stage} {took:.1f}" for stage, took in one.items()), flush=True)
                kit.write(OUT, kit.read(OUT) | {name: found})
        finally:
            swarm.close()
    show(found)


def measure(swarm: Swarm, arguments: Any) -> Iterator[dict[str, float]]:
    """Seconds of each stage, of each join."""
    run = swarm.folder / "run.toml"
    settings = {"name": "joining", "steps": 1_000_000, "start_peers": arguments.nodes}
    run.write_text(write_template({"run": settings, "sync": {"method": "lowcomm"}}))
    swarm.bootstrap("--run", str(run))
    nodes = [start(swarm, f"node{k}") for k in range(arguments.nodes)]
    for node in nodes:
        node.until(lambda s: (s["trainer"]["steps"] or 0) > 20, "training", PATIENCE)
    print(f"{len(nodes)} nodes train", flush=True)
    for k in range(arguments.joins):
        yield join(swarm, f"joiner{k}")


def start(swarm: Swarm, name: str) -> Node:
    """Start a node."""
    node = AsInDemo(swarm.folder / name, swarm.address)
    swarm.processes.append(node)
    return node


def join(swarm: Swarm, name: str) -> dict[str, float]:
    """Seconds of each stage of one join, in order."""
    since = began = monotonic()
    stage, stages = "starting", dict[str, float]()
    node = start(swarm, name)
    while True:
        status = node.status()
        now = monotonic()
        stages[stage] = stages.get(stage, 0.0) + now - since
        since = now
        if status is not None:
            if status["trainer"]["loss"] is not None:  # its first step
                break
            waiting = re.split(r":| \(| at /", status["waiting"] or "")[0]
            stage = f"{status['phase']}: {waiting}" if waiting else status["phase"]
        if now - began > PATIENCE:
            raise TimeoutError(f"{name} has not come to a step within {PATIENCE:.0f} s: {stages}")
        sleep(LOOK)
    cpu = kit.cpu_of(node.child.pid)
    node.end()
    return stages | {"all": now - began, "CPU": cpu}


def show(found: list[dict[str, float]]) -> None:
    """A line for each stage."""
    for stage in dict.fromkeys(stage for one in found for stage in one):
        seconds = [one.get(stage, 0.0) for one in found]
        print(f"  {median(seconds):6.2f} s  {stage}  {[round(one, 1) for one in seconds]}")


if __name__ == "__main__":
    main()
