"""Folders as they lie on the Hub are read as what transformers reads of them, or refused with the
reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.hub_configs import READ, REFUSED, TUNED
from lowcomm_node.cli.creator import open_weights
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import family_of
from lowcomm_node.models.open_weights import load_weights, settings_of

pytestmark = pytest.mark.slow

TOKENS = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(0))


def config_in(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", READ.values(), ids=READ)
def test_published_configs_are_read(config: dict[str, Any], tmp_path: Path) -> None:
    read = settings_of(config_in(tmp_path, config))
    assert read.settings.vocab == 96
    assert len(READ) >= 40


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_no_run_can_have_is_refused_with_the_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_of(config_in(tmp_path, config))


def test_keys_that_change_nothing_are_named(tmp_path: Path) -> None:
    read = settings_of(config_in(tmp_path, READ["a fine-tuned Qwen2.5"]))
    assert {*TUNED} - {"_name_or_path"} <= {*read.left_out}


ONE_OF_EACH = {config["model_type"]: name for name, config in READ.items()}
"""The last published model of each type, by the type."""


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("config", [READ[name] for name in ONE_OF_EACH.values()], ids=ONE_OF_EACH)
def test_a_published_folder_computes_what_transformers_computes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(library_config(config), dtype=torch.float32)
    for parameter in built.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    built.save_pretrained(tmp_path)
    config_in(tmp_path, config)
    how = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    opened = open_weights(tmp_path)
    assert not settings_of(tmp_path).left_out or "left out" in opened.warnings[0]
    ours = family_of(opened.model).blank(opened.model).eval()
    load_weights(ours, [tmp_path / file.name for file in opened.start.files])
    tokens = TOKENS[:, : opened.longest]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def library_config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    told = json.loads(json.dumps(config))  # the library writes into it
    for name in ("attn_implementation", "auto_map", "quantization_config"):
        told.pop(name, None)
    return AutoConfig.for_model(**told)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "pythia-160m", "Llama-2-7b", "Llama-3.2-1B"])
def test_weights_without_prefix_and_with_stored_masks_are_read(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = library_config(READ[name])
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    config_in(tmp_path, READ[name])
    file = tmp_path / "model.safetensors"
    prefix = f"{theirs.base_model_prefix}."
    stored = {key.removeprefix(prefix): value for key, value in load_file(file).items()}
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    inside = {"gpt2": "h.0.attn.", "pythia-160m": "layers.0.attention."}.get(name)
    if inside is not None:
        stored |= {f"{inside}bias": mask, f"{inside}masked_bias": torch.tensor(-1e9)}
    stored |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(stored, file, {"format": "pt"})
    opened = open_weights(tmp_path)
    ours = family_of(opened.model).blank(opened.model).eval()
    load_weights(ours, [file])
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    save_file(stored | {"layers.0.lora_A.weight": mask.clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="lora_A"):
        open_weights(tmp_path)
