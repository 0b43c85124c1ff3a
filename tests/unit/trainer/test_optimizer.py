"""What must hold for the inner optimizers: what each moves, on which schedule, and that a restored
one goes on alike."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from lowcomm_node.errors import CheckpointError
from lowcomm_node.models.base import build_model
from lowcomm_node.trainer import optimizer as muon_module
from lowcomm_node.trainer.optimizer import (
    BatchedMuon,
    InnerOptimizer,
    learning_rate,
)
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import TrainSettings

CPU, RATE = torch.device("cpu"), 0.01
TINY = TransformerSettings(layers=2, width=16, heads=2, feed_forward=32, context=16)


def settings(**changes: object) -> TrainSettings:
    return TrainSettings.model_validate(changes)


def trained(optimizer: str, steps: int = 3, **changes: object) -> tuple[nn.Module, InnerOptimizer]:
    """A tiny model after a few steps on made-up gradients."""
    model = build_model(TINY, 0)
    inner = InnerOptimizer(model, settings(optimizer=optimizer, **changes), CPU)
    for step in range(steps):
        gradients(model, step)
        inner.step(RATE, step)
    return model, inner


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_does_what_torchs_own_does(optimizer):
    model, _ = trained(optimizer, weight_decay=0.05, warmup=0, learning_rate=0.01)
    same = build_model(TINY, 0)
    parts = [(name, w) for name, w in same.named_parameters()]
    mine = [
        w for name, w in parts if optimizer == "muon" and w.ndim == 2 and name.startswith("blocks.")
    ]
    rest = [w for _, w in parts if not any(w is one for one in mine)]
    share = 0.3 if optimizer == "muon" else 1.0
    groups = [
        {"params": [w for w in rest if w.ndim >= 2], "weight_decay": 0.05},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    torchs: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]
    if mine:
        torchs.append(torch.optim.Muon(mine, momentum=0.9, weight_decay=0.05))
    for step in range(3):
        gradients(same, step)
        for one, factor in zip(torchs, (share, 1.0), strict=False):
            for group in one.param_groups:
                group["lr"] = factor * RATE
            one.step()
    start = dict(build_model(TINY, 0).named_parameters())
    for (name, ours), theirs in zip(model.named_parameters(), same.parameters(), strict=True):
        if any(theirs is one for one in mine):  # ours computes in fp32 where torch's rounds to bf16
            way = (theirs - start[name]).norm()
            assert (ours - theirs).norm() < 0.03 * way, name
        else:
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("shape", [(24, 24), (32, 16), (16, 48)])
def test_muon_of_a_gpu_moves_matrices_as_torch_does_and_as_one_in_fp32(shape, monkeypatch):
    monkeypatch.setattr(muon_module, "AT_ONCE", 2 * shape[0] * shape[1])
    calls = []
    honest = muon_module.orthogonalized
    monkeypatch.setattr(
        muon_module,
        "orthogonalized",
        lambda x, *more: calls.append((x.dtype, len(x))) or honest(x, *more),
    )
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for _ in range(5)]
    grads = [[torch.randn(shape, generator=draw) for _ in range(5)] for _ in range(3)]

    def moved(make):
        weights = [nn.Parameter(one.clone()) for one in start]
        step = make(weights)
        for some in grads:
            for weight, grad in zip(weights, some, strict=True):
                weight.grad = grad
            step()
        return torch.stack([weight.detach() for weight in weights]) - torch.stack(start)

    def torchs(weights):
        return torch.optim.Muon(weights, lr=0.02, momentum=0.95, weight_decay=0.1).step

    ours = moved(lambda weights: partial(BatchedMuon(weights, 0.95, 0.1, gpu=True).step, 0.02))
    assert calls == [(torch.bfloat16, 2), (torch.bfloat16, 2), (torch.bfloat16, 1)] * 3
    exact = moved(lambda weights: partial(BatchedMuon(weights, 0.95, 0.1).step, 0.02))
    assert calls[-1] == (torch.float32, 5)
    theirs = moved(torchs)
    assert (ours - exact).norm() < 0.03 * exact.norm()
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_one_goes_on_as_if_it_had_never_stopped(optimizer):
    model, inner = trained(optimizer)
    again = build_model(TINY, 1)
    again.load_state_dict(model.state_dict())
    other = InnerOptimizer(again, settings(optimizer=optimizer), CPU)
    assert other.moments() == {}
    kept = inner.moments()
    other.restore(kept)
    for step in range(3, 6):
        for one, optimizer_ in ((model, inner), (again, other)):
            gradients(one, step)
            optimizer_.step(RATE, step)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("key", "value"), [("exp_avg_sq", -1.0), ("step", 0.0)])
def test_moments_that_no_training_reaches_are_refused(key, value):
    _, inner = trained("adamw")
    bad = inner.moments()
    bad[f"embedding.weight.{key}"].fill_(value)
    with pytest.raises(CheckpointError, match=r"impossible moments of embedding\.weight"):
        inner.restore(bad)


def test_the_learning_rate_warms_up_and_falls_as_a_cosine():
    train = settings(learning_rate=1.0, warmup=10, final_learning_rate=0.1)
    rates = [learning_rate(train, step, 110) for step in range(140)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55), "half way between 1 and 0.1"
    assert rates[110] == pytest.approx(0.1) and rates[139] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
