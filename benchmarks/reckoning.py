"""Memory that training takes, reckoned and measured: a real trainer steps, exchanges, saves and
hands over its state.

    python benchmarks/reckoning.py [SHAPE...]

For each shape: the reckoning of ``trainer/memory.py``, and the most memory that the trainer took,
without the files that it maps. The reckoning holds if it is at least that, and at most twice as
much. Writes out/reckoning.json; 1 if it does not hold."""

import asyncio
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kit

from lowcomm_node.ipc.messages import Ready, Stepped
from lowcomm_node.ipc.settings import TrainerSettings
from lowcomm_node.supervision.process import Trainer, TrainerProcess
from lowcomm_node.system.memory_watch import memory_of
from lowcomm_node.trainer.memory import DAEMON, MIB, count_parameters, reckon
from lowcomm_protocol.spec.run import RunSpec

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "demo": {},
    "long": {"model": {"context": 1024}, "train": {"batch": 16}},
    "wide": {"model": {"width": 512, "heads": 8, "feed_forward": 1408, "layers": 6}},
    "wide, Muon, whole model": {
        "model": {"width": 512, "heads": 8, "feed_forward": 1408, "layers": 6},
        "train": {"optimizer": "muon"},
        "sync": {"method": "noloco"},
    },
    "large vocabulary": {
        "model": {"vocab": 32_000, "width": 128, "heads": 4},
        "train": {"batch": 16},
    },
}
LARGE: dict[str, dict[str, dict[str, Any]]] = {
    name: {"model": {"context": 64} | model, "train": {"batch": 2}}
    for name, model in {
        "10M": {"layers": 6, "width": 384, "heads": 6, "feed_forward": 1024},
        "50M": {"layers": 12, "width": 576, "heads": 9, "feed_forward": 1536},
        "125M": {"layers": 17, "width": 768, "heads": 12, "feed_forward": 2048},
    }.items()
}
"""Looked at only where they are named."""
STEPS = 3
MOST = 2.0
"""Times as much as is measured may be reckoned."""
LOOK = 0.005
"""Seconds between two looks at what the trainer takes."""


def main() -> int:
    """Measure; 1 if a reckoning does not hold."""
    parser = kit.parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=", ".join(SHAPES | LARGE))
    rows, wrong = [], 0
    print("shape                     parameters  reckoned MiB  measured MiB  factor")
    for name in parser.parse_args().shapes:
        spec = spec_of((SHAPES | LARGE)[name])
        reckoned = reckon(spec, gpu=False).host_bytes - DAEMON
        with tempfile.TemporaryDirectory() as folder:
            measured = asyncio.run(peak(spec, Path(folder)))
        factor = reckoned / measured
        wrong += not 1.0 <= factor <= MOST
        rows.append({"shape": name, "reckoned": reckoned, "measured": measured})
        print(
            f"{name:24}  {count_parameters(spec.model):10,}  {reckoned / MIB:12.0f}  "
            f"{measured / MIB:12.0f}  {factor:6.2f}"
        )
    kit.write(kit.OUT / "reckoning.json", rows)
    return int(wrong > 0)


def spec_of(settings: dict[str, dict[str, Any]]) -> RunSpec:
    """A run of such a shape that is not over soon."""
    sync = {"method": "lowcomm"} | settings.get("sync", {})
    return RunSpec.model_validate(
        {"run": {"name": "a", "steps": 100_000}, **settings, "sync": sync}
    )


async def peak(spec: RunSpec, folder: Path) -> int:
    """Bytes that a trainer takes at most, through steps, exchanges, a checkpoint and a snapshot."""
    trainer, over = TrainerProcess(), threading.Event()
    settings = TrainerSettings(
        spec=spec.canonical().decode(),
        peer_id="me",
        checkpoints=str(folder / "c"),
        slow=str(folder / "slow"),
        data_cache="out/data",
        device="cpu",
        threads=1,
        checkpoint_every=1_000_000,
    )
    trainer.launch()
    assert trainer.pid is not None
    with ThreadPoolExecutor(1) as beside:
        highest = beside.submit(watch, trainer.pid, over)
        try:
            ready = await trainer.start(settings)
            await step(trainer)
            await exchange(trainer, ready)
            (folder / "s").mkdir()
            await asyncio.gather(trainer.save(), trainer.snapshot(str(folder / "s")), step(trainer))
            await trainer.evaluate()
        finally:
            over.set()
            await trainer.stop()
        return highest.result()


def watch(pid: int, over: threading.Event) -> int:
    """The most that a process takes until it is over."""
    most = 0
    while not over.wait(LOOK):
        most = max(most, memory_of(pid))
    return most


async def step(trainer: Trainer) -> None:
    """Let it take some steps."""
    await trainer.train(True)
    taken = 0
    while taken < STEPS:
        taken += isinstance(await trainer.news.get(), Stepped)
    await trainer.train(False)


async def exchange(trainer: Trainer, ready: Ready) -> None:
    """As many exchanges at once as there may be, with a partner that brings just what we do."""
    at_once = ready.slots // 2
    assert trainer.arena is not None
    for fragment in range(at_once):
        captured = await trainer.capture(fragment, 2 * fragment, True, 0)
        data = bytes(trainer.arena.view(2 * fragment, captured.size))
        trainer.arena.view(2 * fragment + 1, captured.size)[:] = data
        await trainer.receive(fragment, "other", 2 * fragment + 1, captured.size)
    await asyncio.gather(
        *(trainer.merge(fragment, {"me": 1, "other": 1}, 1) for fragment in range(at_once))
    )


if __name__ == "__main__":
    sys.exit(main())
