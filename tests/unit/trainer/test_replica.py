"""What must hold for what a replica keeps of a fragment when an exchange begins: how much of others
it may believe."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import merged_bits
from helpers.driven_trainer import Driven, begin, driven, finish
from lowcomm_node.node.messages import OuterStepApplied
from lowcomm_node.trainer import replica as replicas
from lowcomm_node.trainer.judging import Bound, growth
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange import outer
from lowcomm_protocol.spec.outer import OuterSettings

INTERVAL = 8
SYNC = """
warmup = 6
[sync]
method = "{method}"
interval = 8
fragments = 2
min_steps = 1
overlap = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder: its text is tokenized once."""
    return tmp_path_factory.mktemp("replicas")


def settings(method: str = "noloco", more: str = "") -> str:
    """The rest of a run file, from the settings of training on."""
    return SYNC.format(method=method) + more


def exchange(one: Driven, other: Driven) -> None:
    """A whole exchange of the first fragment."""
    begin(one, other)
    for here, number in zip((one, other), finish(one, other), strict=True):
        answer = here.answer(number)
        assert isinstance(answer, OuterStepApplied)


def bound(replica: Any, **how: int) -> Bound:
    """What the first fragment of others may have, were an exchange to begin now."""
    replica.capture(0, **how)
    kept = replica.capture_of(0).judge.bound
    replica.drop(0)
    return kept


def rates(replica: Replica, first: int, count: int) -> float:
    """Sum of the learning rates of so many steps."""
    spec = replica.spec
    return sum(
        learning_rate(spec.train, step, spec.run.steps) for step in range(first, first + count)
    )


# How much of the momentum is kept


def test_the_momentum_fades_in_each_interval_without_an_exchange(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = list[float]()

    def recorded(settings: OuterSettings, *rest: Any) -> None:
        memories.append(settings.memory)
        step(settings, *rest)

    step = outer.outer_step
    monkeypatch.setattr(replicas, "outer_step", recorded)
    more = settings("lowcomm", 'memory = 0.8\ncodec = "mod4"\n')
    with driven(folder, "a", "b", more=more) as both:
        for steps, intervals in ((INTERVAL, 1), (INTERVAL + 2, 1), (3 * INTERVAL, 3)):
            memories.clear()
            for one in both:
                one.steps(steps)
            exchange(*both)
            assert set(memories) == {0.8 if intervals == 1 else 0.8 * 0.8 * 0.8}


# How much longer others may have trained


def test_in_the_first_interval_others_have_trained_for_as_long_as_we_but_for_what_they_claim(
    folder: Path,
) -> None:
    with driven(folder, "a", more=settings()) as (one,):
        one.steps(4)
        ours = rates(one.replica, 0, 4)
        assert bound(one.replica).growth == 1.0
        assert bound(one.replica, ahead=2).growth == pytest.approx(
            growth(ours, rates(one.replica, 0, 6))
        )
        assert bound(one.replica, ahead=-3).growth == 1.0
        one.steps(INTERVAL - 4)
        assert bound(one.replica).growth == 1.0
        one.steps(1)
        assert bound(one.replica).growth == 1.0, (
            "we have trained for longer than an interval ourselves"
        )


# What is sent, and what of it is progress


@pytest.mark.parametrize("consensus", [0.0, 0.5, 1.0])
def test_a_contribution_less_its_anchor_is_progress_times_the_gain(
    folder: Path, consensus: float
) -> None:
    more = settings("diloco", f'outer = "nesterov"\ngroup = 2\nconsensus = {consensus}\n')
    with driven(folder, "a", more=more) as (one,):
        one.steps(2)
        one.replica.capture(0)
        kept = one.replica.capture_of(0)
        progress = one.replica.fast(0) - one.replica.phi[0]
        sent = kept.sent
        assert kept.judge.pull == consensus and kept.phi is one.replica.phi[0]
        assert torch.allclose(sent - consensus * kept.phi, kept.judge.gain * progress, atol=1e-6)
        assert kept.judge.bound.own == pytest.approx(kept.judge.gain * float(progress.norm()))
        assert (kept.steps, kept.tokens) == (2, 2 * one.replica.spec.tokens_per_step)


# Where it trains


def test_weights_that_are_not_contiguous_merge_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, begin = merged_bits.digest("noloco"), merged_bits.begin

    def begin_transposed(replica: Replica) -> None:
        for weight in replica.weights.values():
            if weight.ndim == 2:
                weight.data = weight.data.t().contiguous().t()
        begin(replica)

    monkeypatch.setattr(merged_bits, "begin", begin_transposed)
    assert merged_bits.digest("noloco") == expected
