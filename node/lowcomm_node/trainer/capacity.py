"""What the owner's machine can carry, checked before a run's specification takes anything."""

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.trainer.memory import DAEMON, TRAINER, count_parameters, explain, reckon
from lowcomm_node.trainer.memory_watch import GIB, memory_of_machine
from lowcomm_protocol.spec.run import RunSpec


def limit_vram(device: torch.device, max_vram: float | None) -> None:
    """Have torch take at most so many GiB of a GPU's memory: beyond them it says that it is out of memory.

    What CUDA itself takes for a process, a few hundred MiB, comes on top.
    """
    if max_vram is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max_vram * GIB / total), device)


def check_memory(
    spec: RunSpec, device: torch.device, max_memory: float | None, max_vram: float | None = None, exchanges: int = 4
) -> None:
    """Raise ConfigError if training would take more memory than there is, or than the owner allows (GiB).

    ``exchanges``: how many may be under way at once.
    """
    reckoned = reckon(spec, device.type == "cuda", exchanges)
    # Without a limit of the owner's: what is free, and what daemon and trainer have taken already.
    allowed = int(max_memory * GIB) if max_memory is not None else memory_of_machine()[1] + DAEMON + TRAINER
    _require(spec, reckoned.host, allowed, "memory", "--max-memory")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        allowed = free if max_vram is None else min(free, int(max_vram * GIB))
        _require(spec, reckoned.device, allowed, "memory of the GPU", "--max-vram")


def _require(spec: RunSpec, parts: dict[str, int], allowed: int, what: str, option: str) -> None:
    needed = sum(parts.values())
    if needed <= allowed:
        return
    raise ConfigError(
        f"This run needs about {needed / GIB:.1f} GiB of {what}, {allowed / GIB:.1f} GiB are allowed here (GiB: "
        f"{explain(parts)}; {count_parameters(spec.model):,} parameters): join from a larger machine, raise {option}, or "
        "ask the run's creator for a smaller batch or context."
    )
