"""Weights that a model begins with: the same at all peers of a run."""

import hashlib

import numpy as np
import torch
from torch import Tensor


def fill_normal(parameter: Tensor, std: float, stream: str) -> None:
    """Draw from a stream of its own: independent of other tensors, of threads, and of torch's
    random state."""
    # numpy, because torch draws other bits with AVX2 than without, and peers have all kinds of
    # processors.
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest())
    values = np.random.default_rng(seed).standard_normal(tuple(parameter.shape), dtype=np.float32)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values)).mul_(std)
