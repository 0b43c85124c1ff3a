"""How much of all-reduce's gain over one replica alone pairs and groups keep, at a given share of
its bytes: in simulation, with the protocol's own objects, on held-out text.

    python benchmarks/shares.py                     all runs, many hours of a core; resumes
    python benchmarks/shares.py --only "pairs.*/4/"  those whose key matches a regular expression
    python benchmarks/shares.py --seeds 0 1 2       those of some seeds
    python benchmarks/shares.py --report            what has been measured so far
    python benchmarks/shares.py --quick             a few steps of each row; --only chooses

The runs are in shares_jobs.py. All-reduce has its learning rate tuned for each number of peers.
Bytes are those of contents that one peer sends, blocks that are sent again included; beside them
with control: the frames that agree on an exchange, without what HTTP/2 and TLS add. All-reduce
counts as a ring: 2 (n - 1) / n times the fp32 gradient a step. Writes JSON and Markdown to
benchmarks/results (--quick: to out)."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kit
from shares_jobs import ALLREDUCE, CHOOSE, PEERS, STEPS, Job, jobs
from shares_report import tables

CACHE = kit.OUT / "data"
QUICK_STEPS = 10


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    import torch

    from lowcomm_node.data import open_data
    from lowcomm_node.simulation import allreduce, simulate
    from lowcomm_protocol.spec.run import RunSpec

    torch.set_num_threads(1)
    row = job.row
    spec = RunSpec.model_validate(
        {
            "run": {"name": "shares", "seed": job.seed, "steps": job.steps},
            "train": {"optimizer": "muon"} | row.train,
            "sync": {"method": row.method} | row.sync,
        }
    )
    dataset = open_data("builtin:python", "bytes", CACHE)
    # Compiling takes half a minute, once, and makes a step a third faster.
    compiled = job.steps * job.peers > 1000 and shutil.which("g++") is not None
    run = allreduce if row.name.startswith(ALLREDUCE) else simulate
    result = run(spec, dataset, job.peers, compiled=compiled)
    return {name: one for name, one in asdict(result).items() if name != "curve"} | {
        "loss": result.loss
    }


def main() -> int:
    """Measure what is missing and print the tables."""
    parser = kit.parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="regular expression that keys must match")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or (
        kit.OUT / "shares-quick.json" if arguments.quick else kit.RESULTS / "shares.json"
    )
    every = list(jobs())
    if arguments.quick:
        one_each = (min(PEERS), CHOOSE[0], STEPS)
        few = [one for one in every if (one.peers, one.seed, one.steps) == one_each]
        every = [replace(one, steps=QUICK_STEPS) for one in few]
    chosen = [
        one
        for one in every
        if re.search(arguments.only, one.key)
        and (arguments.seeds is None or one.seed in arguments.seeds)
    ]
    # The baselines first, and of the rest what is short: a killed run loses one job at most.
    chosen.sort(key=lambda one: (one.seed, bool(one.row.bytes_share), one.peers))
    results = kit.read(out)
    if not arguments.report:
        missing = [one for one in chosen if one.key not in results]
        measure_all(missing, out, arguments.processes)
        results = kit.read(out)
    report = f"{kit.machine()}; means over the seeds.\n\n{tables(every, results)}"
    out.with_suffix(".md").write_text(report + "\n")
    print(report)
    return 0


def measure_all(missing: Sequence[Job], out: Path, processes: int) -> None:
    """Run jobs in parallel, each in the order given; what comes of each is saved at once."""
    from lowcomm_node.node.host import die_with_parent

    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=die_with_parent) as pool:
        running = {pool.submit(measure, job): job for job in missing}
        for done, future in enumerate(as_completed(running), start=1):
            job, result = running[future], future.result()
            # Read anew: another process may have added runs of its own.
            kit.write(out, kit.read(out) | {job.key: result})
            print(
                f"{done}/{len(missing)} {job.key} {result['loss']:.4f}", file=sys.stderr, flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
