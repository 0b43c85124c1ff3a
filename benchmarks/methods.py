"""The table of methods: real processes on loopback, several seeds, the same program for every row.

    python benchmarks/methods.py            4 nodes, 400 steps, 3 seeds, 5 methods: 15 minutes

All rows train with Muon inside, so that only the exchange differs. Resumes where it stopped
(out/methods.json), prints a Markdown table, and says whether each claim of the README holds.
"""

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import kit

from lowcomm_node.planner.run_template import write_template

STEPS, SEEDS = 400, (0, 1, 2)
METHODS = ("local", "noloco", "diloco", "streaming-diloco", "lowcomm")
COMMUNICATING = METHODS[1:]
GAIN, LOCAL_GAP, AVERAGE_GAP = 0.03, 0.10, 0.02
SPREAD, LOCAL_SPREAD = 6e-3, 1.5e-2
MB = 1e6
OPTIMIZER = "muon"


def main() -> int:
    """Measure what is missing, print the table; 1 if a claim does not hold."""
    parser = kit.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=kit.OUT / "methods.json")
    arguments = parser.parse_args()
    out = arguments.out
    results = kit.read(out)
    rows: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed, method in product(SEEDS, METHODS):
        key = name_of(method, seed, arguments.nodes)
        if key not in results:
            print(f"measuring {key}", file=sys.stderr, flush=True)
            home = out.parent / "swarms" / key
            results[key] = measure(method, seed, arguments.nodes, home)
            kit.write(out, results)
        rows[method].append(results[key])
    seeds = ", ".join(map(str, SEEDS))
    print(f"{arguments.nodes} nodes, {STEPS} steps, seeds {seeds}; {kit.machine()}\n")
    print(table(rows))
    return claims(rows)


def name_of(method: str, seed: int, nodes: int) -> str:
    """The name of a run in the results: with a digest of its settings, for presets change."""
    run = {"name": "demo", "steps": STEPS, "seed": seed, "start_peers": nodes}
    train, sync = {"optimizer": OPTIMIZER}, {"method": method}
    settings = write_template({"run": run, "train": train, "sync": sync})
    return f"{method}/{seed}/{nodes}/{STEPS}/{sha256(settings.encode()).hexdigest()[:8]}"


def measure(method: str, seed: int, nodes: int, home: Path) -> dict[str, Any]:
    """One demo; its result without the sample. Raises RuntimeError with what it printed if it
    fails."""
    # Nodes of a measurement that was cut short would resume from their checkpoints, and count only
    # what is left.
    shutil.rmtree(home, ignore_errors=True)
    command = f"demo --nodes {nodes} --steps {STEPS} --method {method} --seed {seed} --text python"
    command += f" --optimizer {OPTIMIZER} --json"
    done = subprocess.run(
        [sys.executable, "-m", "lowcomm_node", *command.split(), "--home", str(home)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    left_out = ("sample", "text", "checkpoint", "home", "report", "bytes")
    return {key: value for key, value in result.items() if key not in left_out}


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row a method, one figure a seed."""
    head = ("method", "held-out loss, mean of nodes", "averaged weights", "weight spread")
    cells = (
        (
            method,
            " / ".join(f"{nodes_loss(result):.3f}" for result in results),
            " / ".join(f"{result['val_loss_average_weights']:.3f}" for result in results),
            " / ".join(f"{result['weight_spread_rms']:.1e}" for result in results),
            f"{mean(of_nodes(results, 'bytes_sent')) / MB:.1f}",
            f"{mean(of_nodes(results, 'steps')):.0f}",
        )
        for method, results in rows.items()
    )
    return kit.table((*head, "MB sent a node", "steps a node"), cells)


def nodes_loss(result: dict[str, Any]) -> float:
    """Mean of the nodes' own last held-out losses, nats a byte."""
    return mean(node["val_loss_last"] for node in result["nodes"])


def of_nodes(results: list[dict[str, Any]], key: str) -> list[float]:
    """One figure of every node of every seed."""
    return [node[key] for result in results for node in result["nodes"]]


def claims(rows: dict[str, list[dict[str, Any]]]) -> int:
    """Print each claim with its worst seed; the number that do not hold, at most 1."""

    def gaps(method: str) -> list[float]:
        return [one["val_loss_average_weights"] - nodes_loss(one) for one in rows[method]]

    def spreads(method: str) -> list[float]:
        return [one["weight_spread_rms"] for one in rows[method]]

    checks: list[tuple[str, float, float, bool]] = []

    def at_least(claim: str, values: list[float], bound: float) -> None:
        checks.append((f"{claim}, at least", min(values), bound, min(values) >= bound))

    def at_most(claim: str, values: list[float], bound: float) -> None:
        checks.append((f"{claim}, at most", max(values), bound, max(values) <= bound))

    for method in COMMUNICATING:
        both = zip(rows["local"], rows[method], strict=True)
        gains = [nodes_loss(alone) - nodes_loss(result) for alone, result in both]
        at_least(f"{method}: nats below local", gains, GAIN)
        at_most(f"{method}: averaged weights above the nodes' own", gaps(method), AVERAGE_GAP)
        at_most(f"{method}: weight spread", spreads(method), SPREAD)
    at_least("local: averaged weights above the nodes' own", gaps("local"), LOCAL_GAP)
    at_least("local: weight spread", spreads("local"), LOCAL_SPREAD)
    print()
    for name, value, bound, holds in checks:
        print(f"{'holds' if holds else 'FAILS'}  {name} {bound:g}: {value:.4f} (worst seed)")
    return int(not all(holds for *_, holds in checks))


if __name__ == "__main__":
    sys.exit(main())
