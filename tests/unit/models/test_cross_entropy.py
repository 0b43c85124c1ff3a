"""What must hold for the loss: in chunks of tokens it is the loss of all of them, in far less
memory; small models never meet chunks; ignored targets neither count nor move anything."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowcomm_node.data.stream import IGNORED
from lowcomm_node.models import cross_entropy as module
from lowcomm_node.models.cross_entropy import chunk_tokens, cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self.alive:
                storage = one.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return made


def plain(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, head).float().flatten(0, -2), targets.flatten())


def inputs(tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    states = torch.randn(2, tokens // 2, width, generator=draw)
    head = torch.randn(vocab, width, generator=draw)
    targets = torch.randint(0, vocab, (2, tokens // 2), generator=draw)
    return states, head, targets


def learn(loss: Loss, states: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The loss, and a third of both gradients."""
    states, head = states.clone().requires_grad_(), head.clone().requires_grad_()
    value = loss(states, head, targets)
    (value / 3).backward()
    assert states.grad is not None and head.grad is not None
    return value.detach(), states.grad, head.grad


@pytest.mark.parametrize("chunk", [1, 7, 10, 63])
def test_chunks_of_any_size_give_loss_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    given = inputs(64, 12, 50)
    expected = learn(plain, *given)
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: chunk)
    for ours, one in zip(learn(cross_entropy, *given), expected, strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(*given), expected[0])


def test_logits_far_from_zero_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: 5)
    states, head, targets = inputs(20, 8, 30)
    given = 1e4 * states, head, targets
    for ours, one in zip(learn(cross_entropy, *given), learn(plain, *given), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 5])
def test_ignored_targets_are_as_if_they_were_not_there(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: chunk)
    states, head, targets = inputs(40, 12, 50)
    targets[0, ::3] = targets[1, 10:] = IGNORED
    learned = targets != IGNORED
    loss, by_states, by_head = learn(cross_entropy, states, head, targets)
    expected = learn(plain, states[learned], head, targets[learned])
    for ours, one in zip((loss, by_states[learned], by_head), expected, strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-7)
    assert not by_states[~learned].any()
    loss, *slopes = learn(cross_entropy, states, head, torch.full_like(targets, IGNORED))
    assert loss == 0 and not any(one.any() for one in slopes), "where nothing is learned"


@pytest.mark.slow
def test_at_32k_words_the_peak_is_less_than_a_quarter_of_the_whole_loss() -> None:
    given = inputs(1024, 16, 32_768)
    assert chunk_tokens(1024, 32_768) == 512
    peaks: list[int] = []
    for loss in (plain, cross_entropy):
        with Peak() as peak:
            learn(loss, *given)
        peaks.append(peak.most)
    assert peaks[1] < peaks[0] / 4, peaks
