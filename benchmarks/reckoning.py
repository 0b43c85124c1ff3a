"""Memory that training takes, reckoned and measured: a real trainer steps, exchanges, saves and
hands over its state.

    python benchmarks/reckoning.py [SHAPE...] [--optimizer adamw] [--cold]

For each shape: the reckoning of ``trainer/memory.py``, and the most memory that the trainer took,
in all and in each phase, without the files that it maps. The reckoning holds if both are at most
15 % apart. --cold: as a trainer starts after an installation, with no kernel compiled. Writes
out/reckoning.json; 1 if it does not hold."""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kit

from lowcomm_node.node.messages import (
    Adopt,
    Capture,
    Evaluate,
    Merge,
    Part,
    Ready,
    Receive,
    Save,
    Snapshot,
    Stepped,
    Train,
    TrainerSettings,
)
from lowcomm_node.node.process import Trainer, TrainerProcess
from lowcomm_node.system.machine import memory_of
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
STEPS = 2
APART = 0.15
"""Of what is measured: so much more may be reckoned, or"""
SHORT = 0.05
"""so much less."""
LOOK = 0.005
"""Seconds between two looks at what the trainer takes."""


def main() -> int:
    """Measure; 1 if a reckoning does not hold."""
    parser = kit.parser(__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=", ".join(SHAPES | LARGE))
    parser.add_argument("--optimizer", choices=("adamw", "muon"))
    parser.add_argument("--cold", action="store_true", help="with no kernel compiled")
    arguments = parser.parse_args()
    rows, wrong = [], 0
    print("shape                     parameters  reckoned MiB  measured MiB  factor")
    for name in arguments.shapes:
        spec = spec_of((SHAPES | LARGE)[name], arguments.optimizer)
        reckoned = reckon(spec, gpu=False, compiled=arguments.cold).host_bytes - DAEMON
        with tempfile.TemporaryDirectory() as folder, kernels(Path(folder), arguments.cold):
            phases = asyncio.run(peaks(spec, Path(folder)))
        measured = max(phases.values())
        factor = reckoned / measured
        wrong += not 1.0 - SHORT <= factor <= 1.0 + APART
        row = {"shape": name, "optimizer": spec.train.optimizer, "phases": phases}
        rows.append(row | {"reckoned": reckoned, "measured": measured})
        print(
            f"{name:24}  {count_parameters(spec.model):10,}  {reckoned / MIB:12.0f}  "
            f"{measured / MIB:12.0f}  {factor:6.2f}\n    "
            + ", ".join(f"{phase} {most / MIB:.0f}" for phase, most in phases.items()),
            flush=True,
        )
    kit.write(kit.OUT / "reckoning.json", rows)
    return int(wrong > 0)


def spec_of(settings: dict[str, dict[str, Any]], optimizer: str | None = None) -> RunSpec:
    """A run of such a shape that is not over soon."""
    sync = {"method": "lowcomm"} | settings.get("sync", {})
    train = settings.get("train", {}) | ({"optimizer": optimizer} if optimizer else {})
    return RunSpec.model_validate(
        {"run": {"name": "a", "steps": 100_000}, **settings, "train": train, "sync": sync}
    )


@contextmanager
def kernels(folder: Path, cold: bool) -> Iterator[None]:
    """What trainers find compiled: what is here, or nothing."""
    if not cold:
        yield
        return
    os.environ["NUMBA_CACHE_DIR"] = str(folder / "kernels")
    try:
        yield
    finally:
        del os.environ["NUMBA_CACHE_DIR"]


async def peaks(spec: RunSpec, folder: Path) -> dict[str, int]:
    """Bytes that a trainer takes at most, while it starts, steps, exchanges, saves beside a state
    for joiners, evaluates and takes over a state."""
    # At the niceness of others: it is measured beside them.
    trainer, watching = TrainerProcess(niceness=0), Watching()
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
        beside.submit(watching.watch, trainer.pid)
        try:
            ready = await trainer.start(settings)
            watching.phase = "step"
            await step(trainer)
            watching.phase = "exchange"
            await exchange(trainer, ready, spec.sync.consensus == 0)
            await step(trainer)
            await exchange(trainer, ready, False)
            watching.phase = "save"
            (folder / "s").mkdir()
            _, written, _ = await asyncio.gather(
                trainer.ask(Save()), trainer.ask(Snapshot(folder=str(folder / "s"))), step(trainer)
            )
            watching.phase = "evaluate"
            await trainer.ask(Evaluate())
            watching.phase = "take over"
            await trainer.ask(Adopt(folder=str(folder / "s" / written.name)))
        finally:
            watching.over.set()
            await trainer.stop()
    return watching.most


class Watching:
    """Looks at what a process takes."""

    def __init__(self) -> None:
        self.phase = "start"
        """What it does now."""
        self.most: dict[str, int] = {}
        """Bytes by phase."""
        self.over = threading.Event()

    def watch(self, pid: int) -> None:
        """Look until it is over."""
        while not self.over.wait(LOOK):
            phase = self.phase
            self.most[phase] = max(self.most.get(phase, 0), memory_of(pid))


async def step(trainer: Trainer) -> None:
    """Let it take some steps."""
    await trainer.ask(Train(on=True))
    taken = 0
    while taken < STEPS:
        taken += isinstance(await trainer.news.get(), Stepped)
    await trainer.ask(Train(on=False))


async def exchange(trainer: Trainer, ready: Ready, realign: bool) -> None:
    """As many exchanges at once as there may be, with a partner that brings just what we do.

    ``realign``: in full precision, as where slow weights have come apart that must be equal.
    """
    at_once = ready.slots // 2
    assert trainer.arena is not None
    for fragment in range(at_once):
        ours, theirs = 2 * fragment, 2 * fragment + 1
        capture = Capture(fragment=fragment, slot=ours, realign=realign, ahead=0)
        (size,) = (await trainer.ask(capture)).sizes
        trainer.arena.view(theirs, size)[:] = bytes(trainer.arena.view(ours, size))
        await trainer.ask(
            Receive(
                fragment=fragment, part=Part.WHOLE, peer="other", slot=theirs, offset=0, size=size
            )
        )
    await asyncio.gather(
        *(
            trainer.ask(Merge(fragment=fragment, swarm_step=1, over={"me": 1, "other": 1}))
            for fragment in range(at_once)
        )
    )


if __name__ == "__main__":
    sys.exit(main())
