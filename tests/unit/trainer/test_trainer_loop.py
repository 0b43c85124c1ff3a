"""What must hold for the training loop: nothing that is asked at a bad moment ends it, and what
ends it is told."""

import math
import threading
from pathlib import Path

import pytest
import torch

from helpers.driven_trainer import Driven, begin, driven, finish
from lowcomm_node.errors import CheckpointError, Diverged
from lowcomm_node.node.ipc import Request
from lowcomm_node.node.messages import (
    Adopt,
    CaptureContribution,
    Drop,
    Generate,
    InnerStepTaken,
    Part,
    Receive,
    Resend,
    Save,
    Skipped,
    WriteSnapshot,
)
from lowcomm_node.trainer import state, transfer
from lowcomm_node.trainer.loop import MOST_SKIPPED

PAIRS = """
[sync]
method = "lowcomm"
fragments = 2
interval = 10
overlap = 3
min_steps = 1
codec = "fp32"
error_feedback = false
momentum = 0.3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder: its text is tokenized once."""
    return tmp_path_factory.mktemp("loops")


def receive(part: Part) -> Receive:
    """What the partner is said to have brought."""
    return Receive(fragment=0, part=part, peer="b", slot=1, offset=0, size=4)


def adopt(one: Driven, donor: Driven, folder: Path) -> None:
    """Copy a state, as a node does that has drifted."""
    name = transfer.StateSnapshot(donor.replica).write(folder)
    one.ask(Adopt(folder=str(folder / name)))


# What is under way when a state is copied


def test_a_merge_that_ripens_while_a_state_is_copied_is_void_and_training_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    with driven(folder, "a", "b", more=PAIRS) as (one, other):
        for here in (one, other):
            here.steps(2)
        begin(one, other)
        number, _ = finish(one, other)
        assert one.answer(number) is None, "it ripens for three more steps"
        adopt(one, other, tmp_path)
        copied = one.replica.phi[0].clone()
        one.steps(5)
        assert "void" in one.refused(number).text
        assert torch.equal(one.replica.phi[0], copied), (
            "nothing of it is merged into the copied state"
        )
        assert len(one.events(InnerStepTaken)) == 7


@pytest.mark.parametrize("codec", ["fp32", "mod3"])
@pytest.mark.parametrize(
    "what", [receive(Part.WHOLE), receive(Part.AGAIN), Resend(fragment=0, blocks=b"", slot=1)]
)
def test_what_comes_once_an_exchange_is_dropped_is_nobody_s_fault(
    folder: Path, what: Request, codec: str
) -> None:
    with driven(folder, "a", "b", more=PAIRS.replace("fp32", codec)) as (one, other):
        for here in (one, other):
            here.steps(2)
        begin(one, other)
        held = threading.Event()
        one.loop._coder.submit(held.wait)
        one.send(Drop(fragment=0))
        number = one.send(what)
        held.set()
        one.settle()
        answer = one.refused(number)
        assert "void" in answer.text and not answer.unusable


# Nothing but numbers


def poisoned(
    monkeypatch: pytest.MonkeyPatch, one: Driven, bad: list[bool], where: str = "loss"
) -> None:
    """Of the next inner steps those are bad for which ``bad`` says so."""
    honest, left = one.replica.loss, list(bad)

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = honest(tokens, targets)
        if not (left and left.pop(0)):
            return value
        return value * math.nan if where == "loss" else value + (value - value.detach()) * math.inf

    monkeypatch.setattr(one.replica, "loss", loss)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_but_counters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with driven(folder, "a", more=PAIRS) as (one,):
        one.steps(2)
        before = {name: weight.detach().clone() for name, weight in one.replica.weights.items()}
        moments = one.replica.optimizer.moments()
        poisoned(monkeypatch, one, [True], where)
        one.steps(1)
        assert all(
            torch.equal(weight, before[name]) for name, weight in one.replica.weights.items()
        )
        assert all(
            torch.equal(now, moments[name]) for name, now in one.replica.optimizer.moments().items()
        )
        step = one.events(InnerStepTaken)[-1]
        assert (step.steps, step.swarm_step, step.skipped_steps) == (3, 3, 1)
        assert step.tokens == 2 * one.replica.spec.tokens_per_step, (
            "nothing was learned from the third batch"
        )
        assert step.loss is None or where == "gradient"
        assert one.replica.stream.batches == 3, "it is not met again"
        assert [event.steps for event in one.events(Skipped)] == [3]
        one.steps(1)
        assert one.replica.skipped_in_a_row == 0 and one.events(InnerStepTaken)[-1].loss is not None
        assert any(
            not torch.equal(weight, before[name]) for name, weight in one.replica.weights.items()
        )


def test_after_a_divergence_the_next_start_goes_back_one_checkpoint_and_on_with_other_text(
    tmp_path: Path,
) -> None:
    with driven(tmp_path, "a", more=PAIRS, checkpoint_every=1000) as (one,):
        for _ in range(2):
            one.steps(3)
            one.ask(Save())
        one.steps(1)
        one.replica.loss = lambda tokens, targets: (
            one.replica.model.loss(tokens, targets) * math.nan
        )
        with pytest.raises(Diverged):
            one.loop.run()
        drawn = one.replica.stream.batches
    with driven(tmp_path, "a", more=PAIRS) as (again,):
        assert again.built.resumed == 3 and again.replica.steps == 3
        assert (
            "step 6: training went on from it and diverged: 10 inner steps"
            in again.built.skipped[0]
        )
        assert again.replica.stream.batches == drawn == 7 + MOST_SKIPPED
        again.steps(1)


def test_weights_that_are_not_finite_are_neither_saved_nor_sent_nor_handed_on(
    folder: Path, tmp_path: Path
) -> None:
    with driven(folder, "nan", more=PAIRS) as (one,):
        one.steps(1)
        one.ask(Save())
        saved = one.loop.store.steps()
        with torch.no_grad():
            one.replica.weights["norm.weight"][5] = math.nan
        for fragment in range(2):
            for realign in (False, True):
                number = one.send(
                    CaptureContribution(fragment=fragment, slot=0, realign=realign, ahead=0)
                )
                one.settle()
                assert ("not finite" in str(one.answer(number))) == (fragment == 1)
        assert "not finite" in one.refusal(WriteSnapshot(folder=str(tmp_path))).text
        assert list(tmp_path.iterdir()) == []
        one.replica.clock.step += 1
        with pytest.raises(Diverged, match="NaN or infinity"):
            one.ask(Save())
        assert "NaN or infinity" in one.refused(max(one.heard.answers)).text
        assert one.loop.store.steps() == saved
        assert (
            "no finite" in one.refusal(Generate(prompt="a", tokens=2, temperature=1.0, seed=0)).text
        )


def test_an_outer_step_or_a_merge_that_overflows_is_not_applied(folder: Path) -> None:
    with driven(folder, "a", "b", more=PAIRS.replace("overlap = 3", "overlap = 0")) as (one, other):
        for here in (one, other):
            here.steps(2)
        for spoil, place in (("mean", 7), ("theta", 7), ("theta", -1)):
            begin(one, other)
            kept = float(one.replica.phi[0][place])
            before = one.replica.fast(0), one.replica.phi[0].clone(), one.replica.delta[0].clone()
            if spoil == "mean":
                one.replica.captures[0].received["b"][7] = 3.4e38
                one.replica.captures[0].theta[7] = 3.4e38
                one.replica.captures[0].sent[7] = -3.4e38
            else:
                one.replica.captures[0].theta[place] = -3.4e38
                one.replica.phi[0][place] = 2e38
                before[1][place] = 2e38
            number, _ = finish(one, other)
            assert "not finite" in one.refused(number).text, (spoil, place)
            after = one.replica.fast(0), one.replica.phi[0], one.replica.delta[0]
            assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
            one.replica.phi[0][place] = kept
            one.ask(Drop(fragment=0))
            for here in (one, other):
                here.steps(1)


# When fragments are due after a start


def first_due(one: Driven) -> list[int]:
    """At which swarm step each fragment is due next."""
    schedule, now = one.replica.schedule, one.replica.clock.step
    return [
        next(step for step in range(now, now + 30) if p in schedule.due(step))
        for p in range(len(schedule))
    ]


def test_a_resumed_or_copied_state_keeps_to_the_first_sync_of_each_fragment(
    folder: Path, tmp_path: Path
) -> None:
    with driven(folder, "due", "late", more=PAIRS) as (one, joiner):
        assert first_due(one) == [5, 10]
        one.steps(4)
        assert first_due(one) == [5, 10]
        parts, meta = state.snapshot(one.replica)
        state.restore(one.replica, parts, meta)
        assert first_due(one) == [5, 10]
        adopt(joiner, one, tmp_path)
        assert first_due(joiner) == [5, 10], "who copies a state is where its donor is"
        one.replica.schedule.skip(0, 5)
        _, later = state.snapshot(one.replica)
        later["swarm_step"] = 6
        state.restore(one.replica, parts, later)
        assert first_due(one) == [15, 10], (
            "an attempt that found no partner is not repeated after a restart"
        )


def test_a_checkpoint_of_0_1_that_had_synced_nothing_is_late_for_nothing(folder: Path) -> None:
    with driven(folder, "old", more=PAIRS) as (one,):
        one.steps(4)
        parts, meta = state.snapshot(one.replica)
        for counters in meta["progress"]:
            counters["synced"] = 0
        del meta["skipped"]
        state.restore(one.replica, parts, meta)
        assert first_due(one) == [5, 10]
        for wrong in (-2, True, 1 << 53, 0.5):
            meta["progress"][1]["synced"] = wrong
            with pytest.raises(CheckpointError, match="counters"):
                state.restore(one.replica, parts, meta)
