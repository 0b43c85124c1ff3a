"""A trainer begins with the weights that its run names, once: a checkpoint takes their place."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny import tiny_settings
from helpers.trainer_thread import TrainerThread
from lowcomm_node.errors import ConfigError, TrainerError
from lowcomm_node.fetch.files import pin
from lowcomm_node.models.base import build_model
from lowcomm_node.models.transformer import FAMILY
from lowcomm_node.node.messages import Save, TrainerSettings
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import parse_canonical
from lowcomm_protocol.spec.sections import StartSettings


@pytest.fixture
def begun(tmp_path: Path) -> TrainerSettings:
    """A run that begins with a file of other weights than its seed gives."""
    settings = tiny_settings(tmp_path, "checkpoints")
    spec = parse_canonical(settings.spec)
    assert isinstance(spec.model, TransformerSettings)
    form = FAMILY.huggingface(spec.model)
    assert form is not None
    file = tmp_path / "model.safetensors"
    model = build_model(spec.model, 77)
    save_file({form.names[n]: one.detach() for n, one in model.named_parameters()}, file)
    spec = spec.model_copy(update={"start": StartSettings(files=(pin(file),))})
    more = {"spec": spec.canonical().decode(), "start": (str(file),)}
    return settings.model_copy(update=more)


async def saved(settings: TrainerSettings, steps: int = 0) -> tuple[Path, int]:
    """The checkpoint of a trainer that has started, and its steps."""
    trainer = TrainerThread()
    try:
        await trainer.start(settings)
        checkpoint = await trainer.ask(Save())
    finally:
        await trainer.stop()
    return Path(checkpoint.path), checkpoint.steps


async def test_fast_and_slow_weights_are_those_of_the_file(begun: TrainerSettings) -> None:
    path, _ = await saved(begun)
    spec = parse_canonical(begun.spec)
    weights = load_file(path / "weights.safetensors")
    wanted = dict(build_model(spec.model, 77).named_parameters())
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], one.detach()) for name, one in wanted.items())
    outer = load_file(path / "outer.safetensors")
    slow = torch.cat([one for name, one in outer.items() if name.startswith("phi.")])
    flat = torch.cat([one.detach().flatten() for one in wanted.values()])
    assert torch.equal(slow.sort().values, flat.sort().values)


async def test_a_checkpoint_takes_their_place(begun: TrainerSettings, tmp_path: Path) -> None:
    path, _ = await saved(begun)
    (tmp_path / "model.safetensors").unlink()
    again, _ = await saved(begun.model_copy(update={"start": ()}))
    assert again == path


async def test_without_file_and_checkpoint_it_does_not_begin_with_random_ones(
    begun: TrainerSettings,
) -> None:
    with pytest.raises(TrainerError, match="are not here") as refused:
        await saved(begun.model_copy(update={"start": ()}))
    assert refused.value.exit_code == ConfigError.exit_code


async def test_weights_of_another_model_are_refused(begun: TrainerSettings) -> None:
    content = json.loads(begun.spec)
    content["model"]["feed_forward"] = 40
    spec = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with pytest.raises(TrainerError, match=r"mlp.gate_proj.weight is \[32, 32\].*\[40, 32\]"):
        await saved(begun.model_copy(update={"spec": spec}))
