"""Loss and gradient of a batch, in as many parts as the device's memory asks for."""

from collections.abc import Callable

import torch
from torch import Tensor

from lowcomm_node.models.base import Model
from lowcomm_node.node.messages import is_out_of_memory
from lowcomm_node.trainer.inner.micro_batch import Cut

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of tokens and targets."""


class Gradient:
    """Computes gradients of one model, and gives way where memory is taken."""

    def __init__(self, model: Model, loss: Loss, batch: int) -> None:
        """``batch``: windows of a step; all go through the model at once at first."""
        self._model = model
        self._loss = loss
        self._batch = batch
        self.may_recompute = False
        """Whether blocks may be computed again where one window does not fit otherwise."""
        self.cut = Cut(batch)

    def of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, detached; its gradient is in the weights.

        Raises what torch raises if memory is short and nothing smaller is left to try.
        """
        while True:
            try:
                return self._pass(tokens, targets)
            except (RuntimeError, MemoryError) as error:
                smaller = self.cut.smaller(len(tokens), self.may_recompute)
                if smaller is None or not is_out_of_memory(error):
                    raise
            # Only here, where the error is gone, are the tensors of the pass gone with it.
            self._forget()
            self.cut = smaller

    def fits(self, cut: Cut, ballast: int = 0) -> bool:
        """Whether a step cut so fits beside ``ballast`` bytes, by a forward and a backward pass."""
        weights = list(self._model.parameters())
        device, before = weights[0].device, self.cut
        shape = cut.windows, self._model.settings.context
        self.cut = cut
        try:
            held = torch.empty(ballast, dtype=torch.uint8, device=device)
            if cut.windows < self._batch:  # gradients of the parts before are there already
                for weight in weights:
                    weight.grad = torch.zeros_like(weight)
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            self._pass(tokens, tokens)
            del held
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self.cut = before
            self._forget()
        return True

    def _pass(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._model.recompute != self.cut.recompute:
            self._model.recompute_blocks(self.cut.recompute)
        size = self.cut.parts(len(tokens))
        if size == len(tokens):
            loss = self._loss(tokens, targets)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=tokens.device)
        for some, theirs in zip(tokens.split(size), targets.split(size), strict=True):
            loss = self._loss(some, theirs) * (len(some) / len(tokens))
            loss.backward()
            total += loss.detach()
        return total

    def _forget(self) -> None:
        self._model.zero_grad(set_to_none=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
