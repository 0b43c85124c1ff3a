"""The inner step: fast weights, moved by the inner optimizer on batches of our own text.

A GPU computes behind the program that feeds it. Reading a loss waits until it has caught up, and
then it has nothing to do. So the figures of a step are copied when it is queued, and read when the
next one is queued, too.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from lowcomm_node.data import Dataset
from lowcomm_node.data.packed import stream_of
from lowcomm_node.models.adapters import adapted
from lowcomm_node.models.base import Model, build_model, family_of, trained
from lowcomm_node.models.cross_entropy import count_learned
from lowcomm_node.models.devices import module_of
from lowcomm_node.models.documents import check_documents
from lowcomm_node.models.stages import build_stage, shell_of
from lowcomm_node.system.machine import waited
from lowcomm_node.system.tasks import Readings
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.rest import Duty
from lowcomm_node.trainer.shard import Shard, Step
from lowcomm_node.trainer.team import Team
from lowcomm_node.trainer.world import ALONE, World
from lowcomm_protocol.plan import SwarmClock
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.run import RunSpec


@dataclass(frozen=True)
class StepOutcome:
    """Own steps and clock after an inner step, and its loss in nats a token."""

    steps: int
    swarm_step: int
    loss: float


class InnerReplica(Shard):
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
        team: Team | None = None,
        world: World = ALONE,
    ) -> None:
        """``run_id``: of the signed run; None in a simulation. ``course``: its amendments.
        ``base``: the files of weights that an adapter is of. ``moments``: how the optimizer keeps
        its own. ``team``: other processes that it trains with, and ``world``, what we are among
        them."""
        self.peer_id = peer_id
        self.dataset = dataset
        self.run_id = run_id or spec.run_id
        self.course = course or SpecTimeline(spec)
        """The settings of training over swarm steps; all else is ``spec``'s."""
        check_documents(spec, dataset.tokenizer)
        stage = None if team is None else team.stage
        if stage is not None:
            model = build_stage(spec, stage, device)
        elif spec.adapter is not None:
            model = adapted(spec.model, spec.adapter, spec.run.seed, base, device)
        elif spec.start.files:  # they or a checkpoint set the weights
            model = family_of(spec.model).blank(spec.model)
        else:
            model = build_model(spec.model, spec.run.seed)
        if spec.train.document_mask:
            model.separator = dataset.tokenizer.separator
        weights = dict(trained(model)) if world.shards else {}
        if not world.shards:
            model.to(device)
        whole = None if stage is None else shell_of(spec)
        super().__init__(model, spec, device, compiled, moments, world, whole)
        self.stream = stream_of(
            dataset.train, spec, peer_id, lambda: [part.share for part in self.now.data.parts]
        )
        self.readings = Readings()
        """Reads of weights and moments on other threads; changes of them wait for these."""
        self.duty = Duty(module_of(device).synchronize, partial(waited, os.getpid()))
        self.gradient.rest = self.duty.rest
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
        self.team = team
        if team is not None:
            team.begin(self)
            team.load_weights(weights)

    @property
    def now(self) -> RunSpec:
        """The settings that hold at this swarm step."""
        return self.course.at(self.clock.step)

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.now.train, self.clock.step, self.now.run.steps)

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
        tokens, targets = self.stream.next_batch()
        learned = max(1, int(count_learned(targets)))
        seed = crc32(f"{self.peer_id}:{self.steps}".encode())
        train = self.train if self.team is None else self.team.train
        figures = train(tokens, targets, Step(self.clock.step, self.rate, learned, seed))
        self.steps += 1
        self.clock.tick()
        self.unsettled.append((self.steps, self.clock.step, figures))
        self.duty.rest()

    def before_update(self) -> None:
        self.readings.wait()

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

    def total_loss(self, tokens: Tensor, targets: Tensor) -> float:
        """The sum of the losses of windows, each by its share of learned tokens."""
        if self.team is not None:
            return self.team.total_loss(tokens, targets)
        return self.loss_here(tokens, targets)

    # weights and moments in host memory, wherever they are

    def all_weights(self, copied: bool = True) -> dict[str, Tensor]:
        """All weights by name. Without ``copied`` the next step may change them."""
        if self.team is not None:
            return self.team.weights()
        return {name: one.detach().to("cpu", copy=copied) for name, one in self.weights.items()}

    def all_moments(self, copied: bool = True) -> dict[str, Tensor]:
        """All moments of the optimizer, as ``InnerOptimizer.moments``."""
        return self.optimizer.moments(copied) if self.team is None else self.team.moments()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights."""
        if self.team is not None:
            self.team.load_weights(weights)
            return
        for name, one in weights.items():
            self.weights[name].copy_(one)

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Replace all moments. Raises CheckpointError for values that no training reaches."""
        (self.optimizer.restore if self.team is None else self.team.load_moments)(moments)

    @torch.no_grad()
    def whole_model(self) -> Model:
        """The model, to write with: of a sharded one a copy in host memory."""
        if not self.world.shards:
            return self.model  # which computes with all stages
        model, weights = family_of(self.spec.model).blank(self.spec.model), self.all_weights()
        for name, one in trained(model).items():
            one.copy_(weights[name])
        return model
