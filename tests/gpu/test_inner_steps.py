"""What must hold for inner steps on a GPU: a step that runs out of memory is cut, a loss is read
without a wait, and a step without finite gradients changes nothing."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.driven_trainer import Driven, driven
from lowcomm_node.models.base import build_model
from lowcomm_node.node.messages import InnerStepTaken
from lowcomm_node.trainer.micro_batch import Gradient
from lowcomm_node.trainer.moments import BITS
from lowcomm_node.trainer.shard import read_later
from lowcomm_protocol.spec.models import TransformerSettings

MODEL = TransformerSettings(
    layers=4, width=512, heads=8, feed_forward=1408, context=512, vocab=32_000
)


@pytest.fixture(params=list(BITS))
def one(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driven]:
    with driven(tmp_path, "a", device="cuda", moments=request.param) as (only,):
        yield only


def test_a_step_that_runs_out_of_memory_is_cut(device: torch.device) -> None:
    model = build_model(MODEL, 0).to(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * 1024**3 / total, device)
    try:
        gradient = Gradient(model, model.loss, 256)
        tokens = torch.zeros(256, MODEL.context, dtype=torch.long, device=device)
        assert gradient.of(tokens, tokens).isfinite() and gradient.cut.windows < 256
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_a_trainer_takes_no_more_memory_than_its_owner_allows(tmp_path: Path) -> None:
    try:
        with driven(tmp_path, "a", device="cuda", max_vram=1.0) as (one,):
            one.steps(1)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 30, dtype=torch.uint8, device=one.replica.device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_steps_are_queued_ahead_and_one_without_finite_gradients_changes_nothing(
    one: Driven,
) -> None:
    assert one.replica.runs_ahead
    one.steps(2)
    before = {name: weight.detach().clone() for name, weight in one.replica.weights.items()}
    moments, honest = one.replica.optimizer.moments(), one.replica.loss
    one.replica.loss = lambda tokens, targets: honest(tokens, targets) * math.nan
    one.steps(1)
    assert one.events(InnerStepTaken)[-1].skipped_steps == 1
    for name, weight in one.replica.weights.items():
        assert torch.equal(weight, before[name]), name
    for name, value in one.replica.optimizer.moments().items():
        assert torch.equal(value, moments[name]), name


def test_figures_are_read_without_what_is_queued_behind_them(device: torch.device) -> None:
    read = read_later(torch.tensor([1.5, 2.5], device=device))
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(200):
        busy = busy @ busy / 64
    end = torch.cuda.Event()
    end.record()
    assert read() == [1.5, 2.5]
    assert not end.query(), "the matrices behind them are still being multiplied"
    torch.cuda.synchronize(device)
