"""What must hold for steps that are cut: the gradient is that of the batch, the largest
micro-batch that fits is chosen, and memory that is taken later costs no step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowcomm_node.data.stream import IGNORED
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Model, build_model
from lowcomm_node.trainer.memory import GIB, StepChoices, check_memory, estimate_memory
from lowcomm_node.trainer.micro_batch import Cut, Gradient, choose
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

SMALL = TransformerSettings(layers=2, width=32, heads=2, feed_forward=64, context=16)
Loss = Callable[[Tensor, Tensor], Tensor]


def batch_of(windows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(windows)
    text = torch.randint(0, SMALL.vocab, (windows, SMALL.context + 1), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def gradient_of(model: Model, windows: int, loss: Loss | None = None) -> Gradient:
    return Gradient(model, loss or model.loss, windows)


def learned(cut: Cut, windows: int = 8, ignored: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a batch that is cut so; of its targets the first are ignored."""
    model = build_model(SMALL, 0)
    gradient = gradient_of(model, windows)
    gradient.cut = cut
    tokens, targets = batch_of(windows)
    targets.view(-1)[:ignored] = IGNORED
    loss = gradient.of(tokens, targets)
    return loss, [weight.grad for weight in model.parameters() if weight.grad is not None]


class Allocator:
    """A device that has room for fewer than so many windows, or twice as many blocks computed
    again."""

    def __init__(self, model: Model, fails_at: int, says: str = "CUDA out of memory.") -> None:
        self.model = model
        self.fails_at = fails_at
        self.says = says
        self.asked: list[int] = []

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss, if there is room."""
        self.asked.append(len(tokens))
        if len(tokens) >= self.fails_at * (2 if self.model.recompute else 1):
            raise RuntimeError(self.says)
        return self.model.loss(tokens, targets)


# the gradient


@pytest.mark.parametrize("ignored", [0, 53, 8 * SMALL.context])  # whole parts, a part of one, all
@pytest.mark.parametrize("windows", [1, 2, 3, 5])
def test_parts_of_any_size_give_loss_and_gradient_of_the_batch(windows: int, ignored: int) -> None:
    expected, gradients = learned(Cut(8), ignored=ignored)
    loss, found = learned(Cut(windows), ignored=ignored)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    assert len(found) == len(gradients) > 0
    for ours, one in zip(found, gradients, strict=True):
        assert (ours - one).abs().max() < 1e-6


# the choice


def test_blocks_are_computed_again_only_where_not_one_window_fits_otherwise() -> None:
    for fitting in range(1, 9):
        assert choose(8, None, None, lambda cut, most=fitting: cut.windows <= most) == Cut(fitting)
    assert choose(8, None, None, lambda cut: cut.recompute) == Cut(8, True)
    assert choose(8, None, False, lambda cut: cut.recompute) is None
    assert choose(8, 4, None, lambda cut: cut.recompute) == Cut(4, True)
    assert choose(8, 4, False, lambda cut: cut.recompute) is None
    assert choose(8, 99, True, lambda cut: True) == Cut(8, True)


# memory that is taken later


@pytest.mark.parametrize(
    "says",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 34 bytes. Error code 12 (Cannot allocate memory)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    ],
)
def test_a_step_that_runs_out_is_halved_and_taken_again(says: str) -> None:
    expected, gradients = learned(Cut(8))
    model = build_model(SMALL, 0)
    device = Allocator(model, 3, says)
    gradient = gradient_of(model, 8, device)
    loss = gradient.of(*batch_of(8))
    assert device.asked == [8, 4, 2, 2, 2, 2] and gradient.cut == Cut(2)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    for weight, one in zip(model.parameters(), gradients, strict=True):
        assert weight.grad is not None and (weight.grad - one).abs().max() < 1e-6


def test_the_first_step_leaves_room_for_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(SMALL, 0)
    device = Allocator(model, 9)
    gradient = gradient_of(model, 8, device)
    gradient.reserved_bytes = 3_000
    empty = torch.empty

    def scarce(*shape: int, **how: Any) -> Tensor:
        """Has room for the moments beside two windows."""
        if how.get("dtype") is torch.uint8:
            device.fails_at = 3 if shape == (3_000,) else 9
        return empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", scarce)
    gradient.of(*batch_of(8))
    assert gradient.cut == Cut(2)
    gradient.cut = Cut(8)
    gradient.of(*batch_of(8))
    assert gradient.cut == Cut(8), "once they are there nothing is left free for them"


# the owner's settings, and a processor


def spec_of(**train: int) -> RunSpec:
    model = {"width": 256, "heads": 4, "feed_forward": 704, "context": 1024}
    return RunSpec.model_validate({"run": {"name": "a"}, "model": model, "train": train})


def test_a_processor_gets_what_is_reckoned_to_fit() -> None:
    spec, cpu = spec_of(batch=64), torch.device("cpu")

    def takes(windows: int, again: bool = False) -> float:
        return estimate_memory(spec, False, 4, Cut(windows, again)).host_bytes / GIB

    assert check_memory(spec, cpu, takes(64) + 0.01)[1] == Cut(64)
    assert check_memory(spec, cpu, takes(16) + 0.01)[1] == Cut(16)
    assert takes(1, True) < takes(1)
    assert check_memory(spec, cpu, takes(1, True) + 0.001)[1] == Cut(1, True)
    for wanted, remedy in (
        (StepChoices(32), "smaller --micro-batch"),
        (StepChoices(None, False), "leave --activation-checkpointing at auto"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            check_memory(spec, cpu, takes(1, True) + 0.001, choices=wanted)
    assert check_memory(spec, cpu, 64.0, choices=StepChoices(3, True))[1] == Cut(3, True)
