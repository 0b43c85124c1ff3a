"""In which precision a model computes."""

import torch


def computing(device: torch.device) -> torch.autocast:
    """A context in which products of matrices are bf16 on a GPU; a processor computes in fp32.

    Losses of training and of held-out text are computed alike.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def as_computed(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the precision of its context: bf16 within autocast, as it is elsewhere."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
