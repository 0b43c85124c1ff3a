"""A ``config.json`` of transformers as settings of ours: the way back from ``huggingface.py``.

The file is a stranger's. Each of its keys is one that settings are read from, one that must have
the value that our model has, or one that transformers does not read for this type.
"""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.strange_config import (
    CONTEXT,
    Read,
    equal,
    left_out,
    refuse_alarming,
    show,
    wrong,
)
from lowcomm_node.models.transformer.family import PLAIN, ROPE, TYPES
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import TransformerSettings

KINDS = {**TYPES, "mistral": TYPES["llama"]}
"""Values of ``model_type`` that are read here."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes where a key is missing."""
_NEEDED = ("vocab", "width", "feed_forward", "layers", "heads")
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
}
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROPES = ("rope_theta", "rope_scaling", "rope_parameters")
_TRAINING = ("attention_dropout", "pretraining_tp")
"""How it was trained, which no run repeats."""


def read_config(config: Mapping[str, Any], source: str) -> Read:
    """The settings of a model of transformers. Raises ConfigError, which names ``source``."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise wrong(source, "model_type", kind, f"known are {', '.join(sorted(KINDS))}")
    refuse_alarming(config, source)
    for key, value in config.items():
        if key in _FIXED and value is not None and not equal(value, _FIXED[key]):
            raise wrong(source, key, value, f"only {_FIXED[key]!r} is there: choose another model")
    told = _DEFAULTS[kind] | {key: value for key, value in config.items() if value is not None}
    longest = _longest(told, kind, source)
    values: dict[str, Any] = {
        ours: told[theirs] for ours, theirs in PLAIN.items() if theirs in told
    }
    for ours in _NEEDED:
        if ours not in values:
            raise ConfigError(f"{source}: {PLAIN[ours]} is missing: the file is not whole.")
    values |= KINDS[kind] | _rope(told, source) | {"context": min(CONTEXT, longest)}
    known = {"max_position_embeddings", *PLAIN.values(), *_ROPES, *_WINDOWS, *_FIXED, *_TRAINING}
    try:
        settings = TransformerSettings.model_validate(values)
    except ValidationError as error:
        raise _explained(error, source) from None
    return Read(settings, longest, left_out(config, known))


def _longest(told: Mapping[str, Any], kind: str, source: str) -> int:
    longest = _count(told, "max_position_embeddings", source, CONTEXT)
    layers = told.get("layer_types", [])
    if not isinstance(layers, list) or any(
        one not in ("full_attention", "sliding_attention") for one in cast("list[object]", layers)
    ):
        raise wrong(
            source, "layer_types", layers, "only full and sliding attention are known: choose "
            "another model"
        )  # fmt: skip
    slides = kind == "mistral" or equal(told.get("use_sliding_window"), True)
    if layers:
        slides = "sliding_attention" in layers
    return min(longest, _count(told, "sliding_window", source, longest)) if slides else longest


def _count(told: Mapping[str, Any], key: str, source: str, missing: int) -> int:
    value = told.get(key, missing)
    if type(value) is not int or not 8 <= value <= 1 << 30:
        raise wrong(source, key, value, "a number of tokens, at least 8, is expected")
    return value


def _rope(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    """How positions turn. Release 5 has all of it in ``rope_parameters``, 4 in two other keys."""
    key = "rope_parameters" if "rope_parameters" in told else "rope_scaling"
    given = told.get(key, {})
    if not isinstance(given, dict):
        raise wrong(source, key, given, "a table is expected")
    rope = cast("dict[str, Any]", given)
    base = rope.get("rope_theta", told.get("rope_theta", 10_000.0))
    if not equal(told.get("rope_theta", base), base):
        raise wrong(
            source, "rope_theta", told["rope_theta"], f"{key} says {show(base)}: make both equal"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = {"rope_type", "type", "rope_theta"} | (
        set(ROPE.values()) if kind == "llama3" else set()
    )
    for name in rope:
        if kind in ("default", "llama3") and name not in names:
            raise wrong(source, f"{key}.{name}", rope[name], "unknown: choose another model")
    if kind == "default":
        return {"rope_base": base}
    if kind != "llama3":
        raise wrong(source, f"{key}.rope_type", kind, 'known are "default" and "llama3"')
    for name in ROPE.values():
        if name not in rope:
            raise ConfigError(f"{source}: {key}.{name} is missing: the file is not whole.")
    scaled = {ours: rope[theirs] for ours, theirs in ROPE.items()}
    return {"rope_base": base, "rope_scaling": "llama3", **scaled}


def _explained(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    message = expected_in_words(first)
    if not first["loc"]:  # settings that do not work together
        return ConfigError(f"{source}: {message}.")
    ours = str(first["loc"][0])
    theirs = (PLAIN | ROPE | {"rope_base": "rope_theta"}).get(ours, ours)
    return wrong(source, theirs, first["input"], message)
