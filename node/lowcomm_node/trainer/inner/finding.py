"""Finds the micro-batch of a GPU by trying, once for a device and a run."""

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.trainer.inner.gradient import Gradient
from lowcomm_node.trainer.inner.micro_batch import Cut, choose
from lowcomm_node.trainer.inner.remembered import Remembered

RECOMPUTE = {"auto": None, "on": True, "off": False}
"""What ``--activation-checkpointing`` says of computing blocks again; None to choose."""


def find(
    gradient: Gradient,
    batch: int,
    recompute: bool | None,
    ballast: int,
    remembered: Remembered,
    device: str,
) -> tuple[Cut, bool]:
    """The largest micro-batch that fits beside ``ballast`` bytes, and whether it was not known yet.

    ``recompute``: what the owner says, None to choose; ``device``: what it is remembered under.
    Raises ConfigError if not one window fits.
    """
    known = remembered.cut(device, batch)
    if known is not None and recompute in (None, known.recompute):
        return known, False
    found = choose(batch, None, recompute, lambda cut: gradient.fits(cut, ballast))
    if found is None:
        leave = "" if recompute is not False else "leave --activation-checkpointing at auto, "
        raise ConfigError(
            f"Not one window of the run's context fits into the memory of {device}: {leave}free "
            "that memory, raise --max-vram where you set it, or join from a larger GPU."
        )
    remembered.keep(device, found)
    return found, True


def describe(device: torch.device, max_vram: float | None) -> str:
    """What a micro-batch that was found is remembered under."""
    found = torch.cuda.get_device_properties(device)
    limit = "" if max_vram is None else f", at most {max_vram:g} GiB"
    return f"{found.name} of {found.total_memory >> 20} MiB{limit}, torch {torch.__version__}"
