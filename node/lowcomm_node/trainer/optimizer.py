"""The inner optimizer of a run, its schedule, and its moments as named tensors.

``adamw``  AdamW for everything
``muon``   Muon for matrices of blocks, AdamW for everything else
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowcomm_node.errors import CheckpointError
from lowcomm_node.models.base import Model, trained
from lowcomm_node.models.devices import computes_bf16, steps_fused
from lowcomm_node.trainer.moments import Packed, generator_of, slices, zeros
from lowcomm_node.trainer.world import ALONE, World, held
from lowcomm_protocol.spec.sections import TrainSettings

ADAMW_EPSILON = 1e-8


class AdamW:
    """`torch.optim.AdamW`, the same to the bit; torch's own imports its compiler: 6 s, 77 MB."""

    MOMENTS = ("exp_avg", "exp_avg_sq", "step")

    def __init__(
        self,
        weights: Sequence[Tensor],
        train: TrainSettings,
        moments: str = "fp32",
        world: World = ALONE,
    ) -> None:
        """``moments``: how they are kept (moments.py)."""
        self.state: dict[Tensor, dict[str, Tensor | Packed]] = {}
        self._form = moments
        self._numbers = world.numbered(weights)
        # Weight decay only on matrices, as is usual for transformers.
        self._groups = (
            ([weight for weight in weights if weight.ndim >= 2], train.weight_decay),
            ([weight for weight in weights if weight.ndim < 2], 0.0),
        )
        self._share = train.adamw_share if train.optimizer == "muon" else 1.0
        """Factor of the learning rate."""
        self._betas = train.beta1, train.beta2

    @torch.no_grad()
    def step(self, rate: float, unless: Tensor | None = None, swarm_step: int = 0) -> None:
        """Take one step on the gradients that are there; none if ``unless``, a value of the device,
        is true, which only its fused kernel reads."""
        bad = None if unless is None else unless.float()
        for group, weight_decay in self._groups:
            weights = [weight for weight in group if weight.grad is not None]
            unpacked = self._unpacked(weights, unless, swarm_step)
            for some, gradients, first, second, steps in unpacked:
                adamw(
                    some,
                    gradients,
                    first,
                    second,
                    [],
                    steps,
                    fused=not some or steps_fused(some[0].device),
                    found_inf=bad,
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=rate * self._share,
                    weight_decay=weight_decay,
                    eps=ADAMW_EPSILON,
                    maximize=False,
                )

    def _unpacked(
        self, weights: list[Tensor], unless: Tensor | None, swarm_step: int
    ) -> Iterator[tuple[list[Tensor], ...]]:
        """Weights, gradients and moments to move together: all, or slices of packed ones, which are
        packed once they are moved."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        kept: Any = [self.state.get(weight) or self.new(weight) for weight in weights]
        if self._form == "fp32":
            yield weights, gradients, *([one[key] for one in kept] for key in self.MOMENTS)
            return
        for weight, gradient, one in zip(weights, gradients, kept, strict=True):
            packed, before, number = list(one.values())[:2], one["step"], self._numbers[weight]
            for these in slices(weight):
                one["step"], moments = before.clone(), [moment.read(these) for moment in packed]
                parts = [weight.view(-1)[these], gradient.reshape(-1)[these], *moments]
                yield *([part] for part in parts), [one["step"]]
                draws = generator_of(weight.device, swarm_step, number, these.start)
                for moment, values in zip(packed, moments, strict=True):
                    moment.write(these, values, draws, unless)

    def new(self, weight: Tensor) -> dict[str, Tensor | Packed]:
        """Moments before the first step, which are kept from now on."""
        self.state[weight] = {
            "exp_avg": zeros(weight, self._form),
            "exp_avg_sq": zeros(weight, self._form, squares=True),
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
        }
        return self.state[weight]


MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_STEPS = 5
MUON_EPSILON = 1e-7
AT_ONCE = 1 << 26
"""Values of the matrices that a GPU moves together: 128 MiB in bf16, which keep it busy."""


def together(values: int, gpu: bool) -> int | None:
    """How many matrices of ``values`` values each are moved together; None for all."""
    return max(1, AT_ONCE // values) if gpu else None


class BatchedMuon:
    """`torch.optim.Muon` with Nesterov momentum; the same up to the rounding of bf16."""

    MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        weights: Sequence[Tensor],
        momentum: float,
        weight_decay: float,
        gpu: bool = False,
        moments: str = "fp32",
        world: World = ALONE,
        shapes: Sequence[torch.Size] | None = None,
    ) -> None:
        """``gpu``: whether the arithmetic is that of a GPU, in bf16; ``moments``: how the momentum
        is kept (moments.py). ``shapes``: of the whole matrices, where processes hold rows."""
        self.state: dict[Tensor, dict[str, Tensor | Packed]] = {}
        self._gpu, self._form, self._world = gpu, moments, world
        self._numbers = world.numbered(weights)
        self._shapes = dict(zip(weights, shapes or [one.shape for one in weights], strict=True))
        self._weights = weights
        self._momentum = momentum
        self._decay = weight_decay

    @torch.no_grad()
    def step(self, rate: float, unless: Tensor | None = None, swarm_step: int = 0) -> None:
        """Take one step on the gradients that are there; none if ``unless``, a value of the device,
        is true."""
        alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in self._weights:
            if weight.grad is not None:
                alike[self._shapes[weight]].append(weight)
        for shape, weights in alike.items():
            count = together(shape.numel(), self._gpu) or len(weights)
            for start in range(0, len(weights), count):
                some = weights[start : start + count]
                updates = [self._update(weight, unless, swarm_step) for weight in some]
                self._step_alike(some, updates, rate, unless)

    def new(self, weight: Tensor) -> dict[str, Tensor | Packed]:
        """The momentum before the first step, which is kept from now on."""
        self.state[weight] = {"momentum_buffer": zeros(weight, self._form)}
        return self.state[weight]

    def _update(self, weight: Tensor, unless: Tensor | None, swarm_step: int) -> Tensor:
        momentum = (self.state.get(weight) or self.new(weight))["momentum_buffer"]
        assert weight.grad is not None
        if isinstance(momentum, Tensor):
            return self._blended(momentum, weight.grad, unless)
        gradient, updates = weight.grad.reshape(-1), torch.empty_like(weight)
        for these in slices(weight):
            values = momentum.read(these)
            updates.view(-1)[these] = self._blended(values, gradient[these], unless)
            number = self._numbers[weight]
            draws = generator_of(weight.device, swarm_step, number, these.start)
            momentum.write(these, values, draws, unless)
        return updates

    def _blended(self, momentum: Tensor, gradient: Tensor, unless: Tensor | None) -> Tensor:
        if unless is not None:  # momentum that moves towards itself stays
            gradient = torch.where(unless, momentum, gradient)
        momentum.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(momentum, self._momentum)

    def _step_alike(
        self,
        weights: Sequence[Tensor],
        updates: list[Tensor],
        rate: float,
        unless: Tensor | None,
    ) -> None:
        precision = torch.bfloat16 if self._gpu else torch.float32
        stacked = torch.stack([update.to(precision) for update in updates])
        updates.clear()  # else each would be in memory twice in what follows
        rows, columns = self._shapes[weights[0]]
        orthogonal = self._world.dealt(stacked, rows, orthogonalized)
        adjusted = rate * max(1.0, rows / columns) ** 0.5
        for weight, update in zip(weights, orthogonal, strict=True):
            if unless is None:
                weight.mul_(1 - rate * self._decay).add_(update, alpha=-adjusted)
            else:
                moved = (weight * (1 - rate * self._decay)).add_(update, alpha=-adjusted)
                weight.copy_(torch.where(unless, weight, moved))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices ``[count, rows, columns]`` with singular values near 1, by quintic Newton-Schulz
    steps.

    Source: Jordan et al., Muon, 2024.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=MUON_EPSILON)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class InnerOptimizer:
    """AdamW, or Muon and AdamW, each for its weights."""

    def __init__(
        self,
        model: Model,
        train: TrainSettings,
        device: torch.device,
        moments: str = "fp32",
        world: World = ALONE,
        whole: Model | None = None,
    ) -> None:
        """``moments``: how they are kept between steps (moments.py). ``whole``: the model of which
        this one is a stage, shapes alone."""
        self.weights = held(model)
        """What this process holds of each trained weight."""
        self._names = tuple(trained(whole or model))
        self._by_muon = {
            name
            for name, one in trained(whole or model).items()
            if train.optimizer == "muon" and one.ndim == 2 and model.place_of(name).role == "block"
        }
        by_muon = {name: one.shape for name, one in trained(model).items() if name in self._by_muon}
        others = [weight for name, weight in self.weights.items() if name not in by_muon]
        self._adamw = AdamW(others, train, moments, world)
        self._parts: list[AdamW | BatchedMuon] = [self._adamw]
        if by_muon:
            moved, gpu = (
                [self.weights[name] for name in by_muon],
                device.type != "cpu" and computes_bf16(device),
            )
            settings, shapes = (train.muon_momentum, train.weight_decay), list(by_muon.values())
            self._parts.append(BatchedMuon(moved, *settings, gpu, moments, world, shapes))
        self._part_of = {name: self._parts[name in by_muon] for name in self.weights}
        self.rate = 0.0
        """Learning rate of the last step."""

    def step(self, rate: float, swarm_step: int, unless: Tensor | None = None) -> None:
        """Take one step on the gradients at a learning rate, and clear them. ``unless``: a value of
        the device; if it is true, nothing changes, as if there had been no step."""
        self.rate = rate
        for part in self._parts:
            part.step(self.rate, unless, swarm_step)
        for weight in self.weights.values():
            weight.grad = None

    def moments(self, copied: bool = True) -> dict[str, Tensor]:
        """Moments in host memory, by ``WEIGHT.MOMENT``; empty before the first step.

        Without ``copied`` the next step changes them.
        """
        return {
            f"{name}.{key}": value.whole()
            if isinstance(value, Packed)
            else value.detach().to("cpu", copy=copied)
            for name, weight in self.weights.items()
            for key, value in self._part_of[name].state.get(weight, {}).items()
        }

    def has_second(self, name: str) -> bool:
        """Whether AdamW, which keeps a second moment, updates a weight."""
        return name not in self._by_muon

    def _first_of(self, name: str) -> str:
        return (AdamW if self.has_second(name) else BatchedMuon).MOMENTS[0]

    def kept(self) -> list[str]:
        """Names of ``moments``."""
        return [
            f"{name}.{key}"
            for name, weight in self.weights.items()
            for key in self._part_of[name].state.get(weight, {})
        ]

    @property
    def steps(self) -> int:
        """Steps that the moments are made of, as AdamW counts: 0 before the first."""
        kept: Any = self._adamw.state.values()
        return max((int(one["step"]) for one in kept), default=0)

    def moment(self, name: str, key: str) -> Tensor:
        """One moment of one weight; a packed one is unpacked."""
        value = self._part_of[name].state[self.weights[name]][key]
        return value.whole() if isinstance(value, Packed) else value

    def vectors_of(
        self, moments: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """First and second of some ``moments`` by weight; empty where there are none."""
        if not moments:
            return {}, {}
        names, second = self._names, AdamW.MOMENTS[1]
        first = {name: moments[f"{name}.{self._first_of(name)}"] for name in names}
        return first, {name: moments[f"{name}.{second}"] for name in names if self.has_second(name)}

    def moments_of(
        self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], steps: int
    ) -> dict[str, Tensor]:
        """The reverse, for moments of others after ``steps`` steps."""
        moments = {f"{name}.{self._first_of(name)}": one for name, one in first.items()}
        for name, value in second.items():
            moments[f"{name}.{AdamW.MOMENTS[1]}"] = value
            moments[f"{name}.step"] = torch.tensor(float(steps))
        return moments

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the tensors of ``moments``.

        Raises CheckpointError for values that no training reaches.
        """
        for name, weight in self.weights.items():
            part = self._part_of[name]
            moments = {key: tensors[f"{name}.{key}"] for key in part.MOMENTS}
            if "step" in moments and (
                bool((moments["exp_avg_sq"] < 0).any()) or bool(moments["step"] < 1)
            ):
                raise CheckpointError(
                    f"The state holds impossible moments of {name}: it is refused; ask another "
                    "peer."
                )
            kept = part.new(weight)
            for key, value in moments.items():
                place = kept[key]
                if isinstance(place, Packed):
                    place.take(value)
                else:
                    kept[key] = value.to(weight.device)


def learning_rate(train: TrainSettings, swarm_step: int, steps: int) -> float:
    """Linear warm-up, then down to ``final_learning_rate`` by ``schedule``, over swarm steps."""
    if swarm_step < train.warmup:
        return train.learning_rate * (swarm_step + 1) / train.warmup
    done = min(1.0, (swarm_step - train.warmup) / max(1, steps - train.warmup))
    if train.schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    elif train.schedule == "constant" or done < 1 - train.decay:
        left = 1.0
    else:  # 1 - sqrt ends lower than a line does (2405.18392, figure 4)
        fallen = 1.0 if train.decay == 0 else (done - (1 - train.decay)) / train.decay
        left = 1 - math.sqrt(min(1.0, max(0.0, fallen)))
    final = train.final_learning_rate
    return train.learning_rate * (final + (1 - final) * left)
