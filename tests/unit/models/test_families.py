"""What must hold for models of the library ``transformers``: theirs to the bit, the same at every
peer, of the size that a specification tells, and refused where a release builds another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.families import kept_bytes, tiny
from lowcomm_node.cli.creator import open_weights
from lowcomm_node.errors import ConfigError
from lowcomm_node.models import transformers as families
from lowcomm_node.models.base import build_model, family_of, tensor_specs
from lowcomm_node.models.configs import KINDS, read_config
from lowcomm_node.models.open_weights import load_weights
from lowcomm_node.models.transformers import configuration
from lowcomm_node.planner.run_template import write_template
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.run import parse_toml

TOKENS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 0}),
    ("mistral", {"sliding_window": 8}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("olmo2", {"attention_bias": True}),
    ("smollm3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("gemma3_text", {"head_dim": 16, "attention_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("gpt_neox", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ("gpt2", {"n_inner": 0, "tie_word_embeddings": False}),
    ("nanochat", {"attention_bias": True}),
]
ALL = [(type_, {}) for type_ in ARCHITECTURES] + VARIANTS
pytestmark = pytest.mark.slow


@torch.no_grad()
@pytest.mark.parametrize(("type_", "more"), ALL)
def test_a_model_is_that_of_the_library(type_: str, more: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = tiny(type_, **more)
    ours = build_model(settings, 1)
    config = AutoConfig.for_model(type_, **configuration(settings))
    theirs = AutoModelForCausalLM.from_config(config)
    for name, one in ours.causal.named_parameters():
        one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    theirs.load_state_dict(ours.causal.state_dict())
    assert float(ours(TOKENS).abs().max()) > 0.1
    assert torch.equal(ours(TOKENS), theirs(TOKENS).logits)
    loss = torch.nn.functional.cross_entropy(ours(TOKENS).flatten(0, 1), TOKENS.flatten())
    torch.testing.assert_close(ours.loss(TOKENS, TOKENS), loss)
    parameters = sum(one.numel() for one in ours.parameters())
    footprint = family_of(settings).footprint(settings)
    assert settings.parameters == footprint.parameters == parameters
    blocks = [spec for spec in tensor_specs(ours) if spec.role == "block" and len(spec.shape) == 2]
    assert sum(spec.numel for spec in blocks) == footprint.in_matrices
    assert footprint.matrices.total() == len(blocks)
    assert {spec.layer for spec in blocks} == {0, 1}


@torch.no_grad()
@pytest.mark.parametrize(("type_", "more"), [*ALL, ("olmo3", {"sliding_window": 3})])
def test_a_document_is_read_as_if_it_stood_alone(type_: str, more: dict[str, Any]) -> None:
    model, end = build_model(tiny(type_, **more), 1), 255
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    window = TOKENS[:2].clamp(max=end - 1)
    window[0, [3, 4, 9]] = window[1, 6] = end
    before, model.separator = model(window), end
    after = model(window)
    for row, start, stop in ((0, 0, 4), (0, 4, 5), (0, 5, 10), (0, 10, 16), (1, 7, 16)):
        alone = model(window[row : row + 1, start:stop])[0]
        torch.testing.assert_close(after[row, start:stop], alone, rtol=1e-3, atol=1e-4)
        assert start == 0 or not torch.equal(before[row, start:stop], after[row, start:stop])
    losses = (
        model.loss(window, window),
        torch.nn.functional.cross_entropy(after.flatten(0, 1), window.flatten()),
    )
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("separator", [None, 255])
@pytest.mark.parametrize("type_", ARCHITECTURES)
def test_what_a_step_keeps_is_reckoned(type_: str, separator: int | None) -> None:
    settings = tiny(type_)
    model = build_model(settings, 0)
    model.separator = separator
    footprint = family_of(settings).footprint(settings)
    masks = settings.context * footprint.masks if separator is not None else 0
    reckoned = 4 * TOKENS.numel() * (footprint.kept + footprint.vocab + masks)
    assert 0.5 * reckoned < kept_bytes(model, TOKENS) <= reckoned


# Releases of the library


def test_another_layout_is_refused_with_the_release_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tiny("olmo2")
    layout = families.layout_of(families.bare_model(settings))
    told = {"layout": layout, "release": "5.23.0"}
    named = TransformersSettings.model_validate(settings.model_dump() | told)
    family_of(named).check(named)
    other = named.model_copy(update={"config": {**named.config, "attention_bias": True}})
    with pytest.raises(ConfigError, match=r"other tensors .* pip install 'transformers==5\.23\.0'"):
        family_of(other).check(other)
    with pytest.raises(ConfigError, match="other tensors"):
        build_model(other, 0)


def test_a_library_that_lacks_a_type_or_refuses_a_key_names_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = tiny("nanochat").model_copy(update={"release": "5.1"})
    real = families.library()

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("unexpected key")

    library = SimpleNamespace(
        __version__="5.0.1",
        CONFIG_MAPPING=real.CONFIG_MAPPING,
        AutoConfig=SimpleNamespace(for_model=refuse),
    )
    monkeypatch.setattr(families, "library", lambda: library)
    with pytest.raises(ConfigError, match=r"5\.0\.1 can't .*unexpected key.*transformers==5\.1"):
        family_of(settings).check(settings)
    library.CONFIG_MAPPING = {}
    with pytest.raises(ConfigError, match=r"knows no models of type 'nanochat': .*pip install"):
        family_of(settings).check(settings)


@pytest.mark.parametrize(
    ("type_", "more"),
    [one for one in ALL if one[0] not in KINDS],  # ours, read as such
)
def test_what_an_export_writes_is_read_as_the_same_model(type_: str, more: dict[str, Any]) -> None:
    settings = tiny(type_, **more)
    form = family_of(settings).huggingface(settings)
    assert form is not None
    read = read_config({**form.config, "eos_token_id": 5, "dtype": "bfloat16"}, "config.json")
    found = family_of(read.settings).huggingface(read.settings)
    assert found == form
    assert read.longest == settings.context


@torch.no_grad()
@pytest.mark.parametrize("type_", ["olmo2", "gemma3_text", "phi3", "gpt2"])
def test_a_run_begins_with_weights_that_the_library_has_saved(type_: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = tiny(type_)
    config = AutoConfig.for_model(type_, **configuration(settings))
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    opened = open_weights(tmp_path)
    given = {"model": opened.model.model_dump(), "start": opened.start.model_dump()}
    text = write_template({"run": {"name": "a"}, "sync": {"method": "lowcomm"}, **given})
    spec = parse_toml(text)
    assert spec.model == opened.model and spec.start.size > 0
    ours = family_of(spec.model).blank(spec.model).eval()
    load_weights(ours, [tmp_path / file.name for file in spec.start.files])
    assert torch.equal(ours(TOKENS), theirs(TOKENS).logits)
