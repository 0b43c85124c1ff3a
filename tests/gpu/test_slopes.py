"""What must hold for slopes of the cross-entropy that a GPU computes: they are those of the loss,
whatever the vocabulary, and what is not finite shows in it."""

import pytest
import torch
from torch import Tensor

from lowcomm_node.data.stream import IGNORED

pytestmark = pytest.mark.gpu(interpreted=True)

ROWS = 5
VOCABS = (1, 100, 4096, 4097, 9000)


def drawn(vocab: int, device: torch.device, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(ROWS, vocab, generator=draw)
    targets = torch.randint(0, vocab, (ROWS,), generator=draw)
    targets[2] = IGNORED
    return logits.to(device, precision), targets.to(device)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_they_are_those_of_the_loss(
    vocab: int, precision: torch.dtype, device: torch.device
) -> None:
    from lowcomm_node.models.slopes_on_gpu import slopes

    logits, targets = drawn(vocab, device, precision)
    logits[0] *= 1e4  # far from zero they neither overflow nor vanish
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="sum")
    (by_logits,) = torch.autograd.grad(expected, exact)
    read, unwritten = slopes(logits.clone(), targets, learns=False)
    loss, found = slopes(logits, targets, learns=True)
    for one in (read, loss):
        torch.testing.assert_close(one.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert found.data_ptr() == logits.data_ptr(), "they take the place of the logits"
    assert unwritten.shape == found.shape == (ROWS, vocab)
    # Triton's interpreter cuts off where a GPU rounds.
    rounding = 1e-5 if precision is torch.float32 else 2.0**-7
    torch.testing.assert_close(found.double(), by_logits, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_a_loss_that_is_not(value: float, device: torch.device) -> None:
    from lowcomm_node.models.slopes_on_gpu import slopes

    logits, targets = drawn(4097, device, torch.bfloat16)
    logits[3, 4096] = value
    loss, _ = slopes(logits, targets, learns=True)
    assert not loss.isfinite()
