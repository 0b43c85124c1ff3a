"""What must hold where a device computes behind the program that feeds it: what a step gave is read
late, yet nothing else sees an older state, and a step without finite gradients is still none."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.driven_trainer import Driven, driven
from lowcomm_node.models.base import build_model
from lowcomm_node.node.messages import InnerStepTaken, Skipped
from lowcomm_node.trainer import shard
from lowcomm_node.trainer.optimizer import InnerOptimizer
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import TrainSettings

PAIRS = """
[sync]
method = "lowcomm"
fragments = 2
interval = 10
overlap = 0
min_steps = 1
codec = "fp32"
error_feedback = false
momentum = 0.3
"""


class Device:
    """Stands in for a GPU: notes when a step is queued, and when an outcome is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        take_step = Replica.take_step

        def queue(replica: Replica) -> None:
            take_step(replica)
            self.done.append(f"step {replica.steps}")

        monkeypatch.setattr(Replica, "take_step", queue)
        monkeypatch.setattr(shard, "read_later", self.read_later)

    def read_later(self, figures: Tensor) -> Callable[[], list[float]]:
        """See outcome.py."""
        number = 1 + sum(one.startswith("step") for one in self.done)

        def read() -> list[float]:
            self.done.append(f"read {number}")
            return figures.tolist()

        return read


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Driven, Device]]:
    device = Device(monkeypatch)
    with driven(tmp_path, "ahead", more=PAIRS) as (one,):
        one.replica.runs_ahead = True
        one.loop.store.keep = 10
        yield one, device


def poison(one: Driven, bad: list[bool]) -> None:
    """Those of the next inner steps give no finite gradients for which ``bad`` says so."""
    honest, left = one.replica.loss, list(bad)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        value = honest(tokens, targets)
        return value * math.nan if left and left.pop(0) else value

    one.replica.loss = loss


def run(one: Driven, count: int) -> None:
    one.loop._training = True
    for _ in range(count):
        one.loop._serve(wait=False)
        one.loop._step()


def test_steps_are_the_same_to_the_bit_whether_they_are_read_late_or_not(
    ahead: tuple[Driven, Device], tmp_path: Path
) -> None:
    pattern = [False, False, True, False, True, True, False]
    other = tmp_path / "other"
    other.mkdir()
    with driven(other, "ahead", more=PAIRS) as (plain,):
        late = ahead[0]
        for one in (plain, late):
            poison(one, pattern)
            run(one, len(pattern))
            one.loop._settle()
        for name, weight in plain.replica.weights.items():
            assert torch.equal(weight, late.replica.weights[name]), name
        moments = late.replica.optimizer.moments()
        for name, one_moment in plain.replica.optimizer.moments().items():
            assert torch.equal(one_moment, moments[name]), name
        for one in (plain, late):
            told = one.events(InnerStepTaken)
            assert [step.skipped_steps for step in told] == [0, 0, 1, 1, 2, 3, 3]
            assert [event.steps for event in one.events(Skipped)] == [3, 5]
            assert (told[-1].steps, told[-1].swarm_step) == (7, 7), "skipped steps count"
        assert [step.loss for step in plain.events(InnerStepTaken)] == [
            step.loss for step in late.events(InnerStepTaken)
        ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_that_is_told_to_skip_on_the_device_changes_nothing(optimizer: str) -> None:
    settings = TransformerSettings(layers=1, width=16, heads=2, feed_forward=32, context=16)
    model = build_model(settings, 0)
    train = TrainSettings.model_validate({"optimizer": optimizer})
    inner = InnerOptimizer(model, train, torch.device("cpu"))
    good, bad = torch.tensor(False), torch.tensor(True)

    def step(value: float, unless: Tensor) -> None:
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, value)
        inner.step(1e-3, 0, unless)
        assert all(weight.grad is None for weight in model.parameters())

    step(0.1, good)
    before = [weight.detach().clone() for weight in model.parameters()]
    moments = inner.moments()
    for value in (math.nan, math.inf):
        step(value, bad)
    for weight, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight, was)
    assert all(torch.equal(value, moments[name]) for name, value in inner.moments().items())
    step(0.1, good)
    assert not any(map(torch.equal, model.parameters(), before))
