"""What an exchange takes from training: at the step boundary, and beside it.

    nice python benchmarks/boundary.py [--method lowcomm] [--layers N] [--rounds N] [--out FILE]

A real replica (10 million parameters by default) trains on one thread and codes on another. Its
partner brings what it brings itself. For each method: the CPU time of an inner step, what capture
and merge add to it at a boundary, and what the other thread takes for an exchange. ``pause`` is the
boundary's share of a step, with as many exchanges a step as are due; ``one core`` the share that
training keeps where trainer and exchanges share a core. ``beside``: steps alternate with and
without an exchange under way, on the clock, each thread on a core of its own where there are two.
Minor page faults are those that the kernel counts. The memory is what the process keeps after
exchanges, above what it took before the first one: vectors that are used again stay.
"""

import gc
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kit
import torch

from lowcomm_node.data import open_data
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import Arena, create_file
from lowcomm_node.system.machine import memory_of
from lowcomm_node.trainer.building import slot_bytes
from lowcomm_node.trainer.exchanges import ExchangeWork
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec

MIB = 1024**2
WIDE = {"width": 384, "heads": 6, "feed_forward": 1024}
"""10.7 million parameters with 6 layers, 50 million with 28."""


class Bench:
    """One replica, and a partner that brings what we bring."""

    def __init__(self, spec: RunSpec, cache: Path) -> None:
        text = open_data("builtin:python", spec.data.tokenizer, cache)
        self.replica = Replica(spec, "me", text, torch.device("cpu"))
        largest = max(fragment.numel for fragment in self.replica.plan.fragments)
        size = slot_bytes(self.replica.exchanged, spec.sync.codec, largest)
        self.arena = Arena(create_file(), 2, size)
        self.coder = ThreadPoolExecutor(1, "coder")
        self.waiting: list[Callable[[], None]] = []
        self.work = ExchangeWork(self.replica, self.arena, self.coder, self.waiting.append)
        self.number = 0

    def ask(self, request: Any) -> Any:
        """Have a request carried out."""
        return self.work.handlers[type(request)](request)

    def capture(self) -> Future[Any]:
        """Begin an exchange of the next fragment, at the boundary."""
        self.fragment = self.number % len(self.replica.plan.fragments)
        self.number += 1
        return self.ask(messages.Capture(fragment=self.fragment, slot=0, realign=False, ahead=0))

    def receive(self, shared: messages.Shared) -> Future[Any]:
        """Take in what the partner brings, and ask for the merge."""
        size = shared.sizes[0]
        self.arena.view(1, size)[:] = self.arena.view(0, size)
        part = messages.Part.WHOLE
        self.ask(
            messages.Receive(
                fragment=self.fragment, part=part, peer="b", slot=1, offset=0, size=size
            )
        )
        return self.ask(
            messages.Merge(fragment=self.fragment, over={"b": 1, "me": 1}, swarm_step=0)
        )

    def merge(self) -> None:
        """Merge what is ripe, at the boundary."""
        for one in self.waiting:
            one()
        self.waiting.clear()
        self.work.merge_ripe(lambda: True)

    def beside(self) -> float:
        """CPU seconds of the coding thread so far."""
        return self.coder.submit(time.thread_time).result()


def taken(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, and what came of it."""
    began = time.thread_time()
    made = work()
    return time.thread_time() - began, made


def in_turn(bench: Bench, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU by stage, medians; minor page faults of an exchange."""
    told: list[tuple[float, ...]] = []
    for _ in range(rounds):
        coded, faults = bench.beside(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        capture, captured = taken(bench.capture)
        merged = bench.receive(captured.result())
        beside = bench.beside()  # and all that was asked before is done
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        step, _ = taken(bench.replica.inner_step)
        faults -= resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        merge, _ = taken(bench.merge)
        merged.result()
        beside = max(beside, bench.beside()) - coded
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        told.append((step, capture, merge, beside, faults))
    step, capture, merge, beside, faults = map(statistics.median, zip(*told, strict=True))
    due = len(bench.replica.plan.fragments) / bench.replica.spec.sync.interval
    return {
        "step_ms": 1e3 * step,
        "capture_ms": 1e3 * capture,
        "merge_ms": 1e3 * merge,
        "beside_ms": 1e3 * beside,
        "pause": due * (capture + merge) / step,
        "kept_on_one_core": step / (step + due * (capture + merge + beside)),
        "faults": faults,
    }


def at_once(bench: Bench, rounds: int) -> float:
    """Steps without an exchange beside steps with one: the ratio of their times on the clock."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        bench.coder.submit(os.sched_setaffinity, 0, {cores[1]}).result()
        os.sched_setaffinity(0, {cores[0]})
    alone, shared = [], []
    for _ in range(rounds):
        began = time.monotonic()
        bench.replica.inner_step()
        alone.append(time.monotonic() - began)
        began = time.monotonic()
        captured = bench.capture()
        captured.add_done_callback(lambda done: bench.receive(done.result()))
        bench.replica.inner_step()
        bench.merge()
        shared.append(time.monotonic() - began)
        bench.beside()
        bench.merge()
    os.sched_setaffinity(0, set(cores))
    return statistics.median(alone) / statistics.median(shared)


def measure(method: str, layers: int, rounds: int) -> dict[str, Any]:
    """All about one method."""
    run = {"name": "boundary", "steps": 100_000}
    model = WIDE | {"layers": layers}
    spec = RunSpec.model_validate({"run": run, "model": model, "sync": {"method": method}})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(spec, Path(folder))
        for _ in range(2):
            bench.replica.inner_step()
        gc.collect()
        before = memory_of(os.getpid())
        in_turn(bench, 2 * len(bench.replica.plan.fragments))  # compiles, and modulo codecs learn
        row = in_turn(bench, rounds)
        row["memory_mib"] = (memory_of(os.getpid()) - before) / MIB
        row["kept_beside"] = at_once(bench, rounds)
        bench.coder.shutdown()
    numels = [fragment.numel for fragment in bench.replica.plan.fragments]
    return {"method": method, "parameters": sum(numels), "fragment": max(numels), **row}


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--method", nargs="*", default=["lowcomm", "noloco"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=kit.OUT / "boundary.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(kit.loaded_machine())
    print(
        "method           params  fragment  step ms  capture ms  merge ms  beside ms   pause"
        "  one core  beside  faults  MiB"
    )
    rows = []
    for method in arguments.method:
        row = measure(method, arguments.layers, arguments.rounds)
        rows.append(row)
        print(
            f"{method:15}  {row['parameters'] / 1e6:5.1f}M  {row['fragment'] / 1e6:7.2f}M"
            f"  {row['step_ms']:7.0f}  {row['capture_ms']:10.1f}  {row['merge_ms']:8.1f}"
            f"  {row['beside_ms']:9.1f}  {row['pause']:6.2%}  {row['kept_on_one_core']:8.3f}"
            f"  {row['kept_beside']:6.3f}  {row['faults']:6.0f}  {row['memory_mib']:4.0f}"
        )
    kit.write(arguments.out, {"machine": kit.loaded_machine(), "rows": rows})


if __name__ == "__main__":
    main()
