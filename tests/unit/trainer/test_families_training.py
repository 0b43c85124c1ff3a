"""What must hold for every type of model of the library ``transformers``: it trains, exchanges,
goes on to the bit after a kill, and is exported as what the library opens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.driven_trainer import Driven, begin, driven, finish, image
from helpers.families import section, tiny
from lowcomm_node.export import ExportChoices, Format, Weights
from lowcomm_node.export.write import export_checkpoint
from lowcomm_node.models.base import build_model
from lowcomm_node.node.messages import InnerStepTaken, OuterStepApplied, RequestFailed, Save
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.run import sign_run
from lowcomm_protocol.spec.sections import ModelSettings

SYNC = """optimizer = "{optimizer}"
warmup = 3
[sync]
interval = 8
min_steps = 1
overlap = 0
fragments = 2
"""
pytestmark = pytest.mark.slow


def trainers(folder: Path, settings: ModelSettings, *peers: str, optimizer: str = "muon") -> Any:
    more = SYNC.format(optimizer=optimizer)
    return driven(folder, *peers, more=more, model=section(settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", ARCHITECTURES)
def test_it_trains_exchanges_resumes_to_the_bit_and_is_exported(tmp_path: Path, type_: str) -> None:
    with trainers(tmp_path, tiny(type_), "a", "b") as (one, other):
        for here in (one, other):
            here.steps(5)
        first, last = (one.events(InnerStepTaken)[place].loss for place in (0, -1))
        assert first is not None and last is not None and last < first
        mine = one.replica.fast(0).clone()
        begin(one, other)
        for here, number in zip((one, other), finish(one, other), strict=True):
            assert isinstance(here.answer(number), OuterStepApplied)
        assert not torch.equal(mine, one.replica.fast(0)), "the exchange moves weights"
        one.ask(Save())
        one.steps(2)
        # A kill: what another process finds is what lies on the disk.
        with trainers(tmp_path, tiny(type_), "a") as (again,):
            assert again.built.resumed == 5
            again.steps(2)
            assert image(again) == image(one)
            assert again.events(InnerStepTaken)[-1].loss == one.events(InnerStepTaken)[-1].loss
        check_export(one, tmp_path)


@torch.no_grad()
def check_export(one: Driven, folder: Path) -> None:
    """transformers opens what is exported of its newest checkpoint, and computes the same."""
    from transformers import AutoModelForCausalLM

    run = folder / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(folder / one.peer)
    signed = sign_run(one.replica.spec, Identity(bytes(32)))
    (run / "run.json").write_bytes(signed.to_bytes())
    choices = ExportChoices(Format.HF, weights=Weights.SLOW)
    assert export_checkpoint(run, folder / "out", choices).weights is Weights.SLOW
    theirs, told = AutoModelForCausalLM.from_pretrained(
        folder / "out", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    ours = build_model(one.replica.spec.model, 0)
    loaded = one.loop.store.load_newest_usable().checkpoint
    assert loaded is not None
    ours.load_state_dict(loaded.tensors["weights"], strict=False)
    parameters = dict(ours.named_parameters())
    for fragment, phi in zip(one.replica.plan.fragments, slow(loaded.tensors), strict=True):
        begin_ = 0
        for part in fragment.slices:
            rows = parameters[part.tensor][part.start : part.stop]
            rows.copy_(phi[begin_ : begin_ + part.numel].view(rows.shape))
            begin_ += part.numel
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert float((theirs(tokens).logits - ours(tokens)).abs().max()) < 1e-5


def slow(parts: dict[str, dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The slow weights of a checkpoint, by fragment."""
    outer = parts["outer"]
    return [outer[f"phi.{p}"] for p in range(sum(name.startswith("phi.") for name in outer))]


def test_a_trainer_tells_what_a_machine_lacks_before_it_allocates(tmp_path: Path) -> None:
    settings = tiny("llama").model_copy(update={"layout": "0" * 64, "release": "5.0.0"})
    refused = pytest.raises(AssertionError, match=r"pip install 'transformers==5\.0\.0'")
    with refused as failure, trainers(tmp_path, settings, "a"):
        pass
    assert RequestFailed.__name__ in str(failure.value)
