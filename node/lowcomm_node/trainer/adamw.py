"""AdamW by torch's function.

The class ``torch.optim.AdamW`` loads torch's compiler when it is made: a second and a half of a
processor at the start of every trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

EPSILON = 1e-8


@dataclass(frozen=True, eq=False)  # weights have no one answer to ==
class Group:
    """Weights that are moved alike."""

    weights: Sequence[Tensor]
    weight_decay: float
    share: float
    """Their part of the learning rate."""


class AdamW:
    """`torch.optim.AdamW`, the same to the bit."""

    def __init__(self, groups: Sequence[Group], betas: tuple[float, float], fused: bool) -> None:
        """``fused``: one kernel for all weights, where the device has one."""
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._groups = groups
        self._betas = betas
        self._fused = fused

    @torch.no_grad()
    def step(self, rate: float, unless: Tensor | None = None) -> None:
        """Take one step on the gradients that are there, at this learning rate; none if ``unless``,
        a value of the device, is true, which only a fused kernel looks at."""
        bad = None if unless is None else unless.float()
        for group in self._groups:
            weights = [weight for weight in group.weights if weight.grad is not None]
            for weight in weights:
                if weight not in self.state:
                    self.state[weight] = self._new(weight)
            kept = [self.state[weight] for weight in weights]
            adamw(
                weights,
                [weight.grad for weight in weights if weight.grad is not None],
                [moments["exp_avg"] for moments in kept],
                [moments["exp_avg_sq"] for moments in kept],
                [],
                [moments["step"] for moments in kept],
                fused=self._fused or None,
                found_inf=bad,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=rate * group.share,
                weight_decay=group.weight_decay,
                eps=EPSILON,
                maximize=False,
            )

    def _new(self, weight: Tensor) -> dict[str, Tensor]:
        # A fused kernel counts where it computes.
        device = weight.device if self._fused else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
