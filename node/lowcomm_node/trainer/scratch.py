"""Vectors of a fragment that are used again and again: each fresh one costs page faults.

A vector is free as soon as nobody holds it or a view of it. So slow weights that a merge replaces
come back once the last snapshot that holds them is written, and nothing has to be given back.
"""

from collections import deque
from collections.abc import Callable
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from lowcomm_protocol.codecs.base import Vector


def _allocated(numel: int) -> Vector:
    return np.empty(numel, dtype=np.float32)  # NumPy asks for huge pages


class Scratch:
    """Lends float32 vectors of at most ``numel`` values in host memory. Any thread may ask."""

    def __init__(
        self, numel: int, most_free: int, allocate: Callable[[int], Vector] = _allocated
    ) -> None:
        """``most_free``: as many unused vectors are kept."""
        self._numel = numel
        self._allocate = allocate
        self._free: deque[Vector] = deque(maxlen=most_free)
        self.made = 0
        """Vectors that were allocated so far."""

    @property
    def bytes(self) -> int:
        """Of each vector."""
        return self._numel * np.dtype(np.float32).itemsize

    @property
    def free(self) -> int:
        """Vectors that nobody holds."""
        return len(self._free)

    def take(self, numel: int) -> Tensor:
        """A vector of ``numel`` values, which may hold anything; a larger one than we lend is
        new."""
        if numel > self._numel:
            return torch.empty(numel)
        try:
            memory = self._free.pop()  # the one that was used last
        except IndexError:
            memory = self._allocate(self._numel)
            self.made += 1
        lent = memory[:numel]
        # Tensors and arrays that share the memory hold this view, not the memory itself.
        finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent)
