"""What must hold for machines that compute gradients for a trainer: a step with them is the step
without, whatever becomes of them, and each gets the windows that it has time for."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import sections, write_base
from helpers.driven_trainer import Driven, driven, image, write_documents
from helpers.lenders import Daemon, lenders, losses, weights
from helpers.waiting import until
from lowcomm_node.models.adapters import allocated
from lowcomm_node.trainer import lent, state
from lowcomm_node.trainer.lent import Pace, share_out, untrained
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import AdapterSettings

pytestmark = pytest.mark.slow
OURS = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 48, "context": 16}
MORE = 'learning_rate = 0.02\nwarmup = 3\noptimizer = "muon"\n[sync]\nfragments = 3\n'


def trainer(folder: Path, *daemons: Daemon, more: str = MORE, **how: Any) -> Any:
    folder.mkdir(exist_ok=True)
    named = tuple((f"lender-{number}", one.path) for number, one in enumerate(daemons))
    return driven(folder, "a", more=more, workers=named, **how)


def machines(one: Driven) -> list[lent.Lent]:
    assert one.replica.lenders is not None
    return one.replica.lenders.machines


def all_here(one: Driven) -> None:
    until(lambda: not any(there.why_away for there in machines(one)), 60, "all lenders are here")


def check_close(one: Driven, other: Driven) -> None:
    assert losses(one) == pytest.approx(losses(other), abs=2e-6)
    mine, theirs = weights(one), weights(other)
    for name, weight in mine.items():
        assert weight.allclose(theirs[name], rtol=1e-4, atol=1e-6), name


def test_steps_with_a_lender_are_those_without_also_when_it_dies_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent, "RETRY", 0.1)
    monkeypatch.setattr(lent, "LATE_SECONDS", 60.0)
    with (
        trainer(tmp_path / "alone") as (alone,),
        lenders(tmp_path, 1) as (daemon,),
        trainer(tmp_path / "with", daemon) as (one,),
    ):
        all_here(one)
        one.steps(2)
        (machine,) = machines(one)
        assert machine.bytes > 0, "it was measured at once, whatever it gets then"
        monkeypatch.setattr(lent, "share_out", lambda count, own, others: [1, count - 1])
        one.steps(2)
        assert machine.windows == 1
        os.kill(daemon.workers[0].pid, signal.SIGKILL)
        one.steps(1)  # nobody knows yet, or somebody does
        until(lambda: machine.why_away == "", 60, "a new worker takes part")
        one.steps(2)
        alone.steps(7)
        check_close(one, alone)
        assert len(daemon.workers) == 2


def test_a_step_does_not_wait_for_a_lender_that_is_late_and_is_the_same_without_it(
    tmp_path: Path,
) -> None:
    with (
        trainer(tmp_path / "alone") as (alone,),
        lenders(tmp_path, 1) as (daemon,),
        trainer(tmp_path / "with", daemon) as (one,),
    ):
        all_here(one)
        one.steps(1)
        (machine,) = machines(one)
        until(lambda: not machine.away, 60, "the first answer is here")
        machine.pace = Pace()
        os.kill(daemon.workers[0].pid, signal.SIGSTOP)
        one.steps(3)
        assert machine.away == "it is late"
        os.kill(daemon.workers[0].pid, signal.SIGCONT)
        until(lambda: not machine.away, 60, "it has answered")
        alone.steps(4)
        check_close(one, alone)


def test_a_lender_without_windows_is_measured_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent, "LATE_SECONDS", 60.0)
    with lenders(tmp_path, 1) as daemons, trainer(tmp_path / "with", *daemons) as (one,):
        all_here(one)
        (machine,) = machines(one)
        machine.pace = Pace(100.0, 100.0)
        one.steps(2)
        assert machine.windows == 0 and machine.pace.line == 100.0
        monkeypatch.setattr(lent, "REST", 0)
        one.steps(1)
        assert machine.windows == 1 and machine.pace.line < 60.0


@pytest.mark.soak
def test_a_lender_adapts_frozen_weights_that_it_was_sent(tmp_path: Path) -> None:
    base = tmp_path / "start" / "model.safetensors"
    write_base(base.parent, TransformerSettings.model_validate(OURS))
    how: Any = {
        "more": MORE.replace("muon", "adamw") + sections(base, rank=4),
        "model": "\n".join(f"{name} = {value}" for name, value in OURS.items()),
        "start": (str(base),),
    }
    with (
        trainer(tmp_path / "alone", **how) as (alone,),
        lenders(tmp_path, 1) as daemons,
        trainer(tmp_path / "with", *daemons, **how) as (one,),
    ):
        all_here(one)
        one.steps(3)
        alone.steps(3)
        assert machines(one)[0].bytes > 0
        check_close(one, alone)


@pytest.mark.soak
def test_a_lender_keeps_attention_within_documents(tmp_path: Path) -> None:
    more = "document_mask = true\n" + MORE
    with (
        trainer(write_documents(tmp_path / "alone"), more=more) as (alone,),
        lenders(tmp_path, 1) as daemons,
        trainer(write_documents(tmp_path / "with"), *daemons, more=more) as (one,),
    ):
        all_here(one)
        one.steps(2)
        alone.steps(2)
        assert machines(one)[0].bytes > 0
        check_close(one, alone)


def test_frozen_weights_travel_in_one_form_whatever_the_devices(tmp_path: Path) -> None:
    settings = TransformerSettings.model_validate(OURS)
    model = allocated(settings, AdapterSettings(rank=4), torch.device("cpu"))
    forms = [form for _, form in untrained(model)]
    for parameter in model.parameters():
        if not parameter.requires_grad:  # as on a GPU
            parameter.data = parameter.data.to(torch.bfloat16)
    assert [form for _, form in untrained(model)] == forms


def test_a_lender_without_the_memory_says_so_and_training_goes_on(tmp_path: Path) -> None:
    with (
        lenders(tmp_path, 1, max_memory_bytes=1 << 20) as daemons,
        trainer(tmp_path / "with", *daemons) as (one,),
    ):
        (machine,) = machines(one)
        until(lambda: "GiB of memory" in machine.why_away, 60, "the reason is known here")
        one.steps(2)
        assert len(losses(one)) == 2


@pytest.mark.soak
def test_what_a_lender_trains_is_saved_and_resumed_without_it(tmp_path: Path) -> None:
    with lenders(tmp_path, 1) as daemons, trainer(tmp_path / "with", *daemons) as (one,):
        all_here(one)
        one.steps(2)
        before = image(one)
        parts, meta = state.snapshot(one.replica)
        with trainer(tmp_path / "again") as (again,):
            state.restore(again.replica, parts, meta)
            assert image(again) == before


@pytest.mark.parametrize(
    ("count", "own", "others", "shares"),
    [
        (8, Pace(1.0), [Pace(1.0)], [4, 4]),
        (8, Pace(1.0), [Pace(0.25, 1.0)], [2, 6]),
        (8, Pace(1.0), [Pace(1.0, 9.0)], [8, 0]),
        (8, Pace(1.0), [None, Pace(1.0)], [4, 0, 4]),
        (8, Pace(1.0), [Pace(), Pace(1.0, 9.0)], [7, 1, 0]),
        (2, Pace(), [Pace(), Pace()], [1, 1, 0]),
        (1, Pace(), [Pace()], [1, 0]),
        (9, Pace(1.0), [Pace(1.0), Pace(0.5)], [2, 2, 5]),
    ],
)
def test_each_machine_gets_the_windows_that_it_has_time_for(
    count: int, own: Pace, others: list[Pace | None], shares: list[int]
) -> None:
    assert share_out(count, own, others) == shares
