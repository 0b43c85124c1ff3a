"""What must hold for machines that hold stages of a model: steps, exchanges and checkpoints are
those of one process, to the bit, and a machine that goes ends the step and is waited for."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import sections, write_base
from helpers.driven_trainer import Driven, begin, driven, finish, image, write_documents
from helpers.families import section, tiny
from helpers.lenders import Daemon, lenders, losses
from helpers.tiny import METHODS, SYNCED
from helpers.waiting import until
from lowcomm_node.errors import TrainerError
from lowcomm_node.models.adapters import UNDER_WAY
from lowcomm_node.models.base import family_of
from lowcomm_node.models.stages import split
from lowcomm_node.node.ipc import FailureKind
from lowcomm_node.node.messages import (
    Evaluate,
    Evaluated,
    Generate,
    InnerStepTaken,
    LenderAwaited,
    OuterStepApplied,
    Save,
    TrainerFailed,
)
from lowcomm_node.trainer import pipeline
from lowcomm_node.trainer.pipeline import Pipeline, forward_order
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformerSettings

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {"layers": 4, "width": 32, "heads": 4, "feed_forward": 48, "context": 16}
WRITE = Generate(prompt="A ", tokens=8, temperature=0.0, seed=0)


def run_of(method: str = "lowcomm", optimizer: str = "muon") -> str:
    return SYNCED.format(method=method, optimizer=optimizer)


def trainer(
    folder: Path, *daemons: Daemon, peers: tuple[str, ...] = ("a",), sizes: Any = SIZES, **how: Any
) -> Any:
    """A trainer, whose model these lenders hold with it."""
    folder.mkdir(parents=True, exist_ok=True)
    named = tuple((f"lender-{number}", one.path) for number, one in enumerate(daemons))
    how.setdefault("more", run_of())
    how.setdefault("household", "stages" if named else "auto")
    how.setdefault("micro_batch", 1)
    model = "\n".join(f"{name} = {str(value).lower()}" for name, value in sizes.items())
    model = how.pop("section", model)
    return driven(folder, *peers, model=model, workers=named, **how)


def exchange(one: Driven, other: Driven) -> None:
    """A whole exchange of the second fragment, while both train on."""
    begin(one, other, 1)
    one.steps(1)
    other.steps(1)
    numbers = finish(one, other, 1)
    for here, number in zip((one, other), numbers, strict=True):
        assert isinstance(here.answer(number), OuterStepApplied)


def check_stages_or_one_process(folder: Path, count: int, method: str, optimizer: str) -> None:
    images, told = list[Any](), list[Any]()
    with lenders(folder, count) as daemons:
        for named in ((), daemons):
            home = folder / f"with-{len(named)}"
            more = run_of(method, optimizer)
            with (
                trainer(home / "plain", more=more, peers=("b",)) as (partner,),
                trainer(home, *named, more=more) as (one,),
            ):
                assert isinstance(one.replica.team, Pipeline) == bool(named)
                partner.steps(4)
                one.steps(4)
                if method != "local":
                    exchange(one, partner)
                one.steps(2)
                one.ask(Evaluate())
                one.ask(Save())
                images += [(image(one), image(partner))]
                told += [(losses(one), one.events(Evaluated)[-1].loss, one.ask(WRITE).text)]
    assert told[0] == told[1]
    assert images[0] == images[1]


@pytest.mark.parametrize(
    ("count", "method", "optimizer"),
    [
        (1, "lowcomm", "muon"),
        pytest.param(2, "streaming-diloco", "adamw", marks=pytest.mark.soak),
    ],
)
def test_stages_are_as_one_process(tmp_path: Path, count: int, method: str, optimizer: str) -> None:
    check_stages_or_one_process(tmp_path, count, method, optimizer)


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_method_is_the_same_in_stages(
    tmp_path: Path, count: int, method: str, optimizer: str
) -> None:
    check_stages_or_one_process(tmp_path, count, method, optimizer)


@pytest.mark.soak
def test_stages_go_on_from_a_checkpoint_of_one_process_and_it_from_theirs(tmp_path: Path) -> None:
    with trainer(tmp_path) as (one,):
        one.steps(2)
        one.ask(Save())
        saved = image(one)
    with lenders(tmp_path, 1) as daemons, trainer(tmp_path, *daemons) as (two,):
        assert image(two) == saved
        two.steps(2)
        two.ask(Save())
        saved = image(two)
    with trainer(tmp_path) as (one,):
        assert image(one) == saved


@pytest.mark.soak
def test_documents_ties_and_memory_for_no_activations_change_nothing(tmp_path: Path) -> None:
    sizes, more = SIZES | {"tied": True}, "document_mask = true\n" + run_of()
    how: Any = {"sizes": sizes, "more": more, "activation_checkpointing": "on"}
    with lenders(tmp_path, 1) as daemons:
        with trainer(write_documents(tmp_path / "one"), **how) as (whole,):
            whole.steps(4)
        with trainer(write_documents(tmp_path / "two"), *daemons, **how) as (one,):
            one.steps(4)
        # A tied matrix adds up the gradients of both of its places in another order.
        assert losses(one) == pytest.approx(losses(whole), abs=2e-6)
        how["sizes"] = SIZES
        with trainer(write_documents(tmp_path / "three"), **how) as (whole,):
            whole.steps(3)
        with trainer(write_documents(tmp_path / "four"), *daemons, **how) as (one,):
            one.steps(3)
        assert losses(one) == losses(whole)


@pytest.mark.soak
@pytest.mark.parametrize("type_", ARCHITECTURES)
def test_every_type_of_model_trains_in_stages_as_it_does_whole(tmp_path: Path, type_: str) -> None:
    settings = tiny(type_)
    how: Any = {"section": section(settings)}
    with lenders(tmp_path, 1) as daemons:
        if not family_of(settings).can_stage(settings):
            with (
                pytest.raises(AssertionError, match="can't be cut into stages"),
                trainer(tmp_path / "two", *daemons, **how),
            ):
                pass
            return
        with trainer(tmp_path / "one", **how) as (whole,):
            whole.steps(3)
            whole.ask(Evaluate())
        with trainer(tmp_path / "two", *daemons, **how) as (one,):
            one.steps(3)
            one.ask(Evaluate())
            close = pytest.approx(losses(whole), abs=2e-6)
            assert losses(one) == close and one.ask(WRITE).text
            assert one.events(Evaluated)[0].loss == pytest.approx(whole.events(Evaluated)[0].loss)


@pytest.mark.soak
@pytest.mark.parametrize("adapts", [False, True])
def test_stages_begin_with_weights_from_files(tmp_path: Path, adapts: bool) -> None:
    base = tmp_path / "start" / "model.safetensors"
    write_base(base.parent, TransformerSettings.model_validate(SIZES))
    more = run_of(optimizer="adamw") + sections(base, rank=4)
    more = more if adapts else more.partition("[adapter]")[0]
    how: Any = {"more": more, "start": (str(base),)}
    with lenders(tmp_path, 1) as daemons:
        with trainer(tmp_path / "one", **how) as (whole,):
            whole.steps(3)
            expected = image(whole)
        with trainer(tmp_path / "two", *daemons, **how) as (one,):
            one.steps(3)
            assert losses(one) == losses(whole)
            assert image(one) == expected


# machines that go


def test_a_machine_that_dies_ends_the_step_and_the_next_trainer_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "RETRY", 0.1)
    with lenders(tmp_path, 1) as (daemon,):
        with trainer(tmp_path, daemon) as (one,):
            one.steps(1)
            one.ask(Save())
            saved = image(one)
            os.kill(daemon.workers[0].pid, signal.SIGKILL)
            until(lambda: one.events(TrainerFailed), 60, "the end is told without a step")
            (failed,) = one.events(TrainerFailed)
            assert failed.kind is FailureKind.LENDER and "lender-0 is gone" in failed.reason
            with pytest.raises(TrainerError, match="lender-0 is gone"):
                one.steps(1)
        daemon.refuses = "it is switched off"
        monkeypatch.setattr(pipeline, "GRACE", 60.0)

        def switch_on() -> None:
            until(lambda: daemon.refused > 1, 60, "it was tried again")
            daemon.refuses = ""

        threading.Thread(target=switch_on).start()
        with trainer(tmp_path, daemon) as (one,):
            told = [event.why for event in one.events(LenderAwaited)]
            assert "lender-0: it is switched off" in told[0] and told[-1] == ""
            assert image(one) == saved
            one.steps(1)


def test_a_silent_machine_is_told_and_training_goes_on_once_it_speaks(tmp_path: Path) -> None:
    with lenders(tmp_path, 1) as (daemon,), trainer(tmp_path, daemon) as (one,):
        one.steps(1)
        os.kill(daemon.workers[0].pid, signal.SIGSTOP)
        until(lambda: one.events(LenderAwaited), 60, "silence is told")
        assert "lender-0 gives no sign of life" in one.events(LenderAwaited)[0].why
        os.kill(daemon.workers[0].pid, signal.SIGCONT)
        until(lambda: not one.events(LenderAwaited)[-1].why, 60, "it speaks")
        one.steps(1)
        assert len(losses(one)) == 2


@pytest.mark.soak
def test_those_that_are_left_hold_the_model_until_all_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "GRACE", 0.0)
    monkeypatch.setattr(pipeline, "RETURN_EVERY", 0.0)
    with trainer(tmp_path / "alone") as (alone,), lenders(tmp_path, 2) as daemons:
        daemons[1].refuses = "it is switched off"
        with trainer(tmp_path / "two", *daemons) as (one,):
            one.steps(2)
            alone.steps(2)
            assert losses(one) == losses(alone)
            used, gone = one.events(InnerStepTaken)[-1].lenders
            assert used.blocks and not used.away and gone.away == "it was not here"
            assert one.replica.team and not one.replica.team.returned()
            daemons[1].refuses = ""
            until(lambda: one.replica.team.returned() == "lender-1", 60, "it can be used again")


@pytest.mark.soak
def test_a_lender_bounds_what_a_head_may_have_under_way_and_send(tmp_path: Path) -> None:
    with lenders(tmp_path, 2) as daemons, trainer(tmp_path, *daemons) as (one,):
        assert isinstance(one.replica.team, Pipeline)
        first, second = one.replica.team._holders
        states = torch.zeros(1, 16, 32)
        order, tensors = forward_order(states, None, learns=True)
        asked = [
            first.ask(order, tensors, [torch.empty_like(states)]) for _ in range(UNDER_WAY + 1)
        ]
        with pytest.raises(TrainerError, match=f"more than {UNDER_WAY} micro-batches"):
            asked[-1].result(60)
        huge = {"do": "backward", "shape": [1 << 20, 16, 32], "dtype": "float32"}
        with pytest.raises(TrainerError, match="lender-1 is gone"):
            second.ask(huge).result(60)
        until(lambda: len(one.events(TrainerFailed)) == 2, 60, "both ends are told")
        kinds = {event.reason[:8]: event.kind for event in one.events(TrainerFailed)}
        assert kinds == {"lender-0": FailureKind.ERROR, "lender-1": FailureKind.LENDER}


# who holds what


@pytest.mark.soak
def test_a_model_that_fits_nowhere_is_shared_out_and_refused_where_all_have_too_little(
    tmp_path: Path,
) -> None:
    sizes = {**SIZES, "width": 512, "feed_forward": 2048, "layers": 8}
    more = run_of().replace("fragments = 3", "fragments = 32").replace("l = 8", "l = 64")
    how: Any = {"sizes": sizes, "more": more, "household": "auto", "max_memory": 0.9}
    with pytest.raises(AssertionError, match="needs about"), trainer(tmp_path / "alone", **how):
        pass
    with (
        lenders(tmp_path, 1, max_memory_bytes=700 << 20) as daemons,
        trainer(tmp_path / "with", *daemons, **how) as (one,),
    ):
        team = one.replica.team
        assert isinstance(team, Pipeline) and team.stage and team.stage.stop < 8
        one.steps(1)
        (used,) = one.events(InnerStepTaken)[0].lenders
        assert used.blocks == (team.stage.stop, 8) and not used.away
    with (
        lenders(tmp_path / "with", 1, max_memory_bytes=300 << 20) as daemons,
        pytest.raises(AssertionError, match="The model has 8 blocks"),
        trainer(tmp_path / "less", *daemons, **how),
    ):
        pass


@pytest.mark.parametrize(
    ("blocks", "seconds", "most", "counts"),
    [
        (8, [1.0, 1.0], [8, 8], [4, 4]),
        (8, [1.0, 1.0], [2, 8], [2, 6]),
        (8, [1.0, 0.25], [8, 8], [1, 7]),
        (9, [2.0, 1.0, 1.0], [9, 9, 9], [2, 4, 3]),
        (8, [1.0, 1.0], [2, 5], None),
    ],
)
def test_blocks_are_shared_out_by_speed_and_memory(
    blocks: int, seconds: list[float], most: list[int], counts: list[int] | None
) -> None:
    assert split(blocks, seconds, most) == counts
