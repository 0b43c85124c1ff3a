"""How long a node takes from its start to its first step in a swarm that trains.

    python benchmarks/joining.py [--nodes 3] [--joins 3]

``--nodes`` nodes train the demo's model on this machine, as the demo starts them, and others join
them, each with a home of its own, one after the other; each leaves again. Seconds are printed, and
CPU seconds of daemon, p2pd and trainer together: on a busy machine they say more than seconds.

Writes benchmarks/results/joining.json after each join.
"""

from statistics import median
from time import monotonic
from typing import Any

import kit

from helpers.processes import Node, Swarm
from lowcomm_node.demo.demo import NODE_FLAGS
from lowcomm_node.planner.run_template import write_template

OUT = kit.RESULTS / "joining.json"
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
    found = list[dict[str, float]]()
    with kit.scratch() as folder:
        swarm, run = Swarm(folder), folder / "run.toml"
        settings = {"name": "joining", "steps": 1_000_000, "start_peers": arguments.nodes}
        run.write_text(write_template({"run": settings, "sync": {"method": "lowcomm"}}))
        try:
            swarm.bootstrap("--run", str(run))
            nodes = [start(swarm, f"node{k}") for k in range(arguments.nodes)]
            for node in nodes:
                node.until(lambda s: (s["trainer"]["steps"] or 0) > 20, "training", PATIENCE)
            for k in range(arguments.joins):
                began, node = monotonic(), start(swarm, f"joiner{k}")
                node.until(lambda s: s["trainer"]["loss"] is not None, "its first step", PATIENCE)
                took = {"all": monotonic() - began, "CPU": kit.cpu_of(node.child.pid)}
                node.end()
                found.append(took)
                print(took, flush=True)
                kit.write(OUT, kit.read(OUT) | {f"{arguments.nodes} nodes": found})
        finally:
            swarm.close()
    for figure in found[0] if found else ():
        print(f"{figure}: {median(one[figure] for one in found):.2f} s")


def start(swarm: Swarm, name: str) -> Any:
    """Start a node."""
    node = AsInDemo(swarm.folder / name, swarm.address)
    swarm.processes.append(node)
    return node


if __name__ == "__main__":
    main()
