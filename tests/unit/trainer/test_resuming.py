"""What must hold for a resumed trainer: it goes on to the bit as one that was never stopped, at any
moment of an exchange."""

from pathlib import Path
from typing import Any

import pytest

from helpers.driven_trainer import Driven, begin, driven, finish, merge_of
from lowcomm_node.errors import CheckpointError
from lowcomm_node.node.messages import (
    AverageShard,
    CaptureContribution,
    Drop,
    Finished,
    InnerStepTaken,
    OuterStepApplied,
)
from lowcomm_node.trainer import state

SYNC = """optimizer = "{optimizer}"
warmup = 3
[sync]
method = "{method}"
interval = 8
min_steps = 1
overlap = {overlap}
"""


def settings(method: str = "lowcomm", optimizer: str = "adamw", overlap: int = 0) -> str:
    """The rest of a run file, from the settings of training on."""
    return SYNC.format(method=method, optimizer=optimizer, overlap=overlap)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder: its text is tokenized once."""
    return tmp_path_factory.mktemp("resuming")


def image(one: Driven) -> dict[str, Any]:
    """All that a replica is, to the bit."""
    parts, meta = state.snapshot(one.replica)
    tensors = {
        f"{part}/{name}": (tensor.dtype, tensor.numpy().tobytes())
        for part, of in parts.items()
        for name, tensor in of.items()
    }
    return tensors | meta


def check_same(one: Driven, other: Driven) -> None:
    """Both are the same, and so is their next loss."""
    mine, theirs = image(one), image(other)
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if mine[key] != theirs[key] and key != "peer_id"] == []


def exchange(one: Driven, other: Driven, fragment: int = 0) -> None:
    """A whole exchange in a pair, and the steps that overlap it."""
    begin(one, other, fragment)
    numbers = finish(one, other, fragment)
    for here, number in zip((one, other), numbers, strict=True):
        here.steps(here.replica.spec.sync.overlap)
        answer = here.answer(number)
        assert isinstance(answer, OuterStepApplied)


def alone(one: Driven) -> None:
    """An exchange of a group in which only our own shard was averaged."""
    share(one)
    number = reduce(one)
    one.steps(one.replica.spec.sync.overlap)
    answer = one.answer(number)
    assert isinstance(answer, OuterStepApplied)


def share(one: Driven) -> None:
    """Begin an exchange in a group of three."""
    shared = one.ask(
        CaptureContribution(fragment=0, slot=0, realign=False, ahead=0, members=("a", "b", "c"))
    )
    assert len(shared.sizes) == 3


def reduce(one: Driven) -> int:
    """Average our shard of the first fragment, in which nobody else's contribution is; the number
    of the merge."""
    one.ask(AverageShard(fragment=0, tokens={"a": 1}, slot=2, offset=0))
    number = one.send(merge_of(one, {"a": 0}))
    one.settle()
    return number


def resumed(one: Driven, again: Driven) -> None:
    """``again`` takes over what ``one`` saves."""
    parts, meta = state.snapshot(one.replica)
    copies = {
        part: {name: tensor.clone() for name, tensor in of.items()} for part, of in parts.items()
    }
    state.restore(again.replica, copies, meta)


@pytest.mark.parametrize(
    ("method", "optimizer"), [("lowcomm", "muon"), ("noloco", "adamw"), ("local", "adamw")]
)
def test_training_goes_on_to_the_bit(folder: Path, method: str, optimizer: str) -> None:
    with driven(folder, "a", "b", "a", more=settings(method, optimizer)) as (one, partner, again):
        for here in (one, partner):
            here.steps(3)
        if method != "local":
            exchange(one, partner)
        one.steps(1)
        resumed(one, again)
        check_same(one, again)
        for here in (one, again):
            here.steps(2)
        check_same(one, again)
        assert one.events(InnerStepTaken)[-1].loss == again.events(InnerStepTaken)[-1].loss


@pytest.mark.parametrize(
    ("method", "optimizer"), [("diloco", "adamw"), ("streaming-diloco", "muon")]
)
def test_training_and_the_momentum_of_groups_go_on_to_the_bit(
    folder: Path, method: str, optimizer: str
) -> None:
    with driven(folder, "a", "a", more=settings(method, optimizer)) as (one, again):
        one.steps(3)
        alone(one)
        assert one.replica.delta[0].abs().max() > 0
        one.steps(1)
        resumed(one, again)
        check_same(one, again)
        for here in (one, again):
            here.steps(1)
            alone(here)
        check_same(one, again)


@pytest.mark.parametrize(("method", "optimizer"), [("lowcomm", "muon"), ("noloco", "adamw")])
def test_a_start_in_the_middle_of_an_exchange_in_a_pair_is_as_if_it_had_failed(
    folder: Path, method: str, optimizer: str
) -> None:
    with driven(folder, "a", "b", "a", "a", more=settings(method, optimizer, overlap=3)) as (
        one,
        partner,
        again,
        never,
    ):
        for here in (one, partner):
            here.steps(2)
        exchange(one, partner)
        resumed(one, never)
        check_same(one, never)
        for here in (one, partner, never):
            here.steps(2)
        one.ask(CaptureContribution(fragment=0, slot=0, realign=False, ahead=0))
        check_as_if_it_had_failed(one, again, never)
        one.ask(Drop(fragment=0))
        begin(one, partner)
        check_as_if_it_had_failed(one, again, never)
        number, _ = finish(one, partner)
        for here in (one, never):
            here.steps(2)
        assert one.answer(number) is None, "its merge still ripens"
        check_as_if_it_had_failed(one, again, never)
        for here in (again, never):
            here.steps(3)
        check_same(again, never)


def check_as_if_it_had_failed(one: Driven, again: Driven, never: Driven) -> None:
    """Who takes over what ``one`` saves in an exchange is as who ``never`` began it."""
    assert one.replica.captures
    resumed(one, again)
    assert again.replica.captures == {}
    check_same(again, never)


def test_a_merge_takes_over_the_swarm_step_of_one_that_is_ahead_and_can_end_the_run(
    folder: Path,
) -> None:
    with driven(folder, "a", "b", more=settings()) as (one, partner):
        for here in (one, partner):
            here.steps(2)
        begin(one, partner)
        last = one.replica.spec.run.steps
        number = one.send(merge_of(one, {"a": 1, "b": 1}, swarm_step=last))
        one.settle()
        answer = one.answer(number)
        assert (
            isinstance(answer, OuterStepApplied)
            and answer.swarm_step == last == one.replica.clock.step
        )
        assert [event.swarm_step for event in one.events(Finished)] == [last]
        assert one.replica.schedule[0].version == 1 and one.replica.schedule[1].version == 0


@pytest.mark.parametrize("key", ["run_id", "plan", "progress", "swarm_step", "tokens"])
def test_a_state_of_another_run_or_without_counters_is_refused(folder: Path, key: str) -> None:
    with driven(folder, "a", more=settings()) as (one,):
        one.steps(1)
        parts, meta = state.snapshot(one.replica)
        before = image(one)
        for wrong in ("other", None, -1, True, [{}], [meta["progress"][0]]):
            with pytest.raises(CheckpointError):
                state.restore(one.replica, parts, meta | {key: wrong})
        assert image(one) == before


def test_a_norm_that_is_claimed_is_taken_where_it_is_one(folder: Path) -> None:
    with driven(folder, "a", more=settings()) as (one,):
        parts, meta = state.snapshot(one.replica)
        count = len(one.replica.phi)
        for told, learned in (
            ([0.5] * count, 0.5),
            ([1e6] * count, 0.0),
            ([-1.0] * count, 0.0),
            ([0.5], 0.0),
            (None, 0.0),
        ):
            state.restore(one.replica, parts, meta | {"usual": told})
            assert [each.usual.learned for each in one.replica.history] == [learned] * count
