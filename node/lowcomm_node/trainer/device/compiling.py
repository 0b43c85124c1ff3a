"""torch's compiler for a GPU: what it compiles, and where it keeps that.

It compiles blocks, one by one: all are alike, so one of them is compiled, and the others use it. A
whole model takes minutes where a block takes seconds.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.models.base import Model

FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Where torch and Triton look for what they compiled: folders within the one of the home."""


def prepare(device: torch.device, folder: Path) -> None:
    """Set this process up for a device: call it before the first tensor is there.

    What is compiled is kept in ``folder``, of the home: the next start needs seconds for what took
    a minute. It is code, so it is never taken from peers. An owner's own folders are left alone.
    """
    if device.type != "cuda":
        return
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / name))
    # Products of fp32 matrices outside of autocast: TF32, with bf16's exponents and 10 bits.
    torch.set_float32_matmul_precision("high")


def loss_of(model: Model, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model for training."""
    if not compiled:
        return model.loss
    blocks = model.compiled_parts()
    if not blocks:
        return partial(_compiled_loss(type(model)), model)
    for block in blocks:
        block.compile()
    return model.loss


@cache
def _compiled_loss(kind: type[Model]) -> Callable[..., Any]:
    """Replicas of one process share what was compiled."""
    return torch.compile(kind.loss)
