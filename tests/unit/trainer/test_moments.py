"""What must hold for moments in 16 and 8 bits: they take what is estimated, stay near those in
fp32, and go on to the bit after a kill, also with another choice of the owner."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.driven_trainer import Driven, driven
from lowcomm_node.models.base import build_model
from lowcomm_node.node.messages import Save
from lowcomm_node.trainer import memory, moments, state, transfer
from lowcomm_node.trainer.moments import BITS, BLOCK, Packed, generator_of
from lowcomm_node.trainer.optimizer import InnerOptimizer
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

CPU = torch.device("cpu")
MODEL = TransformerSettings(layers=2, width=32, heads=2, feed_forward=48, context=16)
PACKED = ("bf16", "int8")
OPTIMIZERS = ("adamw", "muon")
MORE = 'optimizer = "{}"\n'
ALL = slice(0, 3 * BLOCK + 7)


def inner(form: str, optimizer: str = "adamw") -> tuple[Any, InnerOptimizer]:
    content = {"run": {"name": "a"}, "model": MODEL, "train": {"optimizer": optimizer}}
    spec = RunSpec.model_validate(content | {"sync": {"method": "local"}})
    model = build_model(MODEL, 0)
    return spec, InnerOptimizer(model, spec.train, CPU, form)


def stepped(optimizer: InnerOptimizer, steps: int, unless: torch.Tensor | None = None) -> None:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        for weight in optimizer.weights.values():
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step(1e-3, step, unless)


def image(one: Driven) -> dict[str, Any]:
    """All that a replica is, to the bit."""
    parts, meta = state.snapshot(one.replica)
    tensors = {f"{part}/{name}": one for part, of in parts.items() for name, one in of.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | meta


def values(squares: bool = False) -> torch.Tensor:
    """From 1e-4 to 1 in magnitude, and zeros."""
    draw = torch.Generator().manual_seed(3)
    found = torch.randn(ALL.stop, generator=draw) * 10 ** -torch.arange(ALL.stop).remainder(5)
    found[5::9] = 0
    return found.square() if squares else found


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("squares", [False, True])
def test_what_is_packed_is_near_and_packs_to_the_same_codes(form: str, squares: bool) -> None:
    packed, exact = Packed(values(), form, squares), values(squares)
    packed.write(ALL, exact, generator_of(CPU, 1, 2, 3))
    found = packed.whole()
    assert torch.equal(found == 0, exact == 0) or not squares, "no root is rounded to zero"
    roots = (found.sqrt(), exact.sqrt()) if squares else (found, exact)
    allowed = 1 / 255 if squares else 1 / 127  # of the largest of a block
    for one, other in zip(roots[0].split(BLOCK), roots[1].split(BLOCK), strict=True):
        assert (one - other).abs().max() <= 1.01 * allowed * other.abs().max()
    again = Packed(values(), form, squares)
    again.take(found)
    assert torch.equal(again.codes, packed.codes) and torch.equal(again.scales, packed.scales)
    again.take(torch.full((ALL.stop,), 1e-34))
    assert form == "bf16" or not again.whole().any()


@pytest.mark.parametrize("form", PACKED)
def test_changes_smaller_than_a_code_add_up(form: str) -> None:
    one = Packed(torch.empty(BLOCK), form)
    one.take(torch.ones(BLOCK))
    whole = slice(0, BLOCK)
    for step in range(400):
        value = one.read(whole)
        value[1:] *= 0.9995  # a tenth of a code of either form
        one.write(whole, value, generator_of(CPU, step, 0, 0))
    assert one.whole()[1:].mean() == pytest.approx(0.9995**400, rel=0.02)
    value = one.whole()
    one.take(torch.cat([value[:1], 0.9995 * value[1:]]))
    assert torch.equal(one.whole(), value), "to the nearest code they would not"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", BITS)
def test_moments_take_what_is_estimated_and_move_weights_alike(form: str, optimizer: str) -> None:
    spec, exact = inner("fp32", optimizer)
    _, one = inner(form, optimizer)
    start = {name: weight.detach().clone() for name, weight in one.weights.items()}
    for some in (exact, one):
        stepped(some, 12)
    kept = [value for part in one._parts for of in part.state.values() for value in of.values()]
    taken = sum(
        value.codes.nbytes + value.scales.nbytes if isinstance(value, Packed) else value.nbytes
        for value in kept
    )
    # Counters of steps and the last block of a small tensor come on top.
    assert taken == pytest.approx(memory.moments_bytes(spec, form), rel=0.03)
    for name, weight in exact.weights.items():
        way = (weight - start[name]).norm()
        assert (one.weights[name] - weight).norm() < 0.1 * way, name
    exact_moments = exact.moments()
    assert all(value.dtype == torch.float32 for value in one.moments().values())
    assert {name: value.shape for name, value in one.moments().items()} == {
        name: value.shape for name, value in exact_moments.items()
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", PACKED)
def test_a_step_that_is_skipped_changes_no_code(form: str, optimizer: str) -> None:
    _, one = inner(form, optimizer)
    stepped(one, 2, torch.tensor(False))
    kept, weights = one.moments(), [weight.detach().clone() for weight in one.weights.values()]
    stepped(one, 2, torch.tensor(True))
    assert all(torch.equal(value, kept[name]) for name, value in one.moments().items())
    assert all(map(torch.equal, one.weights.values(), weights))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", PACKED)
def test_a_slice_at_a_time_is_packed(
    form: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "SLICE", 2 * BLOCK)
    sizes = []
    write = Packed.write
    monkeypatch.setattr(
        Packed, "write", lambda self, *more: sizes.append(len(more[1])) or write(self, *more)
    )
    _, one = inner(form, optimizer)
    stepped(one, 3)
    assert max(sizes) == 2 * BLOCK
    assert int(one.moments()["embedding.weight.step"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", PACKED)
def test_a_node_goes_on_to_the_bit_and_with_another_choice(
    tmp_path: Path, form: str, optimizer: str
) -> None:
    more = MORE.format(optimizer)
    with driven(tmp_path, "a", more=more, moments=form) as (one,):
        one.steps(5)
        one.ask(Save())
        one.steps(3)
        with driven(tmp_path, "a", more=more, moments=form) as (again,):
            assert again.built.resumed == 5
            again.steps(3)
            assert image(again) == image(one)
        with driven(tmp_path, "a", more=more) as (exact,):
            assert exact.built.resumed == 5
            exact.steps(1)
        # Joiners get fp32 of any form, and keep their own.
        with driven(tmp_path, "b", more=more, moments="fp32") as (joiner,):
            joiner.steps(1)
            snapshot = transfer.StateSnapshot(one.replica)
            transfer.adopt(joiner.replica, snapshot.manifest([]), snapshot.piece)
            theirs, ours = joiner.replica.optimizer.moments(), one.replica.optimizer.moments()
            assert all(torch.equal(theirs[name], value) for name, value in ours.items())
            transfer.adopt(one.replica, snapshot.manifest([]), snapshot.piece)
            again_ours = one.replica.optimizer.moments()
            assert all(torch.equal(again_ours[name], value) for name, value in ours.items())
