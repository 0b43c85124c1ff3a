"""What the owner's machine can carry, checked before a run's specification takes anything."""

import psutil
import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.model import Transformer
from lowcomm_protocol.run import ModelSettings

GIB = 1024**3
_HOST_VECTORS = 6
"""float32 vectors of the model's size in host memory: slow weights, momentum, captures, a snapshot being written."""
_DEVICE_VECTORS = 4
"""The same on the device: weights, gradients, two moments."""


def limit_vram(device: torch.device, max_vram: float | None) -> None:
    """Have torch take at most so many GiB of a GPU's memory: beyond them it says that it is out of memory.

    What CUDA itself takes for a process, a few hundred MiB, comes on top.
    """
    if max_vram is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max_vram * GIB / total), device)


def count_parameters(model: ModelSettings) -> int:
    """Parameters of a model, without allocating it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model).parameters())


def check_memory(model: ModelSettings, device: torch.device, max_memory: float | None) -> None:
    """Raise ConfigError if training ``model`` would take more host memory than there is, or than ``max_memory`` GiB."""
    parameters = count_parameters(model)
    vectors = _HOST_VECTORS + (_DEVICE_VECTORS if device.type == "cpu" else 0)
    needed = 4 * parameters * vectors
    allowed = psutil.virtual_memory().available if max_memory is None else int(max_memory * GIB)
    if needed > allowed:
        raise ConfigError(
            f"This run's model has {parameters:,} parameters and needs about {needed / GIB:.1f} GiB of memory, "
            f"{allowed / GIB:.1f} GiB are allowed here: join from a larger machine, or raise --max-memory."
        )
