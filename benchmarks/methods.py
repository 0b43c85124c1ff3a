"""The table of methods: real processes on loopback, several seeds, the same program for every row.

    python benchmarks/methods.py            4 nodes, 400 steps, 3 seeds, 5 methods: 15 minutes
    python benchmarks/methods.py --quick    one seed, two methods, 60 steps

All rows train with Muon inside, so that only the exchange differs. Resumes where it stopped
(out/methods.json), prints a Markdown table, and says whether each claim of the README holds.
"""

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

import kit

from lowcomm_node.swarm.run_template import write_template

METHODS = ("local", "noloco", "diloco", "streaming-diloco", "lowcomm")
COMMUNICATING = METHODS[1:]
GAIN, LOCAL_GAP, AVERAGE_GAP = 0.03, 0.10, 0.02
SPREAD, LOCAL_SPREAD = 6e-3, 1.5e-2
MB = 1e6
OPTIMIZER = "muon"


def main() -> int:
    """Measure what is missing, print the table; 1 if a claim does not hold."""
    parser = kit.parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    steps, seeds = (60, (0,)) if arguments.quick else (400, (0, 1, 2))
    methods = ("local", "noloco") if arguments.quick else METHODS
    out = arguments.out or kit.OUT / ("methods-quick.json" if arguments.quick else "methods.json")
    results = kit.read(out)
    for seed in seeds:
        for method in methods:
            key = name_of(method, seed, arguments.nodes, steps)
            if key not in results:
                print(f"measuring {key}", file=sys.stderr, flush=True)
                results[key] = measure(
                    method, seed, arguments.nodes, steps, out.parent / "swarms" / key
                )
                kit.write(out, results)
    rows = {
        method: [results[name_of(method, seed, arguments.nodes, steps)] for seed in seeds]
        for method in methods
    }
    print(
        f"{arguments.nodes} nodes, {steps} steps, seeds {', '.join(map(str, seeds))}; "
        f"{kit.machine()}\n"
    )
    print(table(rows))
    return 0 if arguments.quick else claims(rows)


def name_of(method: str, seed: int, nodes: int, steps: int) -> str:
    """The name of a run in the results: with a digest of its settings, for presets change."""
    settings = write_template("demo", method, steps, seed, nodes, None, OPTIMIZER)
    return f"{method}/{seed}/{nodes}/{steps}/{sha256(settings.encode()).hexdigest()[:8]}"


def measure(method: str, seed: int, nodes: int, steps: int, home: Path) -> dict[str, Any]:
    """One demo; its result without the sample. Raises RuntimeError with what it printed if it
    fails."""
    # Nodes of a measurement that was cut short would resume from their checkpoints, and count only
    # what is left.
    shutil.rmtree(home, ignore_errors=True)
    command = [
        "demo",
        "--nodes",
        str(nodes),
        "--steps",
        str(steps),
        "--method",
        method,
        "--seed",
        str(seed),
        "--text",
        "python",
        "--json",
    ]
    command += ["--optimizer", OPTIMIZER]
    done = subprocess.run(
        [sys.executable, "-m", "lowcomm_node", *command, "--home", str(home)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    return {
        key: value
        for key, value in result.items()
        if key not in ("sample", "text", "checkpoint", "home", "report", "bytes")
    }


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row a method, one figure a seed."""
    lines = [
        "| method | held-out loss, mean of nodes | averaged weights | weight spread | MB sent a "
        "node | steps a node |",
        "|---|---|---|---|---|---|",
    ]
    for method, results in rows.items():
        cells = [
            " / ".join(f"{nodes_loss(result):.3f}" for result in results),
            " / ".join(f"{result['val_loss_average_weights']:.3f}" for result in results),
            " / ".join(f"{result['weight_spread_rms']:.1e}" for result in results),
            f"{mean(of_nodes(results, 'bytes_sent')) / MB:.1f}",
            f"{mean(of_nodes(results, 'steps')):.0f}",
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def nodes_loss(result: dict[str, Any]) -> float:
    """Mean of the nodes' own last held-out losses, nats a byte."""
    return mean(node["val_loss_last"] for node in result["nodes"])


def of_nodes(results: list[dict[str, Any]], key: str) -> list[float]:
    """One figure of every node of every seed."""
    return [node[key] for result in results for node in result["nodes"]]


def claims(rows: dict[str, list[dict[str, Any]]]) -> int:
    """Print each claim with its worst seed; the number that do not hold, at most 1."""
    local = rows["local"]
    checks: list[tuple[str, float, float, bool]] = []
    for method in COMMUNICATING:
        gain = min(
            nodes_loss(alone) - nodes_loss(result)
            for alone, result in zip(local, rows[method], strict=True)
        )
        gap = max(
            result["val_loss_average_weights"] - nodes_loss(result) for result in rows[method]
        )
        spread = max(result["weight_spread_rms"] for result in rows[method])
        checks += [
            (f"{method}: nats below local, at least", gain, GAIN, gain >= GAIN),
            (
                f"{method}: averaged weights above the nodes' own, at most",
                gap,
                AVERAGE_GAP,
                gap <= AVERAGE_GAP,
            ),
            (f"{method}: weight spread, at most", spread, SPREAD, spread <= SPREAD),
        ]
    gap = min(result["val_loss_average_weights"] - nodes_loss(result) for result in local)
    spread = min(result["weight_spread_rms"] for result in local)
    checks += [
        (
            "local: averaged weights above the nodes' own, at least",
            gap,
            LOCAL_GAP,
            gap >= LOCAL_GAP,
        ),
        ("local: weight spread, at least", spread, LOCAL_SPREAD, spread >= LOCAL_SPREAD),
    ]
    print()
    for name, value, bound, holds in checks:
        print(f"{'holds' if holds else 'FAILS'}  {name} {bound:g}: {value:.4f} (worst seed)")
    return int(not all(holds for *_, holds in checks))


if __name__ == "__main__":
    sys.exit(main())
