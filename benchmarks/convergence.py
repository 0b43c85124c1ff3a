"""Convergence of every method, in simulation: the protocol's own objects, equal tokens a replica,
held-out text, 3 seeds.

    python benchmarks/convergence.py               all 489 runs, over 4 hours of two cores; resumes
    python benchmarks/convergence.py --quick       a slice of each part, under 3 minutes
    python benchmarks/convergence.py --part wire   methods, wire, attacks, churn or pairing
    python benchmarks/convergence.py --report      what has been measured so far

``methods``  all methods with the same interval, AdamW and Muon
``wire``     how much of all-reduce's gain over one replica is left at a given share of its bytes
``attacks``  one peer in four lies; or one of two, or one of three of whom another is late
``churn``    peers come late, leave, or are slow
``pairing``  pairs across a hypercube, and drawn anew each time

Bytes are payload bytes that one replica sends, blocks that are sent again included. All-reduce
counts as a ring: 2 (n - 1) / n times the fp32 gradient a step. Writes JSON, Markdown and two plots
to benchmarks/results (--quick: to out)."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kit
from convergence_jobs import ALLREDUCE, AS_MEASURED, PARTS, SINGLE, Job, length, members
from convergence_report import claim, plot, shares, tables

CACHE = kit.OUT / "data"


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    import torch

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import allreduce, simulate, single
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.model_validate(
        {
            "run": {"name": "convergence", "seed": job.seed, "steps": length(job)},
            "train": {"optimizer": job.optimizer} | job.row.train,
            "sync": {"method": job.row.method} | AS_MEASURED.get(job.row.method, {}) | job.row.sync,
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    # Compiling takes half a minute, once, and makes a step a third faster.
    long = job.steps * job.peers > 1000 and shutil.which("g++") is not None
    # A look at held-out text costs as much as 30 steps: only what is plotted is looked at during
    # the run.
    options = {
        "compiled": long,
        "evaluations": min(10, job.steps // 12) if job.part == "methods" and job.seed == 0 else 0,
    }
    if job.row.name == SINGLE:
        result = single(spec, dataset, **options)
    elif job.row.name == ALLREDUCE:
        result = allreduce(spec, dataset, job.peers, **options)
    else:
        result = simulate(spec, dataset, members(job), **options)
    return asdict(result) | {"loss": result.loss}


def main() -> int:
    """Measure what is missing and print the tables; 1 if a claim does not hold."""
    parser = kit.parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument(
        "--only", default="", help="regular expression: only runs whose key matches, e.g. /4/400/"
    )
    parser.add_argument(
        "--report", action="store_true", help="print what has been measured so far; run nothing"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or (
        kit.OUT / "convergence-quick.json" if arguments.quick else kit.RESULTS / "convergence.json"
    )
    jobs = [job for part in arguments.part or PARTS for job in PARTS[part](arguments.quick)]
    jobs = [job for job in jobs if re.search(arguments.only, job.key)]
    jobs.sort(key=lambda job: job.peers * job.steps)
    if arguments.report and not out.exists():
        parser.error(f"nothing has been measured yet: there is no {out}")
    results = kit.read(out)
    if not arguments.report:
        measure_all(
            [job for job in jobs if job.key not in results], results, out, arguments.processes
        )
    report = "\n\n".join(
        filter(
            None,
            [
                f"{kit.machine()}; means over the seeds.",
                tables(jobs, results),
                shares(jobs, results),
            ],
        )
    )
    out.with_suffix(".md").write_text(report + "\n")
    print(report)
    plot(jobs, results, out.parent)
    return 0 if arguments.quick else claim(jobs, results)


def measure_all(jobs: Sequence[Job], results: dict[str, Any], out: Path, processes: int) -> None:
    """Run jobs in parallel; what comes of each is added to the results, and saved at once."""
    from lowcomm_node.node.host import die_with_parent

    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=die_with_parent) as pool:
        running = {pool.submit(measure, job): job for job in jobs}
        for done, future in enumerate(as_completed(running), start=1):
            job = running[future]
            results[job.key] = future.result()
            kit.write(out, results, indent=None)
            print(
                f"{done}/{len(jobs)} {job.key} {results[job.key]['loss']:.3f}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
