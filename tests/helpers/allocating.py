"""Which operations of torch allocate memory."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Tensors(TorchDispatchMode):
    """Notes operations that give a tensor of at least so many values in memory of its own."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        made = func(*args, **(kwargs or {}))
        known = {
            one.untyped_storage().data_ptr()
            for one in [*args, *(kwargs or {}).values()]
            if isinstance(one, torch.Tensor)
        }
        is_large = isinstance(made, torch.Tensor) and made.numel() >= self.numel
        if is_large and made.untyped_storage().data_ptr() not in known:
            self.found.append(str(func))
        return made
