"""What must hold for models of another library in a specification: listed types and keys, bounds,
and nothing that leads to a file or to code."""

import json
from typing import Any

import pytest

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.run import parse_toml

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def toml(type_: str = "llama", model: str = "", **config: Any) -> str:
    keys = "\n".join(f"{name} = {json.dumps(value)}" for name, value in config.items())
    return (
        f'[run]\nname = "a"\n[model]\nkind = "transformers"\ntype = "{type_}"\n{model}\n'
        f"[model.config]\n{keys}\n"
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"auto_map": {"AutoModel": "x--y.Z"}}, "auto_map is refused, because code and paths"),
        ({"_name_or_path": "/etc"}, "_name_or_path is refused"),
        ({"hiden_size": 3}, "unknown key 'hiden_size'; did you mean 'hidden_size'"),
        ({"quantization_config": {}}, "unknown key 'quantization_config'"),
        ({"num_local_experts": 8}, "num_local_experts: mixtures of experts can't be trained"),
        ({"vocab_size": 8}, r"vocab_size is vocab of \[model\]"),
        ({"max_position_embeddings": 8}, r"max_position_embeddings is context of \[model\]"),
        ({"hidden_size": 10**9}, r"hidden_size = 1000000000 must be from 8 to 65,536"),
        ({"hidden_size": True}, "must be a whole number"),
        ({"intermediate_size": "48"}, "must be a whole number"),
        ({"rms_norm_eps": "/dev/null"}, "must be a number"),
        ({"rope_theta": 1e300}, "must be from"),
        ({"attention_bias": 1}, "must be true or false"),
        ({"num_attention_heads": 5}, "must be a multiple of config.num_attention_heads = 5"),
        ({"head_dim": 7}, "7 channels of each head would be rotated"),
        (
            {"hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 512},
            "parameters, more than",
        ),
    ],
)
def test_a_configuration_that_is_not_on_the_list_is_refused(config: dict[str, Any], told: str):
    written = {**SIZES, **config}
    wrong = {name: value for name, value in written.items() if not isinstance(value, dict)}
    text = toml(**wrong)
    for name, value in written.items():
        if isinstance(value, dict):
            text += f"[model.config.{name}]\n" + "\n".join(f'{a} = "{b}"' for a, b in value.items())
    with pytest.raises(SpecError, match=told):
        parse_toml(text)


def test_a_number_that_is_none_is_refused():
    for value in ("nan", "inf"):
        with pytest.raises(SpecError, match="rope_theta"):
            parse_toml(toml(**SIZES) + f"rope_theta = {value}\n")


@pytest.mark.parametrize("type_", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"])
def test_mixtures_of_experts_are_refused_with_the_reason(type_: str):
    with pytest.raises(SpecError, match="mixtures of experts can't be trained: peers route"):
        parse_toml(toml(type_, **SIZES))


def test_parameters_of_known_models_are_counted():
    """Those that their publishers tell."""
    small = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    more = {"num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True}
    llama = ARCHITECTURES["llama"]
    assert llama.parameters({**small, **more}, 49_152, 2048) == 134_515_008
    gpt2 = ARCHITECTURES["gpt2"]
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12}
    assert gpt2.parameters(sizes, 50_257, 1024) == 124_439_808
    neox = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    pythia = ARCHITECTURES["gpt_neox"].parameters({**neox, "intermediate_size": 2048}, 50_304, 2048)
    assert pythia == 70_426_624
