"""What must hold for what a trainer tells of itself: its steps, its speed, its evaluations and its
end."""

import math
from pathlib import Path

import pytest
import torch

from helpers.driven_trainer import driven
from lowcomm_node.errors import TrainerError
from lowcomm_node.models.evaluation import Evaluation, evaluate
from lowcomm_node.node import messages
from lowcomm_node.node.messages import refusal_of
from lowcomm_node.trainer import loop as loop_module
from lowcomm_node.trainer.building import slot_bytes
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_protocol.codecs import coder
from lowcomm_protocol.errors import CodecError, ImplausibleError, Offence
from lowcomm_protocol.exchange.kinds import GROUP, PAIR

MORE = """warmup = 3
evaluate_every = 2
[sync]
method = "{method}"
fragments = {fragments}
interval = 4
min_steps = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder: its text is tokenized once."""
    return tmp_path_factory.mktemp("telling")


def settings(method: str = "lowcomm", fragments: int = 4) -> str:
    """The rest of a run file, from the settings of training on."""
    return MORE.format(method=method, fragments=fragments)


class Clock:
    """Each look at it takes ``tick`` seconds."""

    def __init__(self, tick: float) -> None:
        self.tick, self.now = tick, 100.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_a_step_is_told_with_its_counters_its_rate_and_a_speed_that_is_smoothed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven(folder, "a", more=settings()) as (one,):
        one.replica.clock.observe(7)
        clock = Clock(2.0)
        monkeypatch.setattr(loop_module, "monotonic", clock)
        one.steps(1)
        clock.tick = 4.0
        one.steps(1)
        first, second = one.events(messages.InnerStepTaken)
        tokens = one.replica.spec.tokens_per_step
        assert [(one.steps, one.swarm_step, one.tokens) for one in (first, second)] == [
            (1, 8, tokens),
            (2, 9, 2 * tokens),
        ]
        assert (first.seconds, second.seconds) == (2.0, 4.0)
        assert first.tokens_per_second == tokens / 2, "the first is the best guess there is"
        assert second.tokens_per_second == pytest.approx(0.9 * tokens / 2 + 0.1 * tokens / 4)
        spec = one.replica.spec
        assert second.learning_rate == learning_rate(spec.train, 9, spec.run.steps)


def test_held_out_text_is_looked_at_every_so_many_steps_but_not_at_the_end_and_always_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driven(folder, "a", more=settings()) as (one,):
        asked = []
        context = one.replica.spec.model.context

        def counted(*of: object, like: Evaluation | None):
            asked.append(like and like.windows)
            return evaluate(*of, like=like or Evaluation(0.0, 2, 2 * context))  # type: ignore[arg-type]

        monkeypatch.setattr(loop_module, "evaluate", counted)
        one.steps(4)
        told = one.events(messages.Evaluated)
        assert [event.steps for event in told] == [2, 4] and len(
            one.events(messages.Evaluating)
        ) == 2
        assert asked == [None, 2], "as many windows as the first time, so that they can be compared"
        assert told[0].tokens == told[1].tokens == 2 * context
        text = one.replica.dataset.train.tokens
        assert told[1].epochs == pytest.approx(one.replica.tokens / text, abs=0.01)
        assert (
            one.ask(messages.Evaluate()).loss
            == one.events(messages.Evaluated)[-1].loss
            == pytest.approx(told[1].loss)
        )
        one.replica.clock.step = one.replica.spec.run.steps - 2
        one.steps(2)
        assert one.replica.steps == 6 and one.events(messages.Evaluated)[-1].steps == 4, (
            "the run is over"
        )
        with torch.no_grad():
            one.replica.weights["norm.weight"][0] = math.nan
        assert (
            math.isnan(one.ask(messages.Evaluate()).loss)
            and one.events(messages.Evaluated)[-1].loss is None
        )


def test_training_goes_on_while_it_is_told_to_and_its_end_is_told_once(folder: Path) -> None:
    with driven(folder, "a", more=settings("local", 1)) as (one,):
        one.replica.clock.step = one.replica.spec.run.steps - 2
        assert not one.loop._can_step(), "not before it is told to"
        one.ask(messages.Train(on=True))
        assert one.loop._can_step()
        one.ask(messages.Train(on=False))
        assert not one.loop._can_step()
        one.steps(2)
        assert not one.loop._can_step()
        one.ask(messages.Train(on=True))
        last = one.replica.spec.run.steps
        assert one.events(messages.Finished) == [messages.Finished(swarm_step=last, steps=2)]


@pytest.mark.parametrize(
    ("method", "fragments", "exchanges", "slots"),
    [
        ("lowcomm", 4, 2, 2 * PAIR.slots),
        ("lowcomm", 1, 3, PAIR.slots),
        ("streaming-diloco", 4, 3, 3 * GROUP.slots),
        ("local", 1, 2, 0),
    ],
)
def test_what_it_says_when_it_is_built_is_what_it_has(
    folder: Path, method: str, fragments: int, exchanges: int, slots: int
) -> None:
    with driven(folder, "a", more=settings(method, fragments), exchanges=exchanges) as (one,):
        built, replica = one.built, one.replica
        numels = [phi.numel() for phi in replica.phi]
        assert built.slots == slots
        assert built.slot_bytes == slot_bytes(
            replica.exchanged, replica.spec.sync.codec, max(numels)
        )
        assert list(built.numels) == numels and built.parameters == sum(numels)
        assert list(built.realign_sizes) == [4 * numel for numel in numels]
        for numel, (least, most) in zip(numels, built.sizes, strict=True):
            whole = coder(replica.spec.sync.codec, numel)
            assert (least, most) == (
                (whole.min_size, whole.max_size) if method == "lowcomm" else (most, most)
            )
        assert list(built.slow_digests) == [replica.slow_digest(p) for p in range(len(numels))]
        assert list(built.momentum_digests) == [
            replica.momentum_digest(p) for p in range(len(numels))
        ]
        assert (built.resumed, built.skipped, built.steps, built.swarm_step) == (None, (), 0, 0)


@pytest.mark.parametrize(
    ("error", "unusable", "deed"),
    [
        (CodecError("no block"), True, Offence.HEAVY),
        (ImplausibleError("far too large"), True, Offence.HEAVY),
        (ImplausibleError("a little too large", Offence.STUMBLE), True, Offence.STUMBLE),
        (ImplausibleError("against us", None), True, None),
        (TrainerError("not captured"), False, Offence.HEAVY),
        (RuntimeError("nobody foresaw it"), False, Offence.HEAVY),
    ],
)
def test_an_error_says_whose_fault_it_is_and_what_that_costs(
    error: Exception, unusable: bool, deed: str
) -> None:
    told = refusal_of(error)
    assert (told.unusable, told.deed) == (unusable, deed)
    assert str(error) in told.text and told.exit_code == getattr(error, "exit_code", 1)
