"""What must hold for a trainer that rests as its owner wants: computing takes the share of the time
that was asked for, rest is counted, and the bits stay."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.driven_trainer import driven
from lowcomm_node.node.messages import InnerStepTaken
from lowcomm_node.trainer.rest import MOST_CREDIT, Duty


class Time:
    """A clock that passes only where somebody computes or sleeps; sleep takes ``late`` more."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.computed, self.late = 100.0, 0.0, late
        self.rests: list[float] = []

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds + self.late

    def duty(self, share: float) -> Duty:
        duty = Duty(clock=lambda: self.now, sleep=self.sleep)
        duty.share = share
        return duty


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6, 0.99])
@pytest.mark.parametrize("late", [0.0, 0.003])
def test_computing_takes_its_share_of_the_time_whatever_its_parts_take(share: float, late: float):
    time, draw = Time(late), random.Random(5)
    duty = time.duty(share)
    for _ in range(200):
        duty.begin()
        for _ in range(draw.randrange(1, 9)):
            time.compute(draw.choice([0.0001, 0.02, 1.5]))
            duty.rest()
    assert time.computed / (time.now - 100.0) == pytest.approx(share, rel=1e-3)
    assert duty.take_rested() == pytest.approx(time.now - 100.0 - time.computed)
    assert duty.take_rested() == 0.0


def test_what_passes_between_two_steps_is_not_computing_and_needs_no_rest():
    time = Time()
    duty = time.duty(0.5)
    for _ in range(3):
        time.now += 1000.0  # waiting for text
        duty.begin()
        time.compute(2.0)
        duty.rest()
    assert time.rests == [2.0, 2.0, 2.0]


def test_a_rest_that_took_hours_buys_no_hours_without_rest():
    time = Time(late=7200.0)
    duty = time.duty(0.5)
    duty.begin()
    time.compute(1.0)
    duty.rest()
    time.late = 0.0
    for _ in range(10):
        time.compute(1.0)
        duty.rest()
    assert sum(time.rests) == pytest.approx(11.0 - MOST_CREDIT)


def test_a_node_rests_between_micro_batches_and_learns_the_same(tmp_path: Path):
    time = Time()
    with driven(tmp_path, "a", micro_batch=1) as (plain,):
        assert plain.built.duty == 1.0
        plain.steps(3)
    with driven(tmp_path, "a", micro_batch=1, duty="50%") as (one,):
        assert one.built.duty == 0.5
        honest, duty = one.replica.loss, one.replica.duty
        duty.clock, duty.sleep = lambda: time.now, time.sleep

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            time.compute(1.0)
            return honest(tokens, targets)

        one.replica.loss = loss
        one.steps(3)
        assert time.rests == [1.0] * 6, "two micro-batches a step"
        assert one.events(InnerStepTaken)[-1].waited["duty"] == 6.0
    for name, weight in one.replica.weights.items():
        assert torch.equal(weight, plain.replica.weights[name])
