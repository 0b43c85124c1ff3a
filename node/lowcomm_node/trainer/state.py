"""A replica as checkpoint parts, and back.

Parts: ``weights`` (fast weights, by name), ``outer`` (``phi.N`` and, where momentum is kept,
``delta.N``, flat, float32, and the state of coders), ``inner`` (moments of the inner optimizer).
The rest is small and goes into the manifest's ``meta``. Joiners get pieces instead
(``transfer.py``).
"""

from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.data.tokenizer import identify
from lowcomm_node.errors import CheckpointError, NotFinite
from lowcomm_node.storage.state_file import not_finite
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange.judging import UsualNorm
from lowcomm_protocol.plan import FragmentProgress, SyncSchedule
from lowcomm_protocol.spec.amendments import newest

Parts = dict[str, dict[str, Tensor]]
_COUNTERS = tuple(field.name for field in fields(FragmentProgress))


def is_copied(replica: Replica) -> bool:
    """Whether weights and moments are copied before they are written. A GPU's always are."""
    tensors = [*replica.weights.values(), *replica.optimizer.moments(copied=False).values()]
    return replica.device.type != "cpu" or sum(map(_bytes, tensors)) <= memory.COPIED


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def snapshot(replica: Replica, copied: bool = True) -> tuple[Parts, dict[str, Any]]:
    """What a resume needs, in host memory; call ``require_finite`` before writing it.

    Unless they are ``copied``, weights and moments are those of the replica, which change with its
    next step.
    """
    parts: Parts = {
        "weights": {
            name: tensor.detach().to("cpu", copy=copied) for name, tensor in replica.weights.items()
        },
        "outer": {
            # Merges replace slow weights and momentum, and never change them in place.
            **{f"phi.{p}": phi for p, phi in enumerate(replica.phi)},
            **{f"delta.{p}": delta for p, delta in enumerate(replica.delta)},
            **_coder_states(replica),
        },
        "inner": replica.optimizer.moments(copied),
    }
    meta = {
        "run_id": replica.run_id,
        "peer_id": replica.peer_id,
        "plan": replica.plan.digest,
        "swarm_step": replica.clock.step,
        "steps": replica.steps,
        "tokens": replica.tokens,
        "skipped": replica.skipped,
        "progress": [asdict(replica.schedule[p]) for p in range(len(replica.schedule))],
        "usual": [history.usual.learned for history in replica.history],
        "stream": replica.stream.state(),
        "model": replica.spec.model.model_dump(),
        "amendments": replica.course.chain.data.decode(),
        "tokenizer": identify(replica.dataset.tokenizer),
    }
    return parts, meta


def require_finite(parts: Parts) -> None:
    """Raise NotFinite where any tensor holds NaN or infinity."""
    for part, tensors in parts.items():
        if (name := not_finite(tensors)) is not None:
            raise NotFinite(
                f"{name} ({part}) holds NaN or infinity: such a state is neither saved nor handed "
                "on."
            )


def restore(replica: Replica, parts: Parts, meta: dict[str, Any]) -> None:
    """Go on where our own checkpoint was.

    Raises CheckpointError if it is not of this run, NotFinite.
    """
    _check(replica, meta)
    require_finite(parts)
    _load(replica, parts)
    replica.clock.step = int(meta["swarm_step"])
    replica.steps, replica.tokens = int(meta["steps"]), int(meta["tokens"])
    replica.skipped = int(meta.get("skipped", 0))  # 0.1 counted none
    replica.stream.restore(meta["stream"])
    replica.course = newest(
        replica.spec, replica.run_id, [replica.course.chain.data, _amendments(meta)]
    )
    for history, usual in zip(replica.history, _usual(replica, meta), strict=True):
        history.usual = usual
    replica.schedule = _schedule(replica, meta["progress"])


def _amendments(meta: dict[str, Any]) -> bytes:
    """Those that the daemon's home may have lost; 0.1 knew none."""
    told = meta.get("amendments", "")
    return told.encode() if isinstance(told, str) else b""


def skip_text(replica: Replica, diverged: dict[str, Any] | None) -> None:
    """Skip the text that led to a divergence, if one was noted: it would lead there again."""
    noted = (diverged or {}).get("stream")
    if isinstance(noted, dict) and noted.get("batches", 0) > replica.stream.batches:
        replica.stream.restore(noted)


def _schedule(replica: Replica, told: list[dict[str, int]]) -> SyncSchedule:
    schedule = SyncSchedule(
        replica.spec.sync.interval, [FragmentProgress(**counters) for counters in told]
    )
    # 0.1 wrote 0 for a fragment that was not due yet: none has synced later than now.
    synced = [
        min(one["synced"], schedule.round_of(p, replica.clock.step)) for p, one in enumerate(told)
    ]
    progress = [replace(schedule[p], synced=synced[p]) for p in range(len(schedule))]
    return SyncSchedule(replica.spec.sync.interval, progress)


def _check(replica: Replica, meta: dict[str, Any]) -> None:
    if meta.get("run_id") != replica.run_id or meta.get("plan") != replica.plan.digest:
        raise CheckpointError(
            f"The state is of run {str(meta.get('run_id'))[:12]}, not of {replica.run_id[:12]}: "
            "use another --home."
        )
    progress = meta.get("progress")
    if not isinstance(progress, list) or len(progress) != len(replica.plan.fragments):
        raise CheckpointError("The state counts other fragments than the plan: it is refused.")
    # A stranger may have written this; everything is checked before anything of it is used.
    counters = [meta.get(name) for name in ("swarm_step", "steps", "tokens")] + [
        meta.get("skipped", 0)
    ]
    lowest = [0] * len(counters)
    for one in progress:
        is_whole = isinstance(one, dict) and len(one) == len(_COUNTERS)
        counters += [one.get(name) for name in _COUNTERS] if is_whole else [None]
        lowest += [-1 if name == "synced" else 0 for name in _COUNTERS]
    limits = zip(counters, lowest, strict=False)
    if not all(type(count) is int and least <= count < 1 << 53 for count, least in limits):
        raise CheckpointError("The state has counters that are none: it is refused.")


def _usual(replica: Replica, meta: dict[str, Any]) -> list[UsualNorm]:
    """Norms of usual progress; a donor that claims nonsense gives none."""
    claimed, count = meta.get("usual"), len(replica.history)
    norms = (
        [one for one in claimed if isinstance(one, float) and 0.0 <= one < 1e6]
        if isinstance(claimed, list)
        else []
    )
    is_whole = isinstance(claimed, list) and len(norms) == len(claimed) == count
    return [UsualNorm(one) for one in (norms if is_whole else [0.0] * count)]


def _load(replica: Replica, parts: Parts) -> None:
    replica.readings.wait()
    with torch.no_grad():
        for name, tensor in parts["weights"].items():
            replica.weights[name].copy_(tensor)
    # Slow weights are replaced, never changed in place: a snapshot under way keeps the old ones.
    # Copied, they do not hold the file of a checkpoint that is removed.
    outer, count = parts["outer"], len(replica.phi)
    replica.phi = [replica.slow(p).copy_(outer[f"phi.{p}"]) for p in range(count)]
    if replica.keeps_momentum:  # 0.1 wrote one where none is needed, too
        replica.delta = [replica.slow(p).copy_(outer[f"delta.{p}"]) for p in range(count)]
    replica.forget_past()
    for p, one in enumerate(replica.coders):
        one.restore({key: parts["outer"][f"{key}.{p}"].numpy() for key in one.state()})
    if parts.get("inner"):
        replica.optimizer.restore(parts["inner"])


def _coder_states(replica: Replica) -> dict[str, Tensor]:
    return {
        f"{key}.{p}": torch.from_numpy(array)
        for p, one in enumerate(replica.coders)
        for key, array in one.state().items()
    }
