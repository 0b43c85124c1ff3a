"""The inner optimizer of a run, its schedule, and its moments as named tensors.

``adamw``  AdamW for everything
``muon``   Muon for matrices of blocks, AdamW for everything else
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowcomm_node.errors import CheckpointError
from lowcomm_node.models.base import Model
from lowcomm_protocol.spec.sections import TrainSettings

ADAMW_EPSILON = 1e-8


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
                eps=ADAMW_EPSILON,
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


MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_STEPS = 5
MUON_EPSILON = 1e-7


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
        orthogonal = orthogonalized(stacked, MUON_COEFFICIENTS, MUON_STEPS, MUON_EPSILON)
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


ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MUON_MOMENTS = ("momentum_buffer",)


class PartOptimizer(Protocol):
    """One optimizer, of some of the weights."""

    state: dict[Tensor, dict[str, Tensor]]

    def step(self, rate: float, unless: Tensor | None = None) -> None:
        """Take one step on the gradients that are there, at this learning rate; none if ``unless``,
        a value of the device, is true."""
        ...


class InnerOptimizer:
    """One or two optimizers behind one face."""

    def __init__(self, model: Model, train: TrainSettings, device: torch.device) -> None:
        self._train = train
        self._weights = dict(model.named_parameters())
        by_muon = {
            name: weight
            for name, weight in self._weights.items()
            if train.optimizer == "muon"
            and weight.ndim == 2
            and model.place_of(name).role == "block"
        }
        others = [weight for name, weight in self._weights.items() if name not in by_muon]
        self._moments_of = {
            name: MUON_MOMENTS if name in by_muon else ADAMW_MOMENTS for name in self._weights
        }
        self._parts: list[PartOptimizer] = [_adamw(others, train, device)]
        if by_muon:
            moved, gpu = list(by_muon.values()), device.type == "cuda"
            self._parts.append(BatchedMuon(moved, train.muon_momentum, train.weight_decay, gpu))
        self.rate = 0.0
        """Learning rate of the last step."""

    def step(
        self,
        swarm_step: int,
        steps: int,
        train: TrainSettings | None = None,
        unless: Tensor | None = None,
    ) -> None:
        """Take one step on the gradients at the learning rate of ``swarm_step``, and clear them.

        ``train``: the settings that hold now, where the run was amended. ``unless``: a value of the
        device; if it is true, nothing changes, as if there had been no step.
        """
        self.rate = learning_rate(train or self._train, swarm_step, steps)
        for part in self._parts:
            part.step(self.rate, unless)
        for weight in self._weights.values():
            weight.grad = None

    def moments(self, copied: bool = True) -> dict[str, Tensor]:
        """In host memory, as ``WEIGHT.MOMENT``; empty before the first step.

        Not ``copied``, they change with the next step.
        """
        return {
            f"{name}.{key}": value.detach().to("cpu", copy=copied)
            for name, weight in self._weights.items()
            for key, value in self._state_of(name).get(weight, {}).items()
            if key in self._moments_of[name]
        }

    def has_second(self, name: str) -> bool:
        """Whether AdamW moves a weight, which keeps a second moment."""
        return self._moments_of[name] is ADAMW_MOMENTS

    @property
    def steps(self) -> int:
        """Steps that the moments are made of, as AdamW counts: 0 before the first."""
        counts = [int(kept["step"]) for kept in self._parts[0].state.values() if "step" in kept]
        return max(counts, default=0)

    def moment_vectors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """First and second moments by weight, not copied; empty before the first step."""
        kept = {
            name: self._state_of(name).get(weight, {}) for name, weight in self._weights.items()
        }
        if not all(kept.values()):
            return {}, {}
        first = {name: moments[self._moments_of[name][0]] for name, moments in kept.items()}
        return first, {name: kept[name][ADAMW_MOMENTS[1]] for name in kept if self.has_second(name)}

    def adopt(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], steps: int) -> None:
        """Go on with moments of others, which are made of so many steps."""
        firsts = {f"{name}.{self._moments_of[name][0]}": value for name, value in first.items()}
        counts = {f"{name}.step": torch.tensor(float(steps)) for name in second}
        self.restore(
            firsts
            | {f"{name}.{ADAMW_MOMENTS[1]}": value for name, value in second.items()}
            | counts
        )

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with what ``moments`` gave.

        Raises CheckpointError for values that no training reaches.
        """
        for name, weight in self._weights.items():
            moments = {key: tensors[f"{name}.{key}"] for key in self._moments_of[name]}
            if "step" in moments and (
                bool((moments["exp_avg_sq"] < 0).any()) or bool(moments["step"] < 1)
            ):
                raise CheckpointError(
                    f"The state holds impossible moments of {name}: it is refused; ask another "
                    "peer."
                )
            self._state_of(name)[weight] = {
                key: value.to(weight.device)
                if key != "step" or weight.device.type == "cuda"
                else value
                for key, value in moments.items()
            }

    def _state_of(self, name: str) -> dict[Tensor, dict[str, Tensor]]:
        return self._parts[self._moments_of[name] is MUON_MOMENTS].state


def learning_rate(train: TrainSettings, swarm_step: int, steps: int) -> float:
    """Linear warm-up, then down to ``final_learning_rate`` as ``schedule`` says, over swarm
    steps."""
    if swarm_step < train.warmup:
        return train.learning_rate * (swarm_step + 1) / train.warmup
    done = min(1.0, (swarm_step - train.warmup) / max(1, steps - train.warmup))
    final = train.final_learning_rate
    return train.learning_rate * (final + (1 - final) * _left(train, done))


def _left(train: TrainSettings, done: float) -> float:
    """What is left of the rate above the final one, 1 to 0; ``done`` of the steps after the
    warm-up, 0 to 1."""
    if train.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if train.schedule == "constant" or done < 1 - train.decay:
        return 1.0
    # 1 - sqrt ends lower than a line does (2405.18392, figure 4).
    fallen = 1.0 if train.decay == 0 else (done - (1 - train.decay)) / train.decay
    return 1 - math.sqrt(min(1.0, max(0.0, fallen)))


def _adamw(weights: Sequence[Tensor], train: TrainSettings, device: torch.device) -> AdamW:
    # Weight decay only on matrices, as is usual for transformers.
    share = train.adamw_share if train.optimizer == "muon" else 1.0
    matrices = Group([one for one in weights if one.ndim >= 2], train.weight_decay, share)
    rest = Group([one for one in weights if one.ndim < 2], 0.0, share)
    return AdamW([matrices, rest], (train.beta1, train.beta2), device.type in ("cuda", "cpu"))
