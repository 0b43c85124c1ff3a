"""A replica as checkpoint parts, and back.

Parts: ``weights`` (fast weights, by name), ``outer`` (``phi.N`` and, where momentum is kept,
``delta.N``, flat, float32, and the state of coders), ``inner`` (moments of the inner optimizer).
The rest is small and goes into the manifest's ``meta``. Joiners get pieces instead
(``transfer.py``).
"""

from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from lowcomm_node.data.tokenizer import identify
from lowcomm_node.errors import CheckpointError, NotFinite
from lowcomm_node.storage.state_file import not_finite
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.judging import UsualNorm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.plan import FragmentProgress, SyncSchedule
from lowcomm_protocol.spec.amendments import newest
from lowcomm_protocol.spec.run import RunSpec

Parts = dict[str, dict[str, Tensor]]
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]


class _Progress(BaseModel):
    version: _Count
    merged_steps: _Count
    merged_tokens: _Count
    synced: Annotated[int, Field(strict=True, ge=-1, lt=1 << 53)]


class _Counters(BaseModel):
    """The numbers of a checkpoint."""

    swarm_step: _Count
    steps: _Count
    tokens: _Count
    skipped: _Count = 0  # 0.1 counted none
    progress: list[_Progress]


def is_copied(replica: Replica) -> bool:
    """Whether weights and moments are copied before they are written. A GPU's always are."""
    if replica.device.type != "cpu" or replica.team is not None:
        return True
    return memory.volatile_bytes(replica.spec) <= memory.COPIED


def snapshot(replica: Replica, copied: bool = True) -> tuple[Parts, dict[str, Any]]:
    """Parts and meta of a checkpoint, in host memory; call ``require_finite`` before writing it.

    Unless they are ``copied``, weights and moments change with the replica's next step.
    """
    parts: Parts = {
        "weights": replica.all_weights(copied),
        "outer": {
            # Merges replace slow weights and momentum, and never change them in place.
            **{f"phi.{p}": phi for p, phi in enumerate(replica.phi)},
            **{f"delta.{p}": delta for p, delta in enumerate(replica.delta)},
            **{
                f"{key}.{p}": torch.from_numpy(array)
                for p, one in enumerate(replica.coders)
                for key, array in one.state().items()
            },
        },
        "inner": replica.all_moments(copied),
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
        **base_of(replica.spec),
        "amendments": replica.course.chain.data.decode(),
        "tokenizer": identify(replica.dataset.tokenizer),
    }
    return parts, meta


def base_of(spec: RunSpec) -> dict[str, Any]:
    """What a checkpoint says of an adapter, and of the files with the weights that it is of."""
    if spec.adapter is None:
        return {}
    files = [file.name for file in spec.start.files]
    return {"adapter": spec.adapter.model_dump(), "seed": spec.run.seed, "base": files}


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
    counters = _checked(replica, meta)
    require_finite(parts)
    _load(replica, parts)
    replica.clock.step, replica.skipped = counters.swarm_step, counters.skipped
    replica.steps, replica.tokens = counters.steps, counters.tokens
    replica.stream.restore(meta["stream"])
    amendments = meta.get("amendments", "")  # the daemon's home may have lost them; 0.1 knew none
    known = [replica.course.chain.data, amendments.encode() if isinstance(amendments, str) else b""]
    replica.course = newest(replica.spec, replica.run_id, known)
    usual = meta.get("usual")
    if isinstance(usual, list) and len(usual) == len(replica.history):
        for history, norm in zip(replica.history, usual, strict=True):
            history.usual = UsualNorm(norm if isinstance(norm, float) and 0 <= norm < 1e6 else 0.0)
    interval = replica.spec.sync.interval
    progress = [FragmentProgress(**vars(one)) for one in counters.progress]
    plain = SyncSchedule(interval, progress)
    for p, one in enumerate(progress):
        # 0.1 wrote 0 for a fragment that was not due yet: none has synced later than now.
        synced = min(one.synced, plain.round_of(p, replica.clock.step))
        progress[p] = replace(one, synced=synced)
    replica.schedule = SyncSchedule(interval, progress)


def skip_text(replica: Replica, diverged: dict[str, Any] | None) -> None:
    """Skip the text that led to a divergence, if one was noted: it would lead there again."""
    noted = (diverged or {}).get("stream")
    if isinstance(noted, dict) and noted.get("batches", 0) > replica.stream.batches:
        replica.stream.restore(noted)


def _checked(replica: Replica, meta: dict[str, Any]) -> _Counters:
    if meta.get("run_id") != replica.run_id or meta.get("plan") != replica.plan.digest:
        raise CheckpointError(
            f"The state is of run {str(meta.get('run_id'))[:12]}, not of {replica.run_id[:12]}: "
            "use another --home."
        )
    try:
        counters = _Counters.model_validate(meta)
    except ValidationError:
        raise CheckpointError("The state has counters that are none: it is refused.") from None
    if len(counters.progress) != len(replica.plan.fragments):
        raise CheckpointError("The state counts other fragments than the plan: it is refused.")
    return counters


def _load(replica: Replica, parts: Parts) -> None:
    replica.readings.wait()
    replica.load_weights(parts["weights"])
    # Slow weights are replaced, never changed in place: a snapshot under way keeps the old ones.
    # Copied, they do not hold the file of a checkpoint that is removed.
    outer, count = parts["outer"], len(replica.phi)
    replica.phi = [replica.slow(p).copy_(outer[f"phi.{p}"]) for p in range(count)]
    if replica.keeps_momentum:  # 0.1 wrote one where none is needed, too
        replica.delta = [replica.slow(p).copy_(outer[f"delta.{p}"]) for p in range(count)]
    replica.forget_past()
    for p, one in enumerate(replica.coders):
        one.restore({key: outer[f"{key}.{p}"].numpy() for key in one.state()})
    if parts.get("inner"):
        replica.load_moments(parts["inner"])
