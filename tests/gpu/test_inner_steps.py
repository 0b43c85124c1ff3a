"""What must hold for inner steps on a GPU: the micro-batch that is found is the largest, a loss is
read without a wait, and a step without finite gradients changes nothing."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.driven_trainer import Driven, driven
from lowcomm_node.models.base import build_model
from lowcomm_node.models.cross_entropy import chunk_tokens, cross_entropy
from lowcomm_node.node.messages import MicroBatch, Stepped
from lowcomm_node.trainer.batches import read_later
from lowcomm_node.trainer.micro_batch import Cut, Gradient, largest
from lowcomm_protocol.spec.models import TransformerSettings

MODEL = TransformerSettings(
    layers=4, width=512, heads=8, feed_forward=1408, context=512, vocab=32_000
)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Driven]:
    with driven(tmp_path, "a", device="cuda") as (only,):
        yield only


def test_the_largest_micro_batch_fits_and_one_more_does_not(device: torch.device) -> None:
    model = build_model(MODEL, 0).to(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * 1024**3 / total, device)
    try:
        gradient = Gradient(model, model.loss, 256)
        found = largest(256, lambda count: gradient.fits(Cut(count)))
        assert 1 <= found < 256
        assert gradient.fits(Cut(found)) and not gradient.fits(Cut(found + 1))
        again = largest(256, lambda count: gradient.fits(Cut(count, True)))
        assert again > found, "blocks that are computed again keep less"
        tokens = torch.zeros(256, MODEL.context, dtype=torch.long, device=device)
        gradient.cut = Cut(256)
        assert gradient.of(tokens, tokens).isfinite() and gradient.cut.windows <= found
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


def test_a_trainer_tells_what_it_found_and_remembers_it(one: Driven) -> None:
    assert [event.why for event in one.events(MicroBatch)] == ["found by trying"]
    one.steps(3)
    assert [step.steps for step in one.events(Stepped)] == [1, 2, 3]


def test_steps_are_queued_ahead_and_one_without_finite_gradients_changes_nothing(
    one: Driven,
) -> None:
    assert one.replica.runs_ahead
    one.steps(2)
    before = {name: weight.detach().clone() for name, weight in one.replica.weights.items()}
    moments, honest = one.replica.optimizer.moments(), one.replica.loss
    one.replica.loss = lambda tokens, targets: honest(tokens, targets) * math.nan
    one.steps(1)
    assert one.events(Stepped)[-1].skipped_steps == 1
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


def test_a_loss_in_chunks_is_that_of_the_whole_in_bf16(device: torch.device) -> None:
    draw = torch.Generator(device).manual_seed(0)
    tokens, width, vocab = 4096, 256, 32_000
    assert chunk_tokens(tokens, vocab, gpu=True) == 2097
    targets = torch.randint(0, vocab, (tokens,), generator=draw, device=device)
    outcomes: list[list[Tensor]] = []
    peaks: list[int] = []
    for loss in (whole, cross_entropy):
        draw.manual_seed(1)
        states = torch.randn(tokens, width, generator=draw, device=device).requires_grad_()
        head = (torch.randn(vocab, width, generator=draw, device=device) * 0.05).requires_grad_()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(states, head, targets)
        value.backward()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        assert states.grad is not None and head.grad is not None
        outcomes.append([value.detach(), states.grad, head.grad])
    for expected, found in zip(*outcomes, strict=True):
        assert (found - expected).norm() < 0.01 * expected.norm()
    assert peaks[1] < peaks[0] / 4, peaks


def whole(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The loss with all logits at once."""
    logits = torch.nn.functional.linear(states, head)
    return torch.nn.functional.cross_entropy(logits.float(), targets)
