"""The gate of a sparse code in pairs: a part of the values often, beside mod4 of all values seldom,
at equal bytes.

    python benchmarks/sparse_pairs.py             the table so far, after measuring what is missing
    python benchmarks/sparse_pairs.py --only /0/  runs whose key matches
    python benchmarks/sparse_pairs.py --report    what has been measured

The demo model learns for 1000 steps with Muon; losses are held out. Seed 0 chooses settings.
``shares.json`` has pairs with mod4. The simulator carries contents whole, so bytes are reckoned, as
`Run.density` says. Results: benchmarks/results/sparse_pairs.json."""

import json
import re
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import kit
from shares_jobs import MUON, PAIR, remembering
from sparse_codec import CHUNK, chunk_bits

CACHE = kit.OUT / "data"
OUT = kit.RESULTS / "sparse_pairs.json"
MOD4_BITS = {21: 4.86, 52: 6.46, 250: 8.5}
"""Bits a value that mod4 sends at an interval, with blocks that come again (``shares.json``)."""
MORE_BITS = MOD4_BITS[21] - 4
"""Counted for each value that travels, beside those of its code."""


@dataclass(frozen=True)
class Run:
    """One setting; ``bytes_like``: the interval at which mod4 sends as many bytes."""

    bytes_like: int
    interval: int
    way: str = "led"
    """Who chooses the places. ``led``: one of both, and both send their values there. ``both``:
    each a half, likewise. ``one-way``: each its own, where the other moves half of the way to it.
    ``chance``: a seed that both know, so that no places travel."""
    bits: int = 4
    """Of a coded value."""
    coded: bool = True
    """Whether values are coded; else in fp32, but counted as if they were."""
    momentum: float = 0.5
    memory: float = 0.9
    peers: int = 4
    steps: int = 1000
    seed: int = 0

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"/{self.seed}/{json.dumps(asdict(self), sort_keys=True)}"

    @property
    def density(self) -> float:
        """The largest part of the values that may travel from each of both."""
        budget = MOD4_BITS[self.bytes_like] * self.interval / self.bytes_like
        parts = (k / CHUNK for k in range(CHUNK, 0, -1))
        return next(part for part in parts if self.sends(part) <= budget)

    def sends(self, part: float) -> float:
        """Bits a value of a fragment that a peer sends on the mean, if such a part of them travels:
        places as an Elias-Fano list, and values."""
        listed = {"led": part, "both": part / 2, "one-way": part, "chance": 0.0}[self.way]
        times = {"led": 0.5, "both": 1.0, "one-way": 1.0, "chance": 0.0}[self.way]
        places = chunk_bits(CHUNK, listed, 0) / CHUNK if listed else 0.0
        return times * places + (self.bits + MORE_BITS) * part


def measure(run: Run) -> dict[str, Any]:
    """Simulate one run."""
    import torch
    from sparse_replica import replica

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import simulate
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "shares", "seed": run.seed, "steps": run.steps},
            "train": MUON,
            "sync": PAIR
            | remembering(run.momentum, run.memory)
            | {"method": "lowcomm", "codec": "fp32", "interval": run.interval},
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    kind = replica(run.way, run.density, run.bits if run.coded else None, run.seed)
    compiled = run.steps * run.peers > 1000 and shutil.which("g++") is not None
    result = simulate(spec, dataset, run.peers, kind=kind, compiled=compiled)
    return asdict(result) | {"loss": result.loss, "density": run.density}


GRID = [
    Run(bytes_like=21, interval=5),
    Run(bytes_like=21, interval=5, bits=3),
    Run(bytes_like=21, interval=5, bits=6),
    Run(bytes_like=21, interval=5, coded=False),
    Run(bytes_like=21, interval=5, way="both"),
    Run(bytes_like=21, interval=5, way="one-way", coded=False),
    Run(bytes_like=21, interval=5, way="chance"),
    Run(bytes_like=21, interval=10, memory=0.8),
    Run(bytes_like=52, interval=5),
    Run(bytes_like=52, interval=10, memory=0.8),
    Run(bytes_like=52, interval=10, memory=0.8, bits=3),
    Run(bytes_like=52, interval=20, memory=0.64),
    Run(bytes_like=250, interval=50, memory=0.3, steps=2800),
]
"""On seed 0."""
CONFIRMED = (
    Run(bytes_like=21, interval=5),
    Run(bytes_like=21, interval=10, memory=0.8),
    Run(bytes_like=52, interval=10, memory=0.8),
)
GRID += [replace(run, seed=seed) for run in CONFIRMED for seed in (1, 2)]
GRID += [replace(run, peers=8) for run in CONFIRMED[1:]]


def main() -> int:
    """Measure what is missing, one run after the other, and print the table."""
    parser = kit.parser(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    runs = [run for run in GRID if re.search(arguments.only, run.key)]
    for run in runs if not arguments.report else ():
        if run.key not in kit.read(OUT):
            result = measure(run)
            kit.write(OUT, kit.read(OUT) | {run.key: result}, indent=None)
            print(run.key, round(result["loss"], 4), flush=True)
    results = kit.read(OUT)
    for run in runs:
        if one := results.get(run.key):
            print(f"{one['loss']:.4f} {one['spread']:.1e} {one['density']:.3f} {run.key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
