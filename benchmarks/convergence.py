"""Convergence of every method, in simulation: the protocol's own objects, equal tokens a replica, held-out text, 3 seeds.

    python benchmarks/convergence.py               everything: under 3 hours on two cores; resumes where it stopped
    python benchmarks/convergence.py --quick       a slice of each part, under 3 minutes
    python benchmarks/convergence.py --part wire   one part: methods, wire, attacks or churn

``methods``  all methods with the same interval, AdamW and Muon
``wire``     how much of all-reduce's gain over one replica is left at a given share of its bytes
``attacks``  one peer in four lies
``churn``    peers come late, leave, or are slow

Bytes are payload bytes that one replica sends, blocks that are sent again included. All-reduce counts as a ring: 2 (n - 1) / n
times the fp32 gradient a step. Writes JSON, Markdown and two plots to benchmarks/results (--quick: to out).
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from convergence_report import ALLREDUCE, SINGLE, claim, plot, shares, tables

SEEDS = (0, 1, 2)
CACHE = Path("out/data")
RESULTS = Path(__file__).parent / "results"
"""In the repository: whoever has a doubt deletes a result and runs again."""


@dataclass(frozen=True)
class Row:
    """A method with its settings."""

    name: str
    method: str = "local"
    sync: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run to measure."""

    part: str
    row: Row
    optimizer: str
    peers: int
    steps: int
    seed: int
    scene: str = "calm"

    @property
    def key(self) -> str:
        """Its name in the results: all that could change them."""
        settings = json.dumps([self.row.method, self.row.sync, self.row.train], sort_keys=True)
        return f"{self.part}/{self.scene}/{self.row.name}/{self.optimizer}/{self.peers}/{self.steps}/{self.seed}/{settings}"


# What is measured

EVERY_20 = {"interval": 20, "fragments": 4, "overlap": 1, "min_steps": 5}
WHOLE_20 = {"interval": 20, "fragments": 1, "overlap": 0, "min_steps": 5}
STREAMING = EVERY_20 | {"outer_lr": 0.5, "momentum": 0.5, "merge": "mix", "mix": 0.5, "error_feedback": False}
LOWCOMM = EVERY_20 | {"outer_lr": 0.7, "momentum": 0.3, "merge": "mix", "mix": 0.5}
METHODS = (
    Row(SINGLE),
    Row("local"),
    Row(ALLREDUCE),
    Row("gossip", "gossip", WHOLE_20),
    Row("diloco", "diloco", WHOLE_20),
    Row("streaming-diloco fp32", "streaming-diloco", STREAMING | {"codec": "fp32"}),
    Row("streaming-diloco e3m0", "streaming-diloco", STREAMING | {"codec": "e3m0"}),
    Row("streaming-diloco q2", "streaming-diloco", STREAMING | {"codec": "q2", "error_feedback": True}),
    Row("noloco", "noloco", WHOLE_20),
    Row("lowcomm fp32", "lowcomm", LOWCOMM | {"codec": "fp32"}),
    Row("lowcomm mod8", "lowcomm", LOWCOMM | {"codec": "mod8"}),
    Row("lowcomm mod4", "lowcomm", LOWCOMM | {"codec": "mod4"}),
    Row("lowcomm mod3", "lowcomm", LOWCOMM | {"codec": "mod3"}),
)
RARELY = Row("lowcomm mod4, every 100", "lowcomm", LOWCOMM | {"codec": "mod4", "interval": 100, "min_steps": 25})


def methods(quick: bool) -> Iterator[Job]:
    """The matrix of methods."""
    for seed in (0,) if quick else SEEDS:
        for peers in (2,) if quick else (4, 8):
            for steps in (60,) if quick else (400, 1000):
                for optimizer in ("adamw",) if quick else ("adamw", "muon"):
                    for row in METHODS:
                        if not quick or row.name in (SINGLE, ALLREDUCE, "streaming-diloco q2", "lowcomm mod4"):
                            yield Job("methods", row, optimizer, peers, steps, seed)
                    if steps == 1000:
                        yield Job("methods", RARELY, optimizer, peers, steps, seed)


# Learning rate and momentum of Muon were tuned on seed 0 for each kind of row alike; docs/methods.md tells what was tried.
# The longer the interval, the further pairs are apart: 4 bits wrap less often than 3, and momentum begins to help.
RARE_PAIRS = {"codec": "mod4", "outer_lr": 0.7, "momentum": 0.3}
WIRE = {
    "muon": (
        Row(SINGLE, train={"muon_momentum": 0.8}),
        Row(ALLREDUCE, train={"muon_momentum": 0.8}),
        Row("streaming-diloco, 1/50", "streaming-diloco"),
        Row("lowcomm, 1/50", "lowcomm"),
        Row("streaming-diloco, 1/200", "streaming-diloco", {"interval": 14}),
        Row("lowcomm, 1/200", "lowcomm", RARE_PAIRS | {"interval": 21}),
        Row("streaming-diloco, 1/500", "streaming-diloco", {"interval": 34}),
        Row("lowcomm, 1/500", "lowcomm", RARE_PAIRS | {"interval": 52}),
    ),
    "adamw": (
        Row(SINGLE, train={"learning_rate": 3e-3}),
        Row(ALLREDUCE, train={"learning_rate": 6e-3}),
    ),
}


def wire(quick: bool) -> Iterator[Job]:
    """The presets, and the same with longer intervals, against all-reduce."""
    for peers in (2,) if quick else (4, 8):
        for seed in (0,) if quick else SEEDS:
            for optimizer in ("muon",) if quick else ("muon", "adamw"):
                for row in WIRE[optimizer][: 4 if quick else None]:
                    yield Job("wire", row, optimizer, peers, 60 if quick else 1000, seed)


BY_SCENE = (
    Row("streaming-diloco e3m0", "streaming-diloco", STREAMING | {"codec": "e3m0"}),
    Row("lowcomm mod4", "lowcomm", LOWCOMM | {"codec": "mod4"}),
)


def attacks(quick: bool) -> Iterator[Job]:
    """Three honest peers alone, and with a fourth that lies."""
    for row in BY_SCENE[1:] if quick else BY_SCENE:
        for seed in (0,) if quick else SEEDS:
            for scene in (
                ("three honest", "huge") if quick else ("three honest", "nan", "huge", "flipped", "flipped-huge")
            ):
                yield Job("attacks", row, "adamw", 4, 60 if quick else 400, seed, scene)


def churn(quick: bool) -> Iterator[Job]:
    """Four peers, of whom some come late, leave, or are slow."""
    for row in BY_SCENE[1:] if quick else BY_SCENE:
        for seed in (0,) if quick else SEEDS:
            for scene in ("undisturbed", "one late") if quick else tuple(CHURN):
                yield Job("churn", row, "adamw", 4, 60 if quick else 400, seed, scene)


PARTS = {"methods": methods, "wire": wire, "attacks": attacks, "churn": churn}


CHURN = {
    "undisturbed": 1.0,
    "one late": 12 / 11,
    "one leaves": 8 / 7,
    "one of half speed": 8 / 7,
    "two of half speed": 4 / 3,
}
"""How much longer a run is than an undisturbed one, so that the swarm trains on the same tokens."""


def members(job: Job) -> list[Any]:
    """Who takes part in a scene."""
    from lowcomm_node.simulation import Member

    honest, steps = [Member()] * 3, length(job)
    match job.scene:
        case "calm":
            return [Member()] * job.peers
        case "undisturbed":
            return [*honest, Member()]
        case "three honest":
            return honest
        case "one late":
            return [*honest, Member(joins=steps / 3)]
        case "one leaves":
            return [*honest, Member(leaves=steps / 2)]
        case "one of half speed":
            return [*honest, Member(speed=0.5)]
        case "two of half speed":
            return [Member(), Member(), Member(speed=0.5), Member(speed=0.5)]
        case attack:
            return [*honest, Member(attack=attack)]


def length(job: Job) -> int:
    """Steps of a run."""
    return round(job.steps * CHURN.get(job.scene, 1.0))


# Measuring


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    import torch

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import allreduce, simulate, single
    from lowcomm_protocol.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "convergence", "seed": job.seed, "steps": length(job)},
            "train": {"optimizer": job.optimizer} | job.row.train,
            "sync": {"method": job.row.method} | job.row.sync,
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    # Compiling takes half a minute, once, and makes a step a third faster.
    long = job.steps * job.peers > 1000 and shutil.which("g++") is not None
    options = {"compiled": long, "evaluations": 10 if job.scene == "calm" else 0}
    if job.row.name == SINGLE:
        result = single(spec, dataset, **options)
    elif job.row.name == ALLREDUCE:
        result = allreduce(spec, dataset, job.peers, **options)
    else:
        result = simulate(spec, dataset, members(job), **options)
    return asdict(result) | {"loss": result.loss}


def main() -> int:
    """Measure what is missing and print the tables; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--only", default="", help="regular expression: only runs whose key matches, e.g. /4/400/")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or (Path("out/convergence-quick.json") if arguments.quick else RESULTS / "convergence.json")
    jobs = [job for part in arguments.part or PARTS for job in PARTS[part](arguments.quick)]
    jobs = [job for job in jobs if re.search(arguments.only, job.key)]
    jobs.sort(key=lambda job: job.peers * job.steps)
    results = json.loads(out.read_text()) if out.exists() else {}
    missing = [job for job in jobs if job.key not in results]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        running = {pool.submit(measure, job): job for job in missing}
        for done, future in enumerate(as_completed(running), start=1):
            job = running[future]
            results[job.key] = future.result()
            save(out, results)
            print(f"{done}/{len(missing)} {job.key} {results[job.key]['loss']:.3f}", file=sys.stderr, flush=True)
    report = "\n\n".join([machine(), tables(jobs, results), shares(jobs, results)])
    out.with_suffix(".md").write_text(report + "\n")
    print(report)
    plot(jobs, results, out.parent)
    return 0 if arguments.quick else claim(jobs, results)


def machine() -> str:
    """What it ran on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; means over the seeds."


def save(out: Path, results: dict[str, Any]) -> None:
    """Write all results, as a whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".writing")
    temporary.write_text(json.dumps(results))
    temporary.replace(out)


if __name__ == "__main__":
    sys.exit(main())
