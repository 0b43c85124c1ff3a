"""What must hold for a trainer whose run is amended: the settings change at the named swarm step,
and a resume knows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.driven_trainer import begin, driven, finish
from lowcomm_node.node.messages import Amend, Finished, InnerStepTaken, OuterStepApplied
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.amendments import Chain, write_amendment
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

CREATOR = Identity(b"c" * 32)
STEPS = 8
MORE = """
[sync]
method = "noloco"
interval = 4
"""
SOURCE = '\n[data]\nsource = "local"\n'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[SignedRun]:
    """The run that driven trainers train."""
    first = tiny.TINY.replace("[run]", f'[run]\ncreator = "{CREATOR.peer_id}"\nsteps = {STEPS}', 1)
    monkeypatch.setattr(tiny, "TINY", first)
    return sign_run(parse_toml(first.format(model=tiny.MODEL) + MORE + SOURCE), CREATOR)


def amended(run: SignedRun, *changes: tuple[int, dict[str, Any]]) -> Chain:
    chain = Chain()
    for at, change in changes:
        chain = write_amendment(CREATOR, run, chain, at, change)
    return chain


def rates(one: Any) -> list[float]:
    return [event.learning_rate for event in one.events(InnerStepTaken)]


CONSTANT = {"train.learning_rate": 0.125, "train.final_learning_rate": 1.0, "train.warmup": 0}


def test_the_learning_rate_changes_at_the_named_step_whenever_that_was_heard(
    run: SignedRun, tmp_path: Path
) -> None:
    chain = amended(run, (5, CONSTANT)).data.decode()
    with driven(tmp_path, "early", "late", more=MORE) as (early, late):
        early.ask(Amend(amendments=chain))
        early.steps(7)
        late.steps(6)
        late.ask(Amend(amendments=chain))
        assert late.replica.clock.step == 6
        late.steps(1)
    assert [rate == 0.125 for rate in rates(early)] == [False] * 4 + [True] * 3
    assert rates(late)[:4] == rates(early)[:4] and 0.125 not in rates(late)[:6]
    used = [one.replica.optimizer.rate for one in (early, late)]
    assert rates(late)[6] == 0.125 and used == [0.125] * 2, (
        "the optimizer takes the rate that is told"
    )


def test_peers_on_both_sides_of_an_amendment_exchange(run: SignedRun, tmp_path: Path) -> None:
    with driven(tmp_path, "ada", "bob", more=MORE) as (ada, bob):
        ada.ask(Amend(amendments=amended(run, (1, {"train.learning_rate": 0.004})).data.decode()))
        for one in (ada, bob):
            one.steps(4)
        assert (
            ada.built.plan == bob.built.plan
            and ada.replica.run_id == bob.replica.run_id == run.run_id
        )
        begin(ada, bob)
        numbers = finish(ada, bob)
        for one, number in zip((ada, bob), numbers, strict=True):
            assert isinstance(one.answer(number), OuterStepApplied)
            assert one.replica.schedule[0].version == 1


def test_a_run_that_is_over_goes_on_when_its_creator_makes_it_longer(
    run: SignedRun, tmp_path: Path
) -> None:
    with driven(tmp_path, "ada", more=MORE) as (ada,):
        ada.steps(STEPS)
        assert [event.swarm_step for event in ada.events(Finished)] == [STEPS]
        ada.ask(Amend(amendments=amended(run, (0, {"run.steps": STEPS + 2})).data.decode()))
        assert ada.loop._can_step()
        ada.steps(2)
        assert [event.swarm_step for event in ada.events(Finished)] == [STEPS, STEPS + 2]
        assert not ada.loop._can_step()


def test_what_the_creator_has_not_signed_changes_nothing(run: SignedRun, tmp_path: Path) -> None:
    stranger = Identity(b"s" * 32)
    foreign = sign_run(parse_toml(MORE.join(('[run]\nname = "test"\n', ""))), stranger)
    forged = write_amendment(stranger, foreign, Chain(), 1, CONSTANT).data.decode()
    with driven(tmp_path, "ada", more=MORE) as (ada,):
        for text in (forged, "", "nonsense"):
            ada.ask(Amend(amendments=text))
        assert ada.replica.course.chain == Chain()
