"""Muon: in fp32 on a processor, in bf16 on a GPU.

``torch.optim.Muon`` orthogonalizes matrix by matrix in bf16. A processor without matrix units for
bf16 takes twice as long for that as in fp32; one that emulates bf16, ten times. Matrices of one
shape go in batches, because a call costs more than the arithmetic of a small one.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7


AT_ONCE = 1 << 26
"""Values of the matrices that a GPU moves together: 128 MiB in bf16, which keep it busy."""


def together(values: int, gpu: bool) -> int | None:
    """How many matrices of so many values are moved together; None for all."""
    return max(1, AT_ONCE // values) if gpu else None


class BatchedMuon:
    """`torch.optim.Muon` with Nesterov momentum; the same up to the rounding of bf16."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        momentum: float,
        weight_decay: float,
        gpu: bool = False,
    ) -> None:
        """``gpu``: whether the arithmetic is that of a GPU, in bf16."""
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._gpu = gpu
        self._weights = weights
        self._momentum = momentum
        self._decay = weight_decay

    @torch.no_grad()
    def step(self, rate: float, unless: Tensor | None = None) -> None:
        """Take one step on the gradients that are there, at this learning rate; none if ``unless``,
        a value of the device, is true."""
        alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in self._weights:
            if weight.grad is not None:
                alike[weight.shape].append(weight)
        for weights in alike.values():
            count = together(weights[0].numel(), self._gpu) or len(weights)
            for start in range(0, len(weights), count):
                self._step_alike(weights[start : start + count], rate, unless)

    def _step_alike(self, weights: Sequence[Tensor], rate: float, unless: Tensor | None) -> None:
        updates: list[Tensor] = []
        for weight in weights:
            assert weight.grad is not None
            if weight not in self.state:
                self.state[weight] = {"momentum_buffer": torch.zeros_like(weight.grad)}
            momentum = self.state[weight]["momentum_buffer"]
            gradient = weight.grad
            if unless is not None:  # momentum that moves towards itself stays
                gradient = torch.where(unless, momentum, gradient)
            momentum.lerp_(gradient, 1 - self._momentum)
            updates.append(gradient.lerp(momentum, self._momentum))
        precision = torch.bfloat16 if self._gpu else torch.float32
        stacked = torch.stack([update.to(precision) for update in updates])
        updates.clear()  # else each would be in memory twice in what follows
        orthogonal = orthogonalized(stacked, COEFFICIENTS, STEPS, EPSILON)
        rows, columns = weights[0].shape
        adjusted = rate * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, orthogonal, strict=True):
            if unless is None:
                weight.mul_(1 - rate * self._decay).add_(update, alpha=-adjusted)
            else:
                moved = (weight * (1 - rate * self._decay)).add_(update, alpha=-adjusted)
                weight.copy_(torch.where(unless, weight, moved))


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """Matrices ``[count, rows, columns]`` with singular values near 1, by quintic Newton-Schulz
    steps.

    Source: Jordan et al., Muon, 2024.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
