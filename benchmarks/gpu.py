"""What a GPU makes of a trainer: our loop beside a plain one, copies, merges, Muon, memory.

    python benchmarks/gpu.py [--device cuda] [--small] [--steps N]

`make gpu` runs it before the tests of tests/gpu; together they take less than ten minutes, and what
is measured goes to benchmarks/results/gpu.json. Both loops train the same model of 125 million
parameters (12 layers, 768, 32,000 words, context 1024) on batches of the same size: ours as a node
does, the plain one with ``torch.compile``, autocast and a fused AdamW. Times are medians; the plain
loop runs between two runs of ours. MFU is 6 times parameters times tokens a second, of what
products of 8192 x 8192 matrices in bf16 reach on this GPU in the same run. ``--small`` with
``--device cpu`` only shows that the script works.

Where there are several GPUs, 1, 2 and all train the same batches together. The time that they spend
on communication is the difference to one GPU with as many windows a step as each has, which leaves
communication out, though it moves all weights; the memory of a GPU is all that is taken there.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from lowcomm_node.data import open_tokenizer
from lowcomm_node.models import adapters
from lowcomm_node.models.base import build_model
from lowcomm_node.models.devices import devices_of, memory_on
from lowcomm_node.planner.fit import RANK, with_adapter
from lowcomm_node.system.machine import can_compile
from lowcomm_node.trainer import inner
from lowcomm_node.trainer.gpu import Copies, merge
from lowcomm_node.trainer.memory import count_parameters, estimate_memory
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_node.trainer.optimizer import BatchedMuon
from lowcomm_node.trainer.ranks import Orders, Ranks
from lowcomm_node.trainer.replica import Replica
from lowcomm_node.trainer.world import World
from lowcomm_protocol.exchange import outer
from lowcomm_protocol.plan import Fragment, Slice
from lowcomm_protocol.spec.outer import OuterSettings
from lowcomm_protocol.spec.run import RunSpec

RESULT = kit.RESULTS / "gpu.json"
LARGE = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "feed_forward": 2048,
    "context": 1024,
    "vocab": 32_000,
}
SMALL = {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64, "context": 32, "vocab": 300}
MIB = 1024**2
BESIDE = ("programs", "captures and merges")
"""Parts of the memory estimate that loops without exchanges do not take."""


class Words:
    """Text that is drawn: nothing is read from a disk."""

    def __init__(self, vocab: int, count: int = 1 << 20) -> None:
        self._ids = np.random.default_rng(0).integers(0, vocab, count).astype(np.int64)
        self.tokens = count

    def window(self, start: int, length: int) -> Any:
        """Tokens from ``start`` on."""
        return self._ids[start : start + length]


class Text:
    """Stands in for a dataset."""

    def __init__(self, vocab: int) -> None:
        self.train = self.held_out = Words(vocab)
        self.tokenizer = open_tokenizer("bytes")


class Clock:
    """Times work on a device: it is over when the device has done it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        """Until the device has done all."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, work: Callable[[], object], times: int = 5) -> float:
        """The median of some runs, after one that is not counted."""
        work()
        taken: list[float] = []
        for _ in range(times):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def spec_of(model: dict[str, int], batch: int, optimizer: str) -> RunSpec:
    """A run of this model."""
    return RunSpec.model_validate(
        {
            "run": {"name": "gpu", "steps": 1000},
            "model": model,
            "train": {"batch": batch, "optimizer": optimizer},
            "sync": {"method": "noloco"},
        }
    )


def peak_rate(device: torch.device, clock: Clock, width: int) -> float:
    """Operations a second of products of matrices in bf16."""
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    return 2 * width**3 / clock.seconds(lambda: matrix @ matrix)


def loops(
    device: torch.device, clock: Clock, model: dict[str, int], batch: int, steps: int
) -> dict[str, Any]:
    """Tokens a second of both loops, in turn."""
    spec = spec_of(model, batch, "adamw")
    began = time.perf_counter()
    replica = Replica(spec, "me", Text(model["vocab"]), device)  # type: ignore[arg-type]
    replica.inner_step()
    clock.wait()
    first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def ours() -> None:
        for _ in range(steps):
            replica.take_step()
            while len(replica.unsettled) > 1:
                replica.settle()
        while replica.unsettled:
            replica.settle()

    seconds = clock.seconds(ours, 3) / steps
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    # The plain loop comes alone, that neither takes memory from the other; ours is timed again.
    plain_seconds = plain(replica, device, clock, steps)
    again = clock.seconds(ours, 3) / steps
    tokens = batch * model["context"]
    estimate = estimate_memory(spec, True)
    return {
        "parameters": count_parameters(spec.model),
        "batch": batch,
        "ours, tokens/s": round(tokens / min(seconds, again)),
        "plain, tokens/s": round(tokens / plain_seconds),
        "ours of plain": round(plain_seconds / min(seconds, again), 3),
        "first step, s": round(first, 1),
        "compiled": device.type == "cuda" and can_compile(),
        "memory, MiB": held // MIB,
        "reckoned for a step, MiB": sum(
            amount for part, amount in estimate.device.items() if part not in BESIDE
        )
        // MIB,
    }


def plain(replica: Replica, device: torch.device, clock: Clock, steps: int) -> float:
    """Seconds of a step as one would write it for this GPU alone."""
    model = build_model(replica.spec.model, 0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    kind = device.type

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss_of) if kind == "cuda" and can_compile() else loss_of

    def run() -> None:
        for _ in range(steps):
            tokens, targets = (one.to(device) for one in replica.stream.next_batch())
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                loss = compiled(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return clock.seconds(run, 3) / steps


def muon(device: torch.device, clock: Clock, model: dict[str, int]) -> dict[str, float]:
    """Milliseconds of a step of Muon on the matrices of the blocks."""
    width, wide = model["width"], model["feed_forward"]
    shapes = [(width, width)] * 4 + [(wide, width)] * 2 + [(width, wide)]
    weights = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes * model["layers"]]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    ours = BatchedMuon(weights, 0.95, 0.1, gpu=device.type == "cuda")
    theirs = torch.optim.Muon(weights, lr=0.01, momentum=0.95)
    return {
        "ours, ms": round(1e3 * clock.seconds(lambda: ours.step(0.01)), 2),
        "torch.optim.Muon, ms": round(1e3 * clock.seconds(theirs.step), 2),
    }


def copies(device: torch.device, clock: Clock, numel: int) -> dict[str, float]:
    """Rates of copies, and what a capture and a merge take at the boundary, beside the old way."""
    beside, host = Copies(device), torch.zeros(numel)
    source = torch.randn(numel, device=device)
    fragment, weights = Fragment(0, (Slice("all", 0, numel, numel),)), {"all": source}
    settings = OuterSettings("noloco", 0.7, 0.5, 0.2, "shift", 0.0)

    def snapshot() -> Any:
        found = beside.snapshot(fragment, weights)
        assert found is not None, "the device has no memory for a fragment"
        return found

    def to_device() -> tuple[Tensor, ...]:
        found = beside.to_device(host, host)
        assert found is not None
        return found.wait()

    phi, captured = to_device()
    landing, gigabytes = snapshot(), 4e-9 * numel

    def merge_there() -> None:
        merge(settings, source, phi, captured)

    kept = torch.zeros(numel)

    def merge_here() -> None:
        fast = source.cpu()
        outer.merge(settings, fast, host, kept)
        source.copy_(fast)

    return {
        "fragment, MB": round(4e-6 * numel),
        "to host through pinned pieces, GB/s": round(
            gigabytes / clock.seconds(lambda: beside.to_host(landing, host)), 2
        ),
        "to host at once, GB/s": round(gigabytes / clock.seconds(lambda: host.copy_(source)), 2),
        "to the device through pinned pieces, GB/s": round(
            2 * gigabytes / clock.seconds(to_device), 2
        ),
        "capture at the boundary, ms": round(1e3 * clock.seconds(snapshot), 3),
        "capture that training waits for, ms": round(
            1e3 * clock.seconds(lambda: host.copy_(source)), 3
        ),
        "merge at the boundary, ms": round(1e3 * clock.seconds(merge_there), 3),
        "merge that training waits for, ms": round(1e3 * clock.seconds(merge_here), 3),
    }


_1B = {"layers": 16, "width": 2048, "heads": 16, "feed_forward": 5504}
_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14_336}
FITS: dict[str, tuple[dict[str, int], str, str]] = {
    "1B": (_1B, "", "fp32"),
    "1B, moments in int8": (_1B, "", "int8"),
    "8B, adapter on bf16": (_8B, "bf16", "fp32"),
    "8B, adapter on nf4": (_8B, "nf4", "fp32"),
}
"""Shapes, base of an adapter, and form of moments: what owners of one card ask for."""


def drawn(settings: Any, adapter: Any, _seed: int, _files: Any, device: torch.device) -> Any:
    """An adapted model of random weights: no file has them."""
    model = adapters.allocated(settings, adapter, device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.random_()
    return model


def fits(device: torch.device, clock: Clock, small: bool, steps: int) -> dict[str, Any]:
    """Peak of memory and tokens a second of large models, one window at a time."""
    inner.adapted = drawn
    found: dict[str, Any] = {}
    for name, (shape, base, moments) in FITS.items():
        spec = spec_of(SMALL if small else LARGE | shape | {"vocab": 128_000}, 1, "adamw")
        if base:
            spec = with_adapter(spec, RANK, base)
        words: Any = Text(spec.model.vocab)
        replica = inner.InnerReplica(spec, "me", words, device, moments=moments)
        seconds = clock.seconds(replica.inner_step, steps)
        estimate = estimate_memory(spec, True, cut=Cut(1), form=moments).device
        found[name] = {
            "parameters": count_parameters(spec.model),
            "tokens/s": round(spec.tokens_per_step / seconds),
            "estimated, MiB": sum(estimate[part] for part in estimate if part not in BESIDE) // MIB,
        }
        if device.type == "cuda":
            found[name]["memory, MiB"] = torch.cuda.max_memory_allocated(device) // MIB
            del replica
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return found


def together(
    names: list[str], clock: Clock, model: dict[str, int], batch: int, steps: int
) -> dict[str, Any]:
    """Seconds of a step on these devices, and the memory that is taken of each."""
    spec = spec_of(model, batch, "adamw")
    words: Any = Text(model["vocab"])
    if names[0] != "cpu":
        torch.accelerator.empty_cache()  # what earlier rows held counts for none of these
    if len(names) == 1:
        replica = inner.InnerReplica(spec, "me", words, torch.device(names[0]))
        return {
            "seconds": clock.seconds(replica.inner_step, steps),
            "MiB": taken(names, [os.getpid()]),
        }
    with tempfile.TemporaryDirectory() as home:
        ranks = Ranks(names, Path(home), lambda reason: None)
        if ranks.lost:
            raise SystemExit(f"can't train on all of {names}: {ranks.lost}")
        device = torch.device(ranks.devices[0].name)
        world = ranks.meet(device, Orders(spec.canonical().decode(), World(shards=True), home))
        replica = inner.InnerReplica(spec, "me", words, device, team=ranks, world=world)
        seconds = clock.seconds(replica.inner_step, steps)
        found = {"seconds": seconds, "MiB": taken(names, [one.pid for one in ranks.devices])}
        ranks.stop()
    return found


def taken(names: list[str], pids: list[int]) -> list[int]:
    """MiB of each GPU that are taken; on processors, of each process."""
    if names[0] == "cpu":
        return [psutil.Process(pid).memory_info().rss // MIB for pid in pids]
    both = [memory_on(torch.device(name)) for name in names]
    return [(total - free) // MIB for free, total in both]


def several(
    device: torch.device, clock: Clock, model: dict[str, int], batch: int, steps: int
) -> dict[str, Any]:
    """Rates of 1, 2 and all GPUs, and what communication takes."""
    names = ["cpu", "cpu"] if device.type == "cpu" else devices_of("all")
    if len(names) == 1:
        return {"skipped": "there is one GPU here: nothing to share"}
    found: dict[str, Any] = {}
    for count in sorted({1, 2, len(names)}):
        here = together(names[:count], clock, model, batch, steps)
        seconds = here["seconds"]
        alone = together(names[:1], clock, model, -(-batch // count), steps)["seconds"]
        found[str(count)] = {
            "tokens/s": round(batch * model["context"] / seconds),
            "of one": round(found["1"]["seconds"] / seconds, 2) if found else 1.0,
            "memory of each, MiB": here["MiB"],
            "share of communication": max(0.0, round(1 - alone / seconds, 2)) if found else 0.0,
            "seconds": seconds,
        }
    return found


def main() -> None:
    options = kit.parser(__doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--small", action="store_true", help="a model that a processor trains")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--out", type=Path, default=RESULT)
    chosen = options.parse_args()
    device, model = torch.device(chosen.device), SMALL if chosen.small else LARGE
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: --device cpu --small shows that this works")
    clock, numel = Clock(device), 100_000 if chosen.small else 1 << 24
    torch.set_float32_matmul_precision("high")
    peak = peak_rate(device, clock, 256 if chosen.small else 8192)
    trained = loops(device, clock, model, chosen.batch, chosen.steps)
    for whose in ("ours", "plain"):
        rate = 6 * trained["parameters"] * trained[f"{whose}, tokens/s"]
        trained[f"MFU, {whose}"] = round(rate / peak, 3)
    told = {
        "machine": kit.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "products in bf16, TFLOP/s": round(1e-12 * peak, 1),
        "training": trained,
        "muon": muon(device, clock, model),
        "copies": copies(device, clock, numel),
        "fits": fits(device, clock, chosen.small, chosen.steps),
        "several": several(device, clock, model, chosen.batch, chosen.steps),
    }
    for part, found in told.items():
        print(f"{part}: {found}")
    kit.write(chosen.out, told)


if __name__ == "__main__":
    main()
