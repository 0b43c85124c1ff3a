"""Tiny models of every type of the library ``transformers`` that a run may choose, and what a step
of a model keeps."""

from typing import Any

import tomlkit
import torch

from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformersSettings


def tiny(type_: str, **more: Any) -> TransformersSettings:
    """Two layers of 32 channels; ``more``: further keys of its configuration."""
    one = ARCHITECTURES[type_]
    config = {one.width: 32, one.layers: 2, one.heads: 4, one.inner: 48}
    if one.kv_heads:
        config[one.kv_heads] = 2
    return TransformersSettings(type=type_, context=16, config=config | more)


def section(settings: TransformersSettings) -> str:
    """The section ``[model]`` of a run file, without its heading."""
    told = settings.model_dump()
    config = told.pop("config")
    return f"{tomlkit.dumps(told)}\n[model.config]\n{tomlkit.dumps(config)}"


def kept_bytes(model: Any, tokens: torch.Tensor) -> int:
    """What a step keeps for its backward pass, beside the model's own values."""
    own = [*model.parameters(), *([model.rope] if hasattr(model, "rope") else [])]
    ours = {one.untyped_storage().data_ptr() for one in own}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(tokens, tokens)
    return sum(kept.values())
