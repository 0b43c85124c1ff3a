"""What must hold for several processes of one replica, one for each GPU: they train, exchange and
are saved as one process is, and the death of any of them ends the trainer with its reason."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.adapters import sections, write_base
from helpers.driven_trainer import Driven, begin, driven, finish, image, write_documents
from helpers.families import section, tiny
from helpers.tiny import METHODS, MODEL, SYNCED
from helpers.waiting import until
from lowcomm_node.data.stream import IGNORED
from lowcomm_node.errors import ConfigError, TrainerError
from lowcomm_node.node.ipc import FailureKind, TrainerFailed
from lowcomm_node.node.messages import (
    Evaluate,
    Evaluated,
    Generate,
    InnerStepTaken,
    OuterStepApplied,
    Save,
)
from lowcomm_node.trainer import state
from lowcomm_node.trainer.ranks import Ranks, check_alike, windows_of
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformerSettings

TIED = MODEL.replace("forward = 32", "forward = 35") + "tied = true\n"
"""With rows that two, three and four processes can't share evenly."""
OURS = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 48, "context": 16}
WRITE = Generate(prompt="A ", tokens=8, temperature=0.0, seed=0)
pytestmark = pytest.mark.slow


def one_of(folder: Path, *peers: str, ranks: int = 1, method: str = "lowcomm", **more: Any) -> Any:
    """A trainer of so many processes."""
    run = SYNCED.format(optimizer=more.pop("optimizer", "adamw"), method=method)
    device = ",".join(["cpu"] * ranks)
    folder.mkdir(exist_ok=True)
    return driven(folder, *peers, more=run, model=TIED, device=device, **more)


def losses(one: Driven) -> list[float]:
    return [step.loss for step in one.events(InnerStepTaken) if step.loss is not None]


def copy(one: Driven) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    parts, meta = state.snapshot(one.replica)
    return {part: {name: x.clone() for name, x in of.items()} for part, of in parts.items()}, meta


def check_close(mine: Mapping[str, Mapping[str, Tensor]], other: Any) -> None:
    """All tensors are as good as equal, but for values whose gradient is rounding alone, such as
    those of a key's bias: AdamW moves them as far as others."""
    for part, tensors in mine.items():
        assert tensors.keys() == other[part].keys()
        near = [
            tensor.isclose(other[part][name], rtol=1e-4, atol=1e-6).flatten()
            for name, tensor in tensors.items()
        ]
        assert not near or torch.cat(near).float().mean() > 0.99, part


def check_one_process_or_several(
    folder: Path, ranks: int, method: str, optimizer: str, resumed: tuple[int, ...]
) -> None:
    how: Any = {"method": method, "optimizer": optimizer}
    with one_of(folder, "a", "b", **how) as (whole, partner):
        partner.steps(4)
        whole.steps(5)
        trained, evaluated = copy(whole), whole.ask(Evaluate())
        begins, merged = copy(partner), list[Any]()
        if method != "local":
            merged = [exchange(whole, partner), image(whole)]
            whole.steps(2)
        with one_of(folder / str(ranks), "a", ranks=ranks, **how) as (one,):
            assert one.replica.world.size == ranks
            one.steps(5)
            assert losses(one) == pytest.approx(losses(whole)[:5], abs=2e-6)
            assert one.ask(Evaluate()) == evaluated
            close = pytest.approx(whole.events(Evaluated)[0].loss, abs=2e-6)
            assert one.events(Evaluated)[0].loss == close
            check_close(copy(one)[0], trained[0])
            # From the very same weights all that follows is the same, to the bit.
            state.restore(one.replica, *trained)
            assert image(one) == image_of(*trained)
            assert one.ask(WRITE).text
            if method != "local":
                state.restore(partner.replica, *begins)
                assert [exchange(one, partner), image(one)] == merged
                one.steps(2)
                assert losses(one)[-2:] == pytest.approx(losses(whole)[-2:], abs=2e-6)
            one.ask(Save())
            saved = image(one)
    for other in resumed:
        with one_of(folder / str(ranks), "a", ranks=other, **how) as (again,):
            assert image(again) == saved


def exchange(one: Driven, other: Driven) -> tuple[str, str]:
    """A whole exchange of the second fragment; digests of the slow weights of both."""
    begin(one, other, 1)
    for here in (one, other):  # training goes on: the same to the bit, as a step is not
        replica = here.replica
        replica.load_weights({name: x * 1.01 for name, x in replica.all_weights().items()})
    numbers = finish(one, other, 1)
    for here, number in zip((one, other), numbers, strict=True):
        assert isinstance(here.answer(number), OuterStepApplied)
    return one.replica.slow_digest(1), other.replica.slow_digest(1)


def image_of(parts: Any, meta: dict[str, Any]) -> dict[str, Any]:
    tensors = {f"{part}/{name}": one for part, of in parts.items() for name, one in of.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()} | meta


@pytest.mark.parametrize(("method", "optimizer"), [("lowcomm", "muon")])
def test_three_processes_are_as_one(tmp_path: Path, method: str, optimizer: str) -> None:
    """One of them has no window of a batch of two."""
    check_one_process_or_several(tmp_path, 3, method, optimizer, resumed=(1,))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_method_is_the_same_on_several_processes(
    tmp_path: Path, ranks: int, method: str, optimizer: str
) -> None:
    check_one_process_or_several(tmp_path, ranks, method, optimizer, resumed=(1, 2, 3))


def test_an_adapter_is_whole_on_each_process_and_trains_as_on_one(tmp_path: Path) -> None:
    with adapter_of(tmp_path, "cpu") as (whole,):
        whole.steps(4)
        trained, generated = copy(whole), whole.ask(WRITE)
    with adapter_of(tmp_path / "two", "cpu,cpu") as (one,):
        one.steps(4)
        assert losses(one) == pytest.approx(losses(whole), abs=2e-6)
        check_close(copy(one)[0], trained[0])
        state.restore(one.replica, *trained)
        assert image(one) == image_of(*trained)
        assert one.ask(WRITE) == generated


def adapter_of(folder: Path, device: str) -> Any:
    base = folder / "start" / "model.safetensors"
    write_base(base.parent, TransformerSettings.model_validate(OURS))
    more = SYNCED.format(optimizer="adamw", method="lowcomm") + sections(base, rank=4)
    model = "\n".join(f"{name} = {value}" for name, value in OURS.items())
    return driven(folder, "a", more=more, model=model, device=device, start=(str(base),))


@pytest.mark.soak
def test_each_process_keeps_attention_within_documents(tmp_path: Path) -> None:
    more = "document_mask = true\n" + SYNCED.format(optimizer="adamw", method="lowcomm")
    with driven(write_documents(tmp_path / "one"), "a", more=more, device="cpu") as (whole,):
        whole.steps(2)
        assert whole.replica.model.separator is not None
    with driven(write_documents(tmp_path / "two"), "a", more=more, device="cpu,cpu") as (one,):
        one.steps(2)
        assert losses(one) == pytest.approx(losses(whole), abs=2e-6)


@pytest.mark.soak
@pytest.mark.parametrize("type_", ARCHITECTURES)
def test_every_type_of_model_trains_in_shards_as_it_does_whole(tmp_path: Path, type_: str) -> None:
    more = SYNCED.format(optimizer="muon", method="lowcomm")
    how: Any = {"more": more, "model": section(tiny(type_))}
    with driven(tmp_path, "a", device="cpu", **how) as (whole,):
        whole.steps(3)
        trained = copy(whole)
    (tmp_path / "two").mkdir()
    with driven(tmp_path / "two", "a", device="cpu,cpu", **how) as (one,):
        one.steps(3)
        assert losses(one) == pytest.approx(losses(whole), abs=5e-6)
        check_close(copy(one)[0], trained[0])


def test_a_process_that_dies_ends_the_step_and_is_named(tmp_path: Path) -> None:
    with one_of(tmp_path, "a", ranks=2) as (one,):
        one.steps(2)
        assert isinstance(one.replica.team, Ranks)
        (other,) = one.replica.team._followers
        os.kill(other.process.pid, signal.SIGKILL)
        until(lambda: one.events(TrainerFailed), 30, "its end was seen while nothing is asked")
        (failed,) = one.events(TrainerFailed)
        assert failed.kind == FailureKind.DIED
        assert failed.reason == "cpu (rank 1) failed: its process was killed (signal 9)."
        with pytest.raises(TrainerError, match="process was killed"):
            one.steps(1)


def test_a_device_that_can_not_be_used_is_left_out_until_it_can(tmp_path: Path) -> None:
    with driven(tmp_path, "a", device="cpu,cuda:7,cpu") as (one,):
        ranks = one.replica.team
        assert isinstance(ranks, Ranks)
        assert ranks.size == 2
        assert one.built.lost == ranks.lost and one.built.device == "cpu,cpu (rank 1)"
        (first, second), (other,) = one.built.devices, ranks._followers
        assert (first.pid, second.pid) == (os.getpid(), other.process.pid)
        assert all(each.seconds and each.gpu == "" for each in (first, second))
        assert "cuda:7" in ranks.lost["cuda:7"], "the reason names what is here"
        one.steps(1)
        assert ranks.returned() == "", "it is not tried at once"
        ranks._next_try = 0.0
        assert ranks.returned() == ""
        assert ranks._tries, "it is tried"
        until(lambda: ranks.returned() == "" and not ranks._tries, 60, "it can't be used yet")
        ranks.lost["cpu"] = ranks.lost.pop("cuda:7")
        ranks._next_try = 0.0
        until(lambda: ranks.returned() == "cpu", 60, "it can be used again")


@pytest.mark.parametrize("names", ["cuda:0,cpu", "cuda:0,xpu:0", "cuda:1,cuda:1"])
def test_devices_that_can_not_train_together_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        check_alike(names.split(","))


def test_devices_of_one_kind_train_together() -> None:
    check_alike(["cuda:0", "cuda:1"])
    check_alike(["cpu", "cpu"])


@pytest.mark.parametrize(("batch", "size"), [(5, 2), (2, 3), (4, 2), (1, 4)])
def test_all_processes_get_as_many_windows_and_all_windows_are_learned_once(
    batch: int, size: int
) -> None:
    tokens = torch.arange(3 * batch).view(batch, 3)
    parts = [windows_of((tokens, tokens + 1), rank, size) for rank in range(size)]
    assert {len(mine) for mine, _ in parts} == {-(-batch // size)}
    targets = torch.cat([targets for _, targets in parts]).flatten().tolist()
    learned = sorted(target for target in targets if target != IGNORED)
    assert learned == list(range(1, 3 * batch + 1))
