"""Open weights come in as data alone: a model that we have is read and computes the same; any other
is refused, with the key, its value and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import build_model, family_of
from lowcomm_node.models.configs import Read, read_config
from lowcomm_node.models.open_weights import check_weights, files_of, load_weights
from lowcomm_node.models.open_weights import settings_of as read_folder
from lowcomm_node.models.transformer import FAMILY
from lowcomm_protocol.spec.models import TransformerSettings

SMALL = {"vocab": 64, "layers": 2, "width": 16, "heads": 4, "feed_forward": 40, "context": 16}


def settings_of(**other: Any) -> TransformerSettings:
    return TransformerSettings.model_validate(SMALL | other)


def config_of(**other: Any) -> dict[str, Any]:
    """A Llama's config.json."""
    form = FAMILY.huggingface(settings_of(qk_norm=False, kv_heads=2))
    assert form is not None
    return {**form.config, **other}


def folder_of(folder: Path, settings: TransformerSettings, seed: int = 1) -> Path:
    """A folder with random weights as transformers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    form = FAMILY.huggingface(settings)
    assert form is not None
    model = build_model(settings, seed)
    tensors = {form.names[name]: one.detach() for name, one in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(form.config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM2"])
def test_weights_of_transformers_compute_the_same_here(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    names = {"SmolLM2": "Llama"}
    config = getattr(transformers, f"{names.get(kind, kind)}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind == "SmolLM2",
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    files = files_of(tmp_path)
    assert len(files) > 1
    read = read_config(json.loads((tmp_path / "config.json").read_text()), "config.json")
    assert read.settings.context == 1024 <= read.longest
    assert check_weights(read.settings, files) == theirs.num_parameters()
    ours = family_of(read.settings).blank(read.settings).eval()
    load_weights(ours, files)
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "../llama"}, ("model_type", "'../llama'", "not known", "llama")),
        ({"model_type": "mixtral"}, ("model_type", "'mixtral'")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "original")),
        ({"num_experts": 8}, ("num_experts = 8", "mixtures of experts")),
        ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'", "choose another")),
        ({"attention_bias": True}, ("attention_bias = True",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor = 0.5",)),
        ({"hidden_size": 10**9}, ("hidden_size = 1000000000", "65,536")),
        ({"num_hidden_layers": 10**400}, ("num_hidden_layers", "512")),
        ({"vocab_size": "64"}, ("vocab_size", "'64'")),
        ({"hidden_size": None}, ("hidden_size", "None")),
        ({"num_key_value_heads": 3}, ("heads = 4", "kv_heads = 3")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps = nan",)),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("rope_parameters.rope_type = 'yarn'",)),
        ({"rope_parameters": {"rope_type": "llama3"}}, ("factor",)),
        ({"rope_parameters": 7}, ("rope_parameters = 7", "table")),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 2}, ("layer_types",)),
        ({"max_position_embeddings": 10**12}, ("max_position_embeddings = 1000000000000",)),
        ({"model_type": "mistral", "sliding_window": 0}, ("sliding_window = 0",)),
    ],
)
def test_what_is_not_ours_is_refused_by_key_value_and_remedy(
    changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(config_of(**changes), "config.json")
    for part in ("config.json", *parts):
        assert part in str(refused.value)


def read_as(folder: Path, **config: Any) -> Read:
    told = config_of(**config)
    told.pop("attention_bias"), told.pop("mlp_bias", None)  # only Llama has them
    (folder / "config.json").write_text(json.dumps(told))
    return read_folder(folder)


def test_a_model_whose_window_would_narrow_our_context_is_read_as_transformers_has_it(
    tmp_path: Path,
) -> None:
    mistral = {"model_type": "mistral", "max_position_embeddings": 4096}
    slid = read_as(tmp_path, **mistral, sliding_window=64)
    assert (slid.settings.kind, slid.settings.context) == ("transformers", 1024)
    assert 'kind = "transformers", as layers look back 64 tokens' in slid.note
    wide = read_as(tmp_path, **mistral, sliding_window=2048)
    assert (wide.settings.kind, wide.longest, wide.note) == ("transformer", 2048, "")
    qwen = {"model_type": "qwen2", "max_position_embeddings": 4096, "sliding_window": 64}
    ours = read_as(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1)
    assert (ours.settings.kind, ours.settings.context) == ("transformer", 64)
    assert "context = 64, as layers look back 64 tokens" in ours.note


def refusal(folder: Path, settings: TransformerSettings | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        check_weights(settings or settings_of(qk_norm=False), files_of(folder))
    return str(refused.value)


def test_weights_of_another_model_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, settings_of(qk_norm=False))
    assert "[64, 16] in the weights, [model] asks for [65, 16]" in refusal(
        folder, settings_of(qk_norm=False, vocab=65)
    )
    assert "layers.2.input_layernorm" in refusal(folder, settings_of(qk_norm=False, layers=3))
    assert "layers.1" in refusal(folder, settings_of(qk_norm=False, layers=1))
    tied = settings_of(qk_norm=False, tied=True)
    check_weights(tied, files_of(folder))  # a head that is stored all the same
    (folder / "model.safetensors").write_bytes(b"\x80\x04pickle")
    assert "no file of safetensors" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle, which can run code" in refusal(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "a.bin", "", 7])
def test_an_index_names_files_of_its_folder_alone(name: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )
    with pytest.raises(ConfigError, match="weight_map must name"):
        files_of(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    settings = settings_of(qk_norm=False)
    folder = folder_of(tmp_path, settings)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight holds NaN or infinity"):
        load_weights(build_model(settings, 0), files_of(folder))
