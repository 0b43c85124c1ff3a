"""What must hold for a trainer on a GPU: it learns and exchanges as one on a processor, copies
beside its steps, and goes on from a checkpoint as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import merged_bits
from helpers.driven_trainer import Driven, begin, driven, finish
from lowcomm_node.node import messages
from lowcomm_node.node.messages import OuterStepApplied
from lowcomm_node.system.machine import can_compile
from lowcomm_node.trainer import state
from lowcomm_node.trainer.optimizer import BatchedMuon
from lowcomm_node.trainer.replica import Replica

pytestmark = pytest.mark.gpu


def held_out_loss(one: Driven) -> float:
    one.ask(messages.Evaluate())
    loss = one.events(messages.Evaluated)[-1].loss
    assert loss is not None
    return loss


SYNC = """optimizer = "{optimizer}"
warmup = 3
learning_rate = 0.003
[sync]
method = "{method}"
codec = "{codec}"
interval = 8
min_steps = 1
overlap = 0
"""


def settings(method: str = "noloco", codec: str = "fp32", optimizer: str = "adamw") -> str:
    """The rest of a run file, from the settings of training on."""
    return SYNC.format(method=method, codec=codec, optimizer=optimizer)


def exchange(one: Driven, other: Driven) -> None:
    """A whole exchange of the first fragment."""
    begin(one, other)
    for here, number in zip((one, other), finish(one, other), strict=True):
        assert isinstance(here.answer(number), OuterStepApplied), here.answer(number)


class OnGpu(Replica):
    """A replica of which the weights are on the GPU, whatever it is told."""

    def __init__(self, spec: Any, peer: str, text: Any, _: torch.device) -> None:
        super().__init__(spec, peer, text, torch.device("cuda"), compiled=False)


@pytest.mark.parametrize("name", list(merged_bits.CASES))
@pytest.mark.parametrize("merges_there", [True, False])
def test_exchanges_give_the_bits_of_a_processor(
    name: str, merges_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = merged_bits.digest(name)

    class Chosen(OnGpu):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert self.merges_there, "kernels compile here, and give the host's bits"
            self.merges_there = merges_there

    monkeypatch.setattr(merged_bits, "Replica", Chosen)
    monkeypatch.setattr(merged_bits, "train", _train_there)
    assert merged_bits.digest(name) == expected


def _train_there(replica: Replica, seed: int, on_host: Any = merged_bits.train) -> None:
    """The same steps: computed in host memory, put back on the GPU."""
    weights = replica.weights
    replica.weights = {name: torch.nn.Parameter(one.cpu()) for name, one in weights.items()}
    on_host(replica, seed)
    for name, one in replica.weights.items():
        weights[name].data.copy_(one.data)
    replica.weights = weights


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_trainers_on_one_device_learn_and_exchange(tmp_path: Path, optimizer: str) -> None:
    more = settings("noloco", "bf16", optimizer)
    with driven(tmp_path, "a", "b", more=more, device="cuda") as (one, other):
        for here in (one, other):
            assert here.replica.device.type == "cuda" and here.replica.merges_there
            parts = here.replica.optimizer._parts
            assert any(isinstance(part, BatchedMuon) for part in parts) == (optimizer == "muon")
        losses: list[float] = []
        for _ in range(4):
            for here in (one, other):
                here.steps(8)
            exchange(one, other)
            losses.append(held_out_loss(one))
        assert losses[-1] < losses[0] - 0.3, losses
        apart = one.replica.phi[0] - other.replica.phi[0]
        assert apart.norm() < 0.5 * one.replica.phi[0].norm()


def test_a_gpu_learns_what_a_processor_learns(tmp_path: Path) -> None:
    held_out: dict[str, float] = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        with driven(tmp_path / device, "a", more=settings(), device=device) as (one,):
            one.steps(60)
            held_out[device] = held_out_loss(one)
    assert abs(held_out["cuda"] - held_out["cpu"]) < 0.05 * held_out["cpu"], held_out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    more = settings(optimizer=optimizer)
    with driven(tmp_path, "a", "b", more=more, device="cuda") as (one, other):
        one.steps(6)
        other.steps(6)
        exchange(one, other)
        parts, meta = state.snapshot(one.replica)
        kept = {part: {name: x.clone() for name, x in of.items()} for part, of in parts.items()}
        (tmp_path / "again").mkdir()
        with driven(tmp_path / "again", "a", more=more, device="cuda") as (again,):
            state.restore(again.replica, kept, meta)
            for here in (one, again):
                here.steps(1)
            for name, weight in one.replica.weights.items():
                assert torch.equal(weight, again.replica.weights[name]), name
            for name, moment in one.replica.optimizer.moments().items():
                assert torch.equal(moment, again.replica.optimizer.moments()[name]), name


def test_copies_go_on_while_the_device_computes(device: torch.device) -> None:
    from lowcomm_node.trainer.gpu import Copies

    copies, numel = Copies(device), 1 << 25
    source, out = torch.arange(numel, dtype=torch.float32, device=device), torch.empty(numel)
    fragment = _whole(numel)
    busy = torch.randn(8192, 8192, device=device)
    landing = copies.snapshot(fragment, {"all": source})
    assert landing is not None
    source.zero_()  # queued behind the copy: the next inner step
    for _ in range(400):
        busy = busy @ busy / 90
    end = torch.cuda.Event()
    end.record()
    copies.to_host(landing, out)
    assert not end.query(), "the copy has not waited for the products"
    assert torch.equal(out, torch.arange(numel, dtype=torch.float32))
    back = copies.to_device(out, 2 * out)
    assert back is not None and not end.query()
    first, second = back.wait()
    assert torch.equal(first.cpu(), out) and torch.equal(second.cpu(), 2 * out)


def _whole(numel: int) -> Any:
    from lowcomm_protocol.plan import Fragment, Slice

    return Fragment(0, (Slice("all", 0, numel, numel),))


def test_without_memory_training_waits_and_exchanges_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowcomm_node.trainer.gpu import Copies

    monkeypatch.setattr(Copies, "room", lambda *_: None)
    with driven(tmp_path, "a", "b", more=settings(), device="cuda") as (one, other):
        for here in (one, other):
            here.steps(4)
        exchange(one, other)


def test_compiled_blocks_give_the_loss_of_plain_ones(tmp_path: Path) -> None:
    assert can_compile(), "Triton, a C compiler and Python's headers"
    with driven(tmp_path, "a", more=settings(), device="cuda") as (one,):
        model, tokens = one.replica.model, torch.arange(32, device="cuda").view(2, 16)
        assert model.blocks[0]._compiled_call_impl is not None  # type: ignore[index, union-attr]
        compiled = float(one.replica._loss_of(tokens, tokens))
        for block in model.blocks:  # type: ignore[union-attr]
            block._compiled_call_impl = None
        plain = float(one.replica._loss_of(tokens, tokens))
        assert abs(compiled - plain) < 0.02 * plain
        assert (tmp_path / "a").exists()
