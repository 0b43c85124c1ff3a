"""The memory of a GPU that a run takes, and what to change where that is too little. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from typing import Any

from lowcomm_node.models.frozen import FORMS
from lowcomm_node.trainer.memory import (
    MemoryEstimate,
    count_parameters,
    count_trained,
    estimate_memory,
)
from lowcomm_node.trainer.micro_batch import Cut, choose
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import AdapterSettings, StartFile, StartSettings

LEAST_CONTEXT = 256
RANK = 16
"""Rank of an adapter that is tried where all weights are to be trained."""
ANY_FILE = StartFile(name="any.safetensors", size=1, sha256="0" * 64, pieces="0" * 64)
"""Stands for the weights of a run that is not written yet."""


@dataclass(frozen=True, kw_only=True)
class GpuFit:
    """The memory of a GPU that a run takes there."""

    parameters: int
    """Parameters of the model, frozen ones included."""
    trained: int
    vram_bytes: int
    """Memory of the GPU that may be taken; of each, where there are several."""
    gpus: int = 1
    batch: int
    """Windows that a step learns from."""
    windows: int | None
    """The largest micro-batch that fits; null if none does."""
    recompute: bool
    """Whether activations are computed again in the backward pass."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the GPU by what takes them: with this micro-batch, or else with one window."""
    host_bytes: int
    """Memory of the machine."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The first changes that make it fit, by setting; empty where it does or nothing helps."""
    changed_bytes: int | None = None
    """Bytes of the GPU with these changes, and the largest micro-batch."""

    @property
    def gpu_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def with_adapter(spec: RunSpec, rank: int | None, base: str | None) -> RunSpec:
    """The same run with an adapter, or with another rank or base. It may lack files of weights."""
    kept = spec.adapter.model_dump() if spec.adapter else {"rank": RANK}
    given = {name: value for name, value in (("rank", rank), ("base", base)) if value is not None}
    start = spec.start if spec.start.files else StartSettings(files=(ANY_FILE,))
    adapter = AdapterSettings.model_validate(kept | given)
    return spec.model_copy(update={"adapter": adapter, "start": start})


def fit(spec: RunSpec, vram_bytes: int, moments: str = "fp32", gpus: int = 1) -> GpuFit:
    """The memory that a run takes of a GPU with ``vram_bytes``, or of each of several that share
    the work; ``moments``: form of them."""
    cut, estimate = _choose(spec, vram_bytes, moments, gpus)
    changes, changed_bytes = {}, None
    if cut is None:
        for tried in _changes(spec, moments):
            other, form = _changed(spec, moments, tried)
            fitting, needed = _choose(other, vram_bytes, form, gpus)
            if fitting is not None:
                changes, changed_bytes = tried, needed.device_bytes
                break
    return GpuFit(
        parameters=count_parameters(spec.model),
        trained=count_trained(spec),
        vram_bytes=vram_bytes,
        gpus=gpus,
        batch=spec.train.batch,
        windows=cut.windows if cut else None,
        recompute=cut.recompute if cut else True,
        parts=estimate.device,
        host_bytes=estimate.host_bytes,
        changes=changes,
        changed_bytes=changed_bytes,
    )


def _choose(
    spec: RunSpec, vram_bytes: int, moments: str, gpus: int
) -> tuple[Cut | None, MemoryEstimate]:
    """The largest micro-batch that fits, and what it takes; else what one window takes."""
    estimated = partial(estimate_memory, spec, True, form=moments, ranks=gpus)
    windows = -(-spec.train.batch // gpus)
    cut = choose(windows, None, None, lambda cut: estimated(cut=cut).device_bytes <= vram_bytes)
    return cut, estimated(cut=cut or Cut(1, True))


def _changes(spec: RunSpec, moments: str) -> Iterator[dict[str, Any]]:
    """Changes to try: each alone, then more of them together."""
    bases, adapter = list(FORMS), spec.adapter
    tried: dict[str, list[Any]] = {
        "base": bases[bases.index(adapter.base) + 1 :] if adapter else [],
        "moments": ["int8"] if moments != "int8" else [],
        "context": list(_halves(spec.model.context, LEAST_CONTEXT)),
        "rank": list(_halves(adapter.rank, 1)) if adapter else [],
        "adapter": [] if adapter else bases,
    }
    for count in range(1, len(tried) + 1):
        for names in combinations(tried, count):
            for values in product(*(tried[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _changed(spec: RunSpec, moments: str, changes: Mapping[str, Any]) -> tuple[RunSpec, str]:
    if context := changes.get("context"):
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"context": context})})
    base = changes.get("base", changes.get("adapter"))
    if base or "rank" in changes:
        spec = with_adapter(spec, changes.get("rank"), base)
    return spec, changes.get("moments", moments)
