"""What one process of a replica computes with: the model, its inner optimizer, and the weights.

One process holds all of them. On several GPUs each has one process, which holds its rows
(``world.py``), and the first one tells the others what to do (``ranks.py``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from lowcomm_node.models.base import Model, computing, tensor_specs, trained
from lowcomm_node.models.devices import compiles, copies_beside, module_of, steps_fused
from lowcomm_node.models.evaluation import total_loss
from lowcomm_node.trainer.gpu import loss_of
from lowcomm_node.trainer.lent import Lenders
from lowcomm_node.trainer.micro_batch import Gradient
from lowcomm_node.trainer.optimizer import InnerOptimizer
from lowcomm_node.trainer.world import ALONE, World, local, pairs_held, rows_of
from lowcomm_protocol.exchange import outer
from lowcomm_protocol.plan import Fragment, plan_fragments
from lowcomm_protocol.spec.run import RunSpec

WEIGHTS = "weights"
"""The kind of tensor that is not a moment of the optimizer."""
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Step:
    """What all processes of a replica do alike in one inner step."""

    swarm_step: int
    rate: float
    """Learning rate."""
    learned: int
    """Learned tokens of the whole batch."""
    seed: int
    """Of what the model draws, for dropout."""


class Shard:
    """The model in one process, and what moves its weights."""

    def __init__(
        self,
        model: Model,
        spec: RunSpec,
        device: torch.device,
        compiled: bool | None = None,
        moments: str = "fp32",
        world: World = ALONE,
        whole: Model | None = None,
    ) -> None:
        """``moments``: how the optimizer keeps its own. ``whole``: the model of which ours is a
        stage, shapes alone; None where it is the whole one."""
        self.model, self.spec, self.device, self.world = model, spec, device, world
        specs = tensor_specs(whole or model)
        self.plan = plan_fragments(specs, spec.sync.fragments, spec.sync.pattern)
        self.shapes = {name: one.shape for name, one in trained(whole or model).items()}
        """Of whole weights."""
        self.rows = rows_of(model, self.shapes, world)
        """Which rows of each weight this process holds."""
        # A model that has no parts to compile is compiled as a whole, which can't be sharded.
        may = compiles(device) if compiled is None else compiled
        self.loss = loss_of(model, may and not (world.shards and not model.compiled_parts()))
        if world.shards:
            world.shard(model, device)
            self.loss = model.loss
        self.optimizer = InnerOptimizer(model, spec.train, device, moments, world, whole)
        self.weights: dict[str, Tensor] = self.optimizer.weights
        """Those that are trained; of several processes each has its rows."""
        self.gradient = Gradient(model, self._loss_of, spec.train.batch)
        self.gradient.is_alone = world.size == 1
        self.runs_ahead = copies_beside(device) and steps_fused(device)
        """Whether steps are queued before the outcome of those before is known."""
        self.lenders: Lenders | None = None
        """Other machines that compute gradients, too."""
        self._merged: list[tuple[Tensor, Tensor]] = []

    def train(self, tokens: Tensor, targets: Tensor, step: Step) -> Callable[[], list[float]]:
        """Take one inner step on our windows, unless loss or gradient of the batch are not finite;
        a function that waits for loss and norm of the gradient."""
        if self.model.draws:  # the same values after a restart
            torch.manual_seed(step.seed + self.world.rank)
        if pinned := copies_beside(self.device):  # copied without waiting for earlier steps
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        here = partial(Tensor.to, device=self.device, non_blocking=pinned)
        learned = step.learned if self.world.size > 1 else None
        if self.lenders is None:
            loss = self.world.sum(self.gradient.of(here(tokens), here(targets), learned))
        else:
            loss = self._with_lenders(self.lenders, here(tokens), here(targets), step)
        norm = self._clipped()
        both = torch.stack((loss.float(), norm.float()))
        self.before_update()
        if self.runs_ahead:
            bad = both.isfinite().all().logical_not()
            self.optimizer.step(step.rate, step.swarm_step, unless=bad)
            return read_later(both)
        known = both.tolist()
        if all(map(math.isfinite, known)):
            self.optimizer.step(step.rate, step.swarm_step)
        else:
            for weight in self.weights.values():
                weight.grad = None
        return partial(list, known)

    def _with_lenders(
        self, lenders: Lenders, tokens: Tensor, targets: Tensor, step: Step
    ) -> Tensor:
        """Compute the gradient together with other machines; the loss."""
        ours, learned = lenders.begin(self.weights.values(), tokens, targets, step), step.learned
        began, loss = monotonic(), torch.zeros((), device=self.device)
        if ours.stop:
            loss += self.gradient.of(tokens[ours], targets[ours], learned)
            module_of(self.device).synchronize()
        lenders.measured(ours.stop, monotonic() - began)
        weights = list(self.weights.values())
        theirs, left = lenders.finish(weights)
        self.gradient.is_alone = False  # a smaller cut would forget the gradients that are there
        for these in left:
            loss += self.gradient.of(tokens[these], targets[these], learned)
        self.gradient.is_alone = True
        return loss + theirs

    def loss_here(self, tokens: Tensor, targets: Tensor) -> float:
        """The sum of the losses of our windows, each by its share of learned tokens."""
        total = total_loss(self.model, tokens, targets)
        if self.world.shards:  # else its root would stay whole, and not change with our rows
            cast("Any", self.model).reshard()
        return total

    def before_update(self) -> None:
        """Called before weights change; to be overridden."""

    def _clipped(self) -> Tensor:
        """Clip the gradients of what we hold; the norm of the whole gradient."""
        if self.world.shards:
            for name, weight in trained(self.model).items():
                gradient, weight.grad = weight.grad, None
                self.weights[name].grad = None if gradient is None else local(gradient)
        weights = list(self.weights.values())
        self.world.sum_gradients([one.grad for one in weights if one.grad is not None])
        return self.world.clip(weights, self.spec.train.clip)

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with computing(self.device):
            return self.loss(tokens, targets)

    # what several processes hold, beside vectors in memory that they share

    @torch.no_grad()
    def write_out(self, tensors: Mapping[str, Tensor], fragment: Fragment, out: Tensor) -> None:
        """Copy what we hold of a fragment to its place in a vector."""
        for _, ours, (place,) in pairs_held(fragment, tensors, self.rows, [out]):
            place.copy_(ours)

    @torch.no_grad()
    def read_in(self, tensors: Mapping[str, Tensor], fragment: Fragment, vector: Tensor) -> None:
        """The reverse."""
        for _, ours, (place,) in pairs_held(fragment, tensors, self.rows, [vector]):
            ours.copy_(place)

    @torch.no_grad()
    def merge_rows(self, fragment: Fragment, ranges: Ranges, phi: Tensor, captured: Tensor) -> bool:
        """Compute the merge of what we hold of a fragment, in some ranges of its vector; whether
        all of it is finite. ``keep_merged`` applies it."""
        settings, finite = self.spec.sync.outer_settings, True
        self._merged = []
        for begin, ours, both in pairs_held(fragment, self.weights, self.rows, [phi, captured]):
            flat = ours.reshape(-1)
            for first, last in ranges:
                start, stop = max(0, first - begin), min(flat.numel(), last - begin)
                if start < stop:
                    theta = flat[start:stop].to("cpu", copy=True)
                    slow, before = (one.reshape(-1)[start:stop] for one in both)
                    finite &= outer.merge(settings, theta, slow, before)
                    self._merged.append((flat[start:stop], theta))
        return finite

    @torch.no_grad()
    def keep_merged(self, keep: bool) -> None:
        """Apply what ``merge_rows`` has computed, or forget it."""
        for place, merged in self._merged if keep else []:
            place.copy_(merged)
        self._merged = []


def read_later(figures: Tensor) -> Callable[[], list[float]]:
    """A function that reads values of a GPU, and waits for nothing queued after this call."""
    copied = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
    copied.copy_(figures, non_blocking=True)
    arrived = module_of(figures.device).Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return read
