"""The gate of the sparse codec: top-k in chunks of 4096 beside q2, in groups, at equal bytes.

    python benchmarks/sparse.py                the table so far, after measuring what is missing
    python benchmarks/sparse.py --only /0/     runs whose key matches
    python benchmarks/sparse.py --report       what has been measured

Demo model, Muon, 1000 steps, 4 peers; held-out loss. Settings are chosen on seed 0 and confirmed on
others. ``streaming-diloco`` (q2) comes from ``convergence.json``, part ``wire``, where it is there.
Results: benchmarks/results/sparse.json."""

import json
import re
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import kit

CACHE = kit.OUT / "data"
OUT = kit.RESULTS / "sparse.json"
Q2_BITS = 66 * 8 / 256


@dataclass(frozen=True)
class Run:
    """One setting; ``bytes_like``: the interval at which q2 sends as many bytes; 0 codes in q2."""

    bytes_like: int
    interval: int
    bits: int = 2
    momentum: float = 0.5
    memory: float = 0.0
    """Of quasi-global momentum; 0: Nesterov's."""
    fade: float = 1.0
    first: float = 0.5
    """Share of the bytes that the contributions take; the means take the rest."""
    mix: float = 0.25
    outer_lr: float = 1.0
    keeps: bool = False
    """Whether what coding lost stays in the fast weights, in place of a residual."""
    gathers: bool = False
    """Whether everybody sends all others its contribution, and no mean is coded (SparseLoCo)."""
    codec: str = "sparse"
    peers: int = 4
    steps: int = 1000
    seed: int = 0

    @property
    def key(self) -> str:
        """Its name in the results."""
        return "/" + json.dumps(asdict(self), sort_keys=True)


def measure(run: Run) -> dict[str, Any]:
    """Simulate one run."""
    import torch
    from sparse_codec import AllOfThem, Sparse, density_for, replica

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import simulate
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "convergence", "seed": run.seed, "steps": run.steps},
            "train": {"optimizer": "muon"},
            "sync": {
                "method": "streaming-diloco",
                "outer": "noloco" if run.memory else "nesterov",
                "consensus": 0.0,
                "memory": run.memory,
                "merge": "mix",
                "interval": run.interval,
                "momentum": run.momentum,
                "mix": run.mix,
                "outer_lr": run.outer_lr,
            }
            | ({"merge": "shift"} if run.keeps else {}),
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    options: dict[str, Any] = {"compiled": run.steps * run.peers > 2000 and shutil.which("g++")}
    densities: tuple[float, ...] = ()
    if run.codec == "sparse":
        # Both legs of reduce-scatter take (n - 1) / n of the coded fragment, all-gather n - 1.
        bits = 2 * Q2_BITS * run.interval / run.bytes_like
        if run.gathers:
            densities = (density_for(bits / run.peers, run.bits),)
            first = Sparse(densities[0], run.bits)
            legs = first, AllOfThem(first, run.peers)
        else:
            densities = (
                density_for(bits * run.first, run.bits),
                density_for(bits * (1 - run.first), run.bits),
            )
            legs = Sparse(densities[0], run.bits), Sparse(densities[1], run.bits)
        options["kind"] = replica(legs, 0.0 if run.keeps else run.fade, run.keeps)
    result = simulate(spec, dataset, run.peers, **options)
    return asdict(result) | {"loss": result.loss, "densities": densities}


GRID = [
    Run(bytes_like=14, interval=4),
    Run(bytes_like=14, interval=4, momentum=0.0, fade=0.95),
    Run(bytes_like=34, interval=34, codec="q2", steps=300),
    Run(bytes_like=34, interval=8, mix=0.0, steps=300),
    Run(bytes_like=34, interval=8, mix=0.0, momentum=0.0, fade=0.95, steps=300),
    Run(bytes_like=34, interval=8, keeps=True, steps=300),
    Run(bytes_like=34, interval=8, keeps=True, momentum=0.0, steps=300),
    Run(bytes_like=34, interval=8, gathers=True, mix=0.0, momentum=0.0, fade=0.95, steps=300),
    Run(bytes_like=34, interval=16, gathers=True, mix=0.0, momentum=0.0, fade=0.95, steps=300),
    Run(bytes_like=34, interval=8, gathers=True, keeps=True, steps=300),
    Run(bytes_like=125, interval=31, keeps=True),
    Run(bytes_like=125, interval=16, keeps=True),
    Run(bytes_like=14, interval=4, keeps=True),
    Run(bytes_like=14, interval=4, keeps=True, memory=0.9),
    Run(bytes_like=14, interval=4, mix=0.0, memory=0.9),
    Run(bytes_like=14, interval=4, keeps=True, momentum=0.7),
    Run(bytes_like=14, interval=8, keeps=True, momentum=0.7),
]
"""On seed 0. q2 every 14 and every 125 steps is in ``shares.json``."""
CONFIRMED = (
    Run(bytes_like=14, interval=4, keeps=True),
    Run(bytes_like=34, interval=34, codec="q2", steps=300),
    Run(bytes_like=34, interval=8, keeps=True, steps=300),
    Run(bytes_like=125, interval=31, keeps=True),
)
"""What lost least at each number of bytes, and what it is compared with."""
GRID += [replace(run, seed=seed) for run in CONFIRMED for seed in (1, 2)]


def main() -> int:
    """Measure what is missing, one run after the other, and print the table."""
    parser = kit.parser(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    results = kit.read(OUT)
    runs = [run for run in GRID if re.search(arguments.only, run.key)]
    for run in runs if not arguments.report else ():
        if run.key not in results:
            results[run.key] = measure(run)
            kit.write(OUT, results, indent=None)
            print(run.key, round(results[run.key]["loss"], 4), flush=True)
    for run in runs:
        if one := results.get(run.key):
            print(
                f"{one['loss']:.4f} {one['bytes_sent'] / 1e6:.2f} MB {one['densities']} {run.key}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
