"""Whether the owner's machine can carry a run, checked before anything is allocated."""

from dataclasses import dataclass

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.system.machine import GIB, memory_of_machine
from lowcomm_node.trainer.inner.micro_batch import Cut, choose
from lowcomm_node.trainer.memory import (
    COMPILING,
    DAEMON,
    TRAINER,
    Reckoning,
    count_parameters,
    explain,
    reckon,
)
from lowcomm_protocol.spec.run import RunSpec


@dataclass(frozen=True)
class Wanted:
    """What the owner says of how steps are cut; None to choose."""

    micro_batch: int | None = None
    recompute: bool | None = None


@dataclass(frozen=True)
class Fit:
    """What training needs, and how steps are cut for that."""

    reckoned: Reckoning
    cut: Cut


def limit_vram(device: torch.device, max_vram: float | None) -> None:
    """Limit torch to so many GiB of a GPU's memory: beyond them it runs out of memory.

    CUDA itself takes a few hundred MiB a process on top.
    """
    if max_vram is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max_vram * GIB / total), device)


def check_memory(
    spec: RunSpec,
    device: torch.device,
    max_memory: float | None,
    max_vram: float | None = None,
    exchanges: int = 4,
    wanted: Wanted = Wanted(),
    compiled: bool = False,
) -> Fit:
    """What training needs, and the largest micro-batch that is reckoned to fit. Raises ConfigError
    if even the smallest takes more memory than is free, or than the owner allows.

    Limits are in GiB. ``exchanges``: how many may be under way at once; ``compiled``: whether this
    process has compiled kernels.
    """
    gpu = device.type == "cuda"
    # Without a limit: what is free, and what daemon and trainer have taken already.
    free = memory_of_machine()[1] + DAEMON + TRAINER + (COMPILING if compiled else 0)
    allowed = free if max_memory is None else int(max_memory * GIB)
    vram = 0
    if gpu:
        vram = torch.cuda.mem_get_info(device)[0]
        vram = vram if max_vram is None else min(vram, int(max_vram * GIB))

    def fits(cut: Cut) -> bool:
        needed = reckon(spec, gpu, exchanges, cut, compiled)
        return needed.host_bytes <= allowed and needed.device_bytes <= vram

    cut = choose(spec.train.batch, wanted.micro_batch, wanted.recompute, fits)
    if cut is None:
        smallest = Cut(wanted.micro_batch or 1, wanted.recompute is not False)
        least = reckon(spec, gpu, exchanges, smallest, compiled)
        _require(spec, least.host, allowed, "memory", "--max-memory", wanted)
        _require(spec, least.device, vram, "memory of the GPU", "--max-vram", wanted)
    cut = cut or Cut(1)
    return Fit(reckon(spec, gpu, exchanges, cut, compiled), cut)


def _require(
    spec: RunSpec, parts: dict[str, int], allowed: int, what: str, option: str, wanted: Wanted
) -> None:
    needed = sum(parts.values())
    if needed <= allowed:
        return
    local = "leave --activation-checkpointing at auto, " if wanted.recompute is False else ""
    if (wanted.micro_batch or 1) > 1:
        local += "choose a smaller --micro-batch, "
    raise ConfigError(
        f"This run needs about {needed / GIB:.1f} GiB of {what}, {allowed / GIB:.1f} GiB are "
        f"allowed here (GiB: {explain(parts)}; {count_parameters(spec.model):,} parameters): "
        f"{local}join from a larger machine, raise {option}, or ask the run's creator for a "
        "smaller model or context."
    )
