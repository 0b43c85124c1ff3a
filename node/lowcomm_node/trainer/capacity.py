"""Whether the owner's machine can carry a run, checked before anything is allocated."""

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.system.memory_watch import GIB, memory_of_machine
from lowcomm_node.trainer.memory import (
    DAEMON,
    TRAINER,
    Reckoning,
    count_parameters,
    explain,
    reckon,
)
from lowcomm_protocol.spec.run import RunSpec


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
) -> Reckoning:
    """What training needs. Raises ConfigError if that is more memory than is free, or than the
    owner allows.

    Limits are in GiB. ``exchanges``: how many may be under way at once.
    """
    reckoned = reckon(spec, device.type == "cuda", exchanges)
    # Without a limit: what is free, and what daemon and trainer have taken already.
    free = memory_of_machine()[1] + DAEMON + TRAINER
    allowed = free if max_memory is None else int(max_memory * GIB)
    _require(spec, reckoned.host, allowed, "memory", "--max-memory")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        allowed = free if max_vram is None else min(free, int(max_vram * GIB))
        _require(spec, reckoned.device, allowed, "memory of the GPU", "--max-vram")
    return reckoned


def _require(spec: RunSpec, parts: dict[str, int], allowed: int, what: str, option: str) -> None:
    needed = sum(parts.values())
    if needed <= allowed:
        return
    raise ConfigError(
        f"This run needs about {needed / GIB:.1f} GiB of {what}, {allowed / GIB:.1f} GiB are "
        f"allowed here (GiB: {explain(parts)}; {count_parameters(spec.model):,} parameters): join "
        f"from a larger machine, raise {option}, or ask the run's creator for a smaller batch or "
        "context."
    )
