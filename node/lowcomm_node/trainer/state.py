"""A replica as checkpoint parts, and back.

Parts: ``weights`` (fast weights, by name), ``outer`` (``phi.N`` and ``delta.N``, flat, float32, and what coders remember),
``inner`` (moments of the inner optimizer). The rest is small and goes into the manifest's ``meta``.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.errors import CheckpointError
from lowcomm_node.manifest import read_manifest
from lowcomm_node.state_file import expected_of, read_foreign_state
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.robust import UsualNorm
from lowcomm_protocol.schedule import FragmentProgress, SyncSchedule

Parts = dict[str, dict[str, Tensor]]
PARTS = ("weights", "outer", "inner")
_COUNTERS = tuple(field.name for field in fields(FragmentProgress))


def snapshot(replica: Replica) -> tuple[Parts, dict[str, Any]]:
    """A copy of everything that a resume or a joiner needs, in host memory."""
    parts: Parts = {
        "weights": {name: tensor.detach().to("cpu", copy=True) for name, tensor in replica.weights.items()},
        "outer": {
            **{f"phi.{p}": phi for p, phi in enumerate(replica.phi)},  # replaced by merges, never changed in place
            **{f"delta.{p}": delta for p, delta in enumerate(replica.delta)},
            **_coder_states(replica),
        },
        "inner": replica.optimizer.moments(),
    }
    meta = {
        "run_id": replica.spec.run_id,
        "peer_id": replica.peer_id,
        "plan": replica.plan.digest,
        "swarm_step": replica.clock.step,
        "steps": replica.steps,
        "tokens": replica.tokens,
        "progress": [asdict(replica.schedule[p]) for p in range(len(replica.schedule))],
        "usual": [usual.learned for usual in replica.usual],
        "stream": replica.stream.state(),
        "model": replica.spec.model.model_dump(),
    }
    return parts, meta


def restore(replica: Replica, parts: Parts, meta: dict[str, Any]) -> None:
    """Go on where our own checkpoint was. Raises CheckpointError if it is not of this run."""
    _check(replica, meta)
    _load(replica, parts)
    replica.clock.step = int(meta["swarm_step"])
    replica.steps, replica.tokens = int(meta["steps"]), int(meta["tokens"])
    replica.stream.restore(meta["stream"])
    replica.usual = _usual(replica, meta)
    progress = [FragmentProgress(**counters) for counters in meta["progress"]]
    replica.schedule = SyncSchedule(replica.spec.sync.interval, progress)


def adopt(replica: Replica, parts: Parts, meta: dict[str, Any]) -> None:
    """Begin where another peer is: its weights, slow weights, momentum and swarm step; our own steps and data go on."""
    _check(replica, meta)
    if meta["swarm_step"] > replica.spec.run.steps:
        raise CheckpointError(f"The state claims swarm step {meta['swarm_step']}, beyond the run's end: it is refused.")
    _load(replica, parts, foreign=True)
    replica.captures.clear()
    replica.usual = _usual(replica, meta)
    replica.clock.observe(int(meta["swarm_step"]))
    synced = replica.schedule
    progress = [
        FragmentProgress(
            version=int(theirs["version"]),
            merged_steps=replica.steps,
            merged_tokens=replica.tokens,
            synced=synced.round_of(p, replica.clock.step),
        )
        for p, theirs in enumerate(meta["progress"])
    ]
    replica.schedule = SyncSchedule(replica.spec.sync.interval, progress)


def read_fetched(replica: Replica, folder: Path, step: int, source: str) -> tuple[Parts, dict[str, Any]]:
    """Read state that came over the network; names, shapes, dtypes and values are checked before it is used.

    Raises CheckpointError if anything is not what this run's model needs.
    """
    info = read_manifest(folder, step)
    expected = {
        "weights": expected_of({name: weight.detach() for name, weight in replica.weights.items()}),
        "outer": {
            f"{kind}.{p}": ((phi.numel(),), torch.float32)
            for kind in ("phi", "delta")
            for p, phi in enumerate(replica.phi)
        }
        | expected_of(_coder_states(replica)),
        "inner": replica.optimizer.expected(),
    }
    offered = [part for part in PARTS if any(file.part == part for file in info.parts)]
    parts: Parts = {}
    for part in offered:
        path = folder / f"{part}.safetensors"
        # A donor that has not taken a step has no moments yet: its joiner warms up anew.
        if part == "inner" and info.meta.get("steps") == 0:
            continue
        parts[part] = read_foreign_state(path, expected[part], source)
    return parts, info.meta


def _check(replica: Replica, meta: dict[str, Any]) -> None:
    if meta.get("run_id") != replica.spec.run_id or meta.get("plan") != replica.plan.digest:
        raise CheckpointError(
            f"The state is of run {str(meta.get('run_id'))[:12]}, not of {replica.spec.run_id[:12]}: use another --home."
        )
    progress = meta.get("progress")
    if not isinstance(progress, list) or len(progress) != len(replica.plan.fragments):
        raise CheckpointError("The state counts other fragments than the plan: it is refused.")
    # A stranger may have written this; everything is checked before anything of it is used.
    counters = [meta.get(name) for name in ("swarm_step", "steps", "tokens")]
    for one in progress:
        counters += (
            [one.get(name) for name in _COUNTERS] if isinstance(one, dict) and len(one) == len(_COUNTERS) else [None]
        )
    if not all(type(count) is int and 0 <= count < 1 << 53 for count in counters):
        raise CheckpointError("The state has counters that are none: it is refused.")


def _usual(replica: Replica, meta: dict[str, Any]) -> list[UsualNorm]:
    """Norms of usual progress; a donor that claims nonsense gives none."""
    claimed, count = meta.get("usual"), len(replica.usual)
    fine = (
        isinstance(claimed, list)
        and len(claimed) == count
        and all(isinstance(one, float) and 0.0 <= one < 1e6 for one in claimed)
    )
    return [UsualNorm(one) for one in (claimed if fine else [0.0] * count)]


def _load(replica: Replica, parts: Parts, foreign: bool = False) -> None:
    with torch.no_grad():
        for name, tensor in parts["weights"].items():
            replica.weights[name].copy_(tensor)
    # Slow weights are replaced, never changed in place: a snapshot that is being written keeps the old ones.
    replica.phi = [parts["outer"][f"phi.{p}"] for p in range(len(replica.phi))]
    replica.delta = [parts["outer"][f"delta.{p}"] for p in range(len(replica.delta))]
    for p, one in enumerate(replica.coders):
        kept = {key: parts["outer"][f"{key}.{p}"].numpy() for key in one.state()}
        (one.inherit if foreign else one.restore)(kept)
    if parts.get("inner"):
        replica.optimizer.restore(parts["inner"])


def _coder_states(replica: Replica) -> dict[str, Tensor]:
    return {
        f"{key}.{p}": torch.from_numpy(array)
        for p, one in enumerate(replica.coders)
        for key, array in one.state().items()
    }
