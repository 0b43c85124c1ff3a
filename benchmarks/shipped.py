"""What the preset of `lowcomm` is worth to nodes on slow lines: real processes, at equal wall time.
Needs root.

    python benchmarks/shipped.py [--nodes 4] [--seconds 240] [--seeds 0 1 2] [--up 2] [--down 10]

The demo model (234,176 parameters, Muon) on nodes in the star of `slow_lines.py`: lines of ``--up``
and ``--down`` Mbit/s, 50 ms there and back. An inner step takes ``--step`` seconds, so that the
cores of this machine give every row the same steps. Seconds count from when all nodes train; the
learning rate falls until they are over. Rows:

    local        nobody exchanges
    of 0.1       pairs, 3 bits every 4 steps, with a gain of 1.25: what `lowcomm` was in 0.1
    lowcomm      the preset

Told are the loss on held-out text (of all nodes the mean, and each), exchanges that were applied,
bytes that a node sent, and steps that it took. Writes each run to benchmarks/results/shipped.json
as soon as it is measured, and skips what is there, so that one that was cut off goes on. It is 1 if
the preset does not end below both others on the mean of the seeds.
"""

import math
import sys
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

import kit
import slow_lines
from namespaces import missing
from residents import START, Server

from helpers.pacing import SHORT_LOOK, pace

OUT = kit.RESULTS / "shipped.json"
SPEC = """
[run]
name = "shipped"
seed = {seed}
steps = {steps}
start_peers = {nodes}
[train]
optimizer = "muon"
evaluate_every = {every}
[sync]
method = "{method}"
{more}
"""
OF_0_1 = """interval = 4
codec = "mod3"
outer_lr = 1.25
momentum = 0.0
memory = 0.0"""
SHIPPED = "lowcomm"
ROWS = {"local": ("local", ""), "of 0.1": ("lowcomm", OF_0_1), SHIPPED: ("lowcomm", "")}
LOOKS = 12
"""How often a node looks at held-out text."""
SPARE = 1.03
"""Steps of the run, of those that fit: it must not end while it is measured."""


def main() -> int:
    """Measure what is missing and print; 1 if the preset is not the best."""
    parser = kit.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", nargs="*", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--up", type=float, default=2.0, help="Mbit/s")
    parser.add_argument("--down", type=float, default=10.0, help="Mbit/s")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of an inner step")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no laboratory on this machine: {reason}")
    print(f"{kit.loaded_machine()}; {scene(arguments)}", flush=True)
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in arguments.rows}
    # Seed by seed: rows that are compared are measured one after the other.
    for seed in arguments.seeds:
        for row in arguments.rows:
            key = f"{scene(arguments)}, {row}, seed {seed}"
            known = kit.read(arguments.out).get(key)
            if known is None:
                known = measure(row, seed, arguments)
                kit.write(arguments.out, kit.read(arguments.out) | {key: known})
            show(row, seed, known)
            found[row].append(known)
    return conclude(found)


def scene(arguments: Any) -> str:
    """What all rows have in common."""
    return (
        f"{arguments.nodes} nodes, {arguments.up:g}/{arguments.down:g} Mbit/s, "
        f"{arguments.seconds:g} s, steps of {arguments.step:g} s"
    )


def measure(row: str, seed: int, arguments: Any) -> dict[str, Any]:
    """One row with one seed."""
    pace(arguments.step, SHORT_LOOK)
    method, more = ROWS[row]
    steps = math.ceil(SPARE * arguments.seconds / arguments.step)
    spec = SPEC.format(
        seed=seed,
        steps=steps,
        nodes=arguments.nodes,
        every=max(1, steps // LOOKS),
        method=method,
        more=more,
    )
    line = (arguments.up * 1e6, arguments.down * 1e6)
    with slow_lines.star(*line, arguments.nodes) as (lab, folder, homes):
        run = folder / "run.toml"
        run.write_text(spec)
        host = lab.public("server")
        server = Server(host, folder / "server", "--host", host.address, "--run", str(run))
        address = server.address()
        nodes = [
            slow_lines.AsUsers(home, folder / home.name, address, "--nice", "0") for home in homes
        ]
        for node in nodes:
            node.until(lambda s: (s["trainer"]["steps"] or 0) > 0, "training", START)
        began, first = monotonic(), [slow_lines.steps_of(node) for node in nodes]
        watched = slow_lines.watch(homes, lambda: look(nodes), arguments)
        told = [node.status() for node in nodes]
        lasted = monotonic() - began
    return {
        "losses": [slow_lines.loss_of(one) for one in told],
        "curve": watched["losses"],
        "applied": [one["exchanges"]["completed"] for one in told],
        "intervals": [(one["interval"] or {}).get("effective") for one in told],
        "sent": [round(rate * watched["lasted"] * 1e6 / 8) for rate in watched["wire"]],
        "steps": [one["trainer"]["steps"] for one in told],
        "seconds_a_step": lasted
        * len(told)
        / sum(one["trainer"]["steps"] - before for one, before in zip(told, first, strict=True)),
        "lasted": watched["lasted"],
        "late": watched["late"],
        "load": watched["load"],
    }


def look(nodes: list[Any]) -> tuple[list[float], list[int]]:
    """Loss and steps of each."""
    told = [node.status() for node in nodes]
    return [slow_lines.loss_of(one) for one in told], [one["trainer"]["steps"] for one in told]


def show(row: str, seed: int, found: dict[str, Any]) -> None:
    """A line for one run."""
    print(
        f"{row:8} seed {seed}: loss {mean(found['losses']):.4f} "
        f"({' '.join(f'{loss:.3f}' for loss in found['losses'])}), "
        f"{mean(found['applied']):.0f} exchanges, {mean(found['sent']) / 1e6:.1f} MB sent, "
        f"{mean(found['steps']):.0f} steps of {found['seconds_a_step']:.3f} s; "
        f"emulator late {1e3 * found['late']:.0f} ms at worst, load {found['load']:.1f}",
        flush=True,
    )


def conclude(found: dict[str, list[dict[str, Any]]]) -> int:
    """The means, and whether the preset ends lowest."""
    means = {row: mean(mean(one["losses"]) for one in runs) for row, runs in found.items() if runs}
    for row, loss in means.items():
        below = means.get("local", loss) - loss
        print(f"{row:8} {loss:.4f}, {below:.4f} below local")
    others = [loss for row, loss in means.items() if row != SHIPPED]
    return int(SHIPPED in means and any(loss <= means[SHIPPED] for loss in others))


if __name__ == "__main__":
    sys.exit(main())
