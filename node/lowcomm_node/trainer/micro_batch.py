"""The inner step's gradient, cut to what the device holds.

Each peer cuts the ``batch`` of the specification into micro-batches as its memory asks for.
Gradients of the parts weigh by their learned tokens, so their sum is that of the batch. The first
cut is the largest that is estimated to fit (``memory.py``).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowcomm_node.models.base import Model
from lowcomm_node.models.cross_entropy import count_learned
from lowcomm_node.models.devices import module_of
from lowcomm_node.node.messages import is_out_of_memory

RECOMPUTE = {"auto": None, "on": True, "off": False}
"""Values of ``--activation-checkpointing``; None to choose."""


@dataclass(frozen=True)
class Cut:
    """How a step goes through the model: ``windows`` at once; with ``recompute`` the backward pass
    computes blocks again instead of keeping them."""

    windows: int
    recompute: bool = False

    def parts(self, batch: int) -> int:
        """Windows of each part of a batch but the last, so that all are about as large."""
        count = -(-batch // min(batch, self.windows))
        return -(-batch // count)

    def smaller(self, batch: int, may_recompute: bool) -> "Cut | None":
        """The next smaller cut; None where nothing is left."""
        if self.windows > 1:
            return Cut(max(1, min(self.windows, batch) // 2), self.recompute)
        return Cut(1, True) if may_recompute and not self.recompute else None


def choose(
    batch: int, windows: int | None, recompute: bool | None, fits: Callable[[Cut], bool]
) -> Cut | None:
    """The largest micro-batch that fits; blocks are computed again only where none does otherwise.

    ``windows``, ``recompute``: choices of the owner, None to choose. None if nothing fits.
    """
    for again in (False, True) if recompute is None else (recompute,):
        if windows is not None:
            cut = Cut(min(windows, batch), again)
            if fits(cut):
                return cut
            continue
        sizes = [Cut(count, again) for count in range(1, batch + 1)]
        if fitting := bisect_left(sizes, True, key=lambda cut: not fits(cut)):
            return sizes[fitting - 1]
    return None


class Gradient:
    """Computes gradients of one model, in smaller parts once memory is short."""

    def __init__(self, model: Model, loss: Callable[[Tensor, Tensor], Tensor], batch: int) -> None:
        """``loss``: mean of tokens and targets; ``batch``: windows of a step, all at once at
        first."""
        self._model = model
        self._loss = loss
        self.may_recompute = False
        """Whether blocks may be computed again where one window does not fit otherwise."""
        self.is_alone = True
        """Whether this process may take a smaller cut alone."""
        self.cut = Cut(batch)
        self.rest: Callable[[], None] = lambda: None
        """Called between two parts."""
        self.reserved_bytes = 0
        """Memory that the first pass leaves free, for the optimizer's moments."""

    def of(self, tokens: Tensor, targets: Tensor, learned: int | None = None) -> Tensor:
        """The mean loss of a batch, detached; its gradient is in the weights.

        ``learned``: learned tokens of a whole batch of which these windows are a part.
        """
        while True:
            try:
                loss = self._pass(tokens, targets, learned)
                self.reserved_bytes = 0
                return loss
            except (RuntimeError, MemoryError) as error:
                smaller = self.cut.smaller(len(tokens), self.may_recompute)
                if not self.is_alone or smaller is None or not is_out_of_memory(error):
                    raise
            # Only here, where the error is gone, are the tensors of the pass gone with it.
            self._model.zero_grad(set_to_none=True)
            if tokens.device.type != "cpu":
                module_of(tokens.device).empty_cache()
            self.cut = smaller

    def _pass(self, tokens: Tensor, targets: Tensor, of: int | None) -> Tensor:
        if self._model.recompute != self.cut.recompute:
            self._model.recompute_blocks(self.cut.recompute)
        _reserved = torch.empty(self.reserved_bytes, dtype=torch.uint8, device=tokens.device)
        size = self.cut.parts(len(tokens))
        total = torch.zeros((), device=tokens.device)
        learned = of or count_learned(targets).clamp(min=1)
        parts = zip(tokens.split(size), targets.split(size), strict=True)
        for number, (some, theirs) in enumerate(parts):
            if number:
                self.rest()
            loss = self._loss(some, theirs) * (count_learned(theirs) / learned)
            loss.backward()
            total += loss.detach()
        return total
