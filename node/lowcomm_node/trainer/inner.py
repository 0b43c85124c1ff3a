"""The inner step: fast weights, moved by the inner optimizer on batches of our own text.

A GPU computes behind the program that feeds it. Reading a loss waits until it has caught up, and
then it has nothing to do. So the figures of a step are copied when it is queued, and read when the
next one is queued, too.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn

from lowcomm_node.data import Dataset
from lowcomm_node.data.packed import stream_of
from lowcomm_node.models.adapters import adapted
from lowcomm_node.models.base import build_model, computing, family_of, tensor_specs, trained
from lowcomm_node.models.devices import compiles, copies_beside, module_of, steps_fused
from lowcomm_node.models.documents import check_documents
from lowcomm_node.system.machine import waited
from lowcomm_node.system.tasks import Readings
from lowcomm_node.trainer.gpu import loss_of
from lowcomm_node.trainer.micro_batch import Gradient
from lowcomm_node.trainer.optimizer import InnerOptimizer
from lowcomm_node.trainer.rest import Duty
from lowcomm_protocol.plan import SwarmClock, plan_fragments
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.run import RunSpec


@dataclass(frozen=True)
class StepOutcome:
    """Own steps and clock after an inner step, and its loss in nats a token."""

    steps: int
    swarm_step: int
    loss: float


class InnerReplica:
    """The model, its inner optimizer, and the text that it trains on."""

    def __init__(
        self,
        spec: RunSpec,
        peer_id: str,
        dataset: Dataset,
        device: torch.device,
        compiled: bool | None = None,
        run_id: str | None = None,
        course: SpecTimeline | None = None,
        base: Sequence[Path] = (),
        moments: str = "fp32",
    ) -> None:
        """``run_id``: of the signed run; None in a simulation. ``course``: its amendments.
        ``base``: the files of weights that an adapter is of. ``moments``: how the optimizer keeps
        its own."""
        self.spec = spec
        self.peer_id = peer_id
        self.dataset = dataset
        self.device = device
        self.run_id = run_id or spec.run_id
        self.course = course or SpecTimeline(spec)
        """The settings of training over swarm steps; all else is ``spec``'s."""
        check_documents(spec, dataset.tokenizer)
        if spec.adapter is not None:
            self.model = adapted(spec.model, spec.adapter, spec.run.seed, base, device)
        elif spec.start.files:  # they or a checkpoint set the weights
            self.model = family_of(spec.model).blank(spec.model).to(device)
        else:
            self.model = build_model(spec.model, spec.run.seed).to(device)
        if spec.train.document_mask:
            self.model.separator = dataset.tokenizer.separator
        self.weights: dict[str, Tensor] = dict(trained(self.model))
        self.plan = plan_fragments(tensor_specs(self.model), spec.sync.fragments, spec.sync.pattern)
        self.optimizer = InnerOptimizer(self.model, spec.train, device, moments)
        self.stream = stream_of(
            dataset.train, spec, peer_id, lambda: [part.share for part in self.now.data.parts]
        )
        self.readings = Readings()
        """Reads of weights and moments on other threads; changes of them wait for these."""
        self.loss = loss_of(self.model, compiles(device) if compiled is None else compiled)
        self.gradient = Gradient(self.model, self._loss_of, spec.train.batch)
        self.duty = Duty(module_of(device).synchronize, partial(waited, os.getpid()))
        self.gradient.rest = self.duty.rest
        self.runs_ahead = copies_beside(device) and steps_fused(device)
        """Whether steps are queued before the outcome of those before is known."""
        self.clock = SwarmClock()
        self.steps = 0
        """Inner steps done, skipped ones included."""
        self.tokens = 0
        """Trained on: those of skipped steps do not count."""
        self.skipped = 0
        """Inner steps that were skipped, as loss or gradients were not finite."""
        self.skipped_in_a_row = 0
        self.unsettled = deque[tuple[int, int, Callable[[], list[float]]]]()
        """Own steps, clock, and a function that waits for loss and norm of the gradient."""

    @property
    def now(self) -> RunSpec:
        """The settings that hold at this swarm step."""
        return self.course.at(self.clock.step)

    def inner_step(self) -> float:
        """Train on one batch; the loss in nats a token. A step without finite loss and gradient is
        skipped: only counters, stream and clock go on."""
        self.take_step()
        while True:
            outcome = self.settle()
            if not self.unsettled:
                return outcome.loss

    def take_step(self) -> None:
        """The same without waiting for a GPU: ``settle`` gives its outcome."""
        self.duty.begin()
        if self.model.draws:  # the same values after a restart
            torch.manual_seed(crc32(f"{self.peer_id}:{self.steps}".encode()))
        batch = self.stream.next_batch()
        if pinned := copies_beside(self.device):  # copied without waiting for earlier steps
            batch = batch[0].pin_memory(), batch[1].pin_memory()
        tokens, targets = (one.to(self.device, non_blocking=pinned) for one in batch)
        loss = self.gradient.of(tokens, targets)
        norm = nn.utils.clip_grad_norm_(self.weights.values(), self.spec.train.clip)
        both, now = torch.stack((loss.float(), norm.float())), self.now
        self.readings.wait()
        if self.runs_ahead:
            bad = both.isfinite().all().logical_not()
            self.optimizer.step(self.clock.step, now.run.steps, now.train, unless=bad)
            figures = read_later(both)
        else:
            known = both.tolist()
            if all(map(math.isfinite, known)):
                self.optimizer.step(self.clock.step, now.run.steps, now.train)
            else:
                self.model.zero_grad(set_to_none=True)
            figures = partial(list, known)
        self.steps += 1
        self.clock.tick()
        self.unsettled.append((self.steps, self.clock.step, figures))
        self.duty.rest()

    def settle(self) -> StepOutcome:
        """Count the oldest step not counted yet in ``tokens`` or ``skipped``; waits for the
        device."""
        steps, swarm_step, figures = self.unsettled.popleft()
        loss, norm = figures()
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.tokens += self.spec.tokens_per_step
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        return StepOutcome(steps, swarm_step, loss)

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with computing(self.device):
            return self.loss(tokens, targets)


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
