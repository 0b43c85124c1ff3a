"""What a second machine of the owner brings, by the line to it. Needs root.

    python benchmarks/household.py

A head trains alone, or with a lender on an emulated line of 1 Gbit/s or 100 Mbit/s and 0.4 ms, as
replicas or as two stages. Head and lender have a thread each of this machine; TLS and the emulator
take their part of it, too. Printed are tokens a second, bytes a step on the line, what the lender
does at the end, and held-out loss after all steps. Rates are medians of three stretches of the run.
With stages the worker is killed in the end, and later the line is cut: after how many seconds does
the node say so?

Writes each result to benchmarks/results/household.json, and skips those that are there.
"""

import os
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from statistics import median
from time import monotonic
from typing import Any

import kit
import psutil
from residents import START, Lender, Resident, Swarm
from shaping import Link

from helpers.donors import identity
from helpers.pacing import SHORT_LOOK, pace

OUT = kit.RESULTS / "household.json"
CASES = ("none", "1000", "100", "1000 stages", "100 stages")
"""Line in Mbit/s, and what is not replicas."""
FIGURES = ("tokens_per_second", "bytes_a_step", "loss", "killed_noticed_s", "cut_noticed_s")
MODELS = {
    "1M": ({"layers": 4, "width": 144, "heads": 4, "feed_forward": 384}, 32, 32, 8),
    "10M": ({"layers": 6, "width": 384, "heads": 6, "feed_forward": 1024}, 16, 13, 4),
}
"""Shapes, windows of a step, steps of a run, and those of each stretch at its end."""
SPEC = """
[run]
name = "household"
steps = {{steps}}
start_peers = {{start_peers}}
[model]
{model}
context = 128
[train]
batch = {windows}
evaluate_every = {every}
[sync]
method = "{{method}}"
"""


def measure(model: str, case: str) -> dict[str, Any]:
    """One run."""
    line, stages = case.split()[0], case.endswith("stages")
    shape, windows, steps, stretch = MODELS[model]
    lines = "\n".join(f"{name} = {value}" for name, value in shape.items())
    spec = SPEC.format(model=lines, windows=windows, every=steps)
    os.environ["OMP_NUM_THREADS"] = "1"
    pace(1e-6, SHORT_LOOK)
    with kit.laboratory() as (lab, folder):
        home = folder / "head"
        home.mkdir()
        # The text that a node draws depends on its identity: all runs have the same.
        (home / "identity.key").write_bytes(identity(1).to_libp2p())
        host, rate = lab.public("head"), None if line == "none" else float(line) * 1e6
        far = lab.public("lender", link=Link(rate, delay=0.0002))
        with suppress(PermissionError):
            os.sched_setscheduler(far.link.process.pid, os.SCHED_FIFO, os.sched_param(10))
        swarm, options = Swarm(folder, spec, start_peers=1), ["--nice", "0"]
        swarm.serve(lab.public("server"))
        if line != "none":
            lender = Lender(far, folder / "lender")
            lender.pair(host, home)
            options += ["--with", far.address]
        if stages:
            options += ["--household", "stages", "--micro-batch", str(windows // 4)]
        head = Resident(host, home, swarm.address, *options)
        marks, status = list[tuple[int, float, int]](), dict[str, Any]()
        for wanted in range(steps - 3 * stretch, steps + 1, stretch):
            status = head.until(lambda s, n=wanted: (s["trainer"]["steps"] or 0) >= n, "it", START)
            ways = far.link.traffic()
            moved = ways.up.delivered_bytes + ways.down.delivered_bytes
            marks.append((status["trainer"]["steps"], monotonic(), moved))
        trainer = status["trainer"]
        first = trainer["val_loss_first"]
        done = head.until(lambda s: s["trainer"]["val_loss_last"] != first, "a look", START)
        noticed = notice(head, lender, far.link) if stages else {}
    parts = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(marks)]
    rates = [round(count * windows * 128 / took) for count, took, _ in parts]
    return {
        "parameters": trainer["parameters"],
        "tokens_per_second": median(rates),
        "rates": rates,
        "bytes_a_step": round(median(moved / count for count, _, moved in parts)),
        "loss": done["trainer"]["val_loss_last"],
        "lenders": trainer["lenders"],
        **noticed,
    }


def notice(head: Resident, lender: Lender, line: Link) -> dict[str, float]:
    """Seconds after which a node says that a worker was killed, and that a line is cut."""
    before = head.until(bool, "it", START)["trainer"]
    processes = psutil.Process(lender.child.pid).children(recursive=True)
    (worker,) = (one for one in processes if "lowcomm_node.trainer.worker" in one.cmdline())
    began = monotonic()
    worker.kill()
    head.until(lambda s: s["trainer"]["failures"] > before["failures"], "it is gone", START)
    killed = monotonic() - began
    head.until(lambda s: (s["trainer"]["steps"] or 0) > before["steps"] + 1, "it is back", START)
    began = monotonic()
    line.outage(True)
    head.until(lambda s: s["waiting_code"] == "lender-awaited", "it is silent", START)
    cut = monotonic() - began
    return {"killed_noticed_s": round(killed, 2), "cut_noticed_s": round(cut, 2)}


def doing(lender: dict[str, Any]) -> str:
    """What a lender does."""
    return f"blocks {lender['blocks']}" if lender.get("blocks") else f"{lender['windows']} windows"


def main() -> None:
    """Measure what is missing and print the table."""
    runs = product(MODELS, CASES)
    jobs = {f"{model} {case}": partial(measure, model, case) for model, case in runs}
    kit.measure_missing(kit.parser(__doc__), jobs, OUT)
    rows = [
        [key, *map(one.get, FIGURES), ", ".join(map(doing, one["lenders"]))]
        for key, one in kit.read(OUT).items()
    ]
    print(kit.machine())
    print(kit.table(("model, Mbit/s", *FIGURES, "lender"), rows))


if __name__ == "__main__":
    main()
