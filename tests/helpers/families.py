"""Tiny models of every type of the library ``transformers`` that a run may choose, and what a step
of a model keeps and takes."""

import weakref
from typing import Any

import tomlkit
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    own = [*model.parameters(), *model.buffers()]
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


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that torch makes while it is entered, beside those of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        own = [*model.parameters(), *model.buffers()]
        self._known = {one.untyped_storage()._cdata: 0 for one in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)
