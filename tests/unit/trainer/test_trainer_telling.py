"""What must hold for what a trainer tells of itself: its steps, its speed, its evaluations and its
end."""

import math
from pathlib import Path

import pytest
import torch

from helpers.driven_trainer import driven
from lowcomm_node.models.evaluation import Evaluation, evaluate
from lowcomm_node.node import messages
from lowcomm_node.trainer import loop as loop_module
from lowcomm_node.trainer.building import slot_bytes
from lowcomm_protocol.codecs import coder
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
        one.ask(messages.Evaluate())
        assert one.events(messages.Evaluated)[-1].loss == pytest.approx(told[1].loss)
        one.replica.clock.step = one.replica.spec.run.steps - 2
        one.steps(2)
        assert one.replica.steps == 6 and one.events(messages.Evaluated)[-1].steps == 4, (
            "the run is over"
        )
        with torch.no_grad():
            one.replica.weights["norm.weight"][0] = math.nan
        one.ask(messages.Evaluate())
        assert one.events(messages.Evaluated)[-1].loss is None


@pytest.mark.parametrize(
    ("method", "fragments", "exchanges", "slots"),
    [
        ("lowcomm", 4, 2, 2 * PAIR.slots),
        ("lowcomm", 1, 3, PAIR.slots),
        ("streaming-diloco", 4, 3, 3 * GROUP.slots + 1),
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
