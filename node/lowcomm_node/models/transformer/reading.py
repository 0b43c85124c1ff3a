"""A ``config.json`` of transformers as settings of ours: the way back from ``huggingface.py``.

The file is a stranger's. Each of its keys is one that settings are read from, one that must have
the value that our model has, or one that changes nothing; any other is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.transformer.huggingface import FIXED, PLAIN, ROPE, TYPES
from lowcomm_protocol.spec.transformer import TransformerSettings

CONTEXT = 1024
"""Tokens of a sequence in a new run, unless the model reads fewer: its creator may choose more."""
_TYPES = {**TYPES, "mistral": TYPES["llama"]}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes where a key is missing."""
_NEEDED = ("vocab", "width", "feed_forward", "layers", "heads")
_FIXED = FIXED | {
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
}
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROPES = ("rope_theta", "rope_scaling", "rope_parameters")
_IDLE = frozenset(
    {
        "_name_or_path",  # where it once lay: nobody opens it
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "pad_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Keys that say nothing of what the model computes."""
_ALARMING = {
    "auto_map": "it names code of its own, which lowcomm never runs: choose a model that "
    "transformers knows without it",
    "quantization_config": "its weights are quantized: name the folder of the original ones",
}
_SHOWN = 60


@dataclass(frozen=True)
class Read:
    """What a ``config.json`` says."""

    settings: TransformerSettings
    longest: int
    """Tokens that the model reads at most: its positions, or a sliding window, which would matter
    beyond that."""


def read_config(config: Mapping[str, Any], source: str) -> Read:
    """The settings of a model of transformers. Raises ConfigError, which names ``source``."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise _wrong(source, "model_type", kind, f"known are {', '.join(sorted(_TYPES))}")
    _check_keys(config, source)
    told = _DEFAULTS[kind] | {key: value for key, value in config.items() if value is not None}
    longest = _longest(told, kind, source)
    values: dict[str, Any] = {
        ours: told[theirs] for ours, theirs in PLAIN.items() if theirs in told
    }
    for ours in _NEEDED:
        if ours not in values:
            raise ConfigError(f"{source}: {PLAIN[ours]} is missing: the file is not whole.")
    values |= _TYPES[kind] | _rope(told, source) | {"context": min(CONTEXT, longest)}
    try:
        return Read(TransformerSettings.model_validate(values), longest)
    except ValidationError as error:
        raise _explained(error, source) from None


def _check_keys(config: Mapping[str, Any], source: str) -> None:
    known = {"model_type", "max_position_embeddings", *PLAIN.values(), *_ROPES, *_WINDOWS}
    for key, value in config.items():
        if key in _ALARMING:
            raise _wrong(source, key, value, _ALARMING[key])
        if key in _FIXED and not _equal(value, _FIXED[key]):
            raise _wrong(source, key, value, f"only {_FIXED[key]!r} is there: choose another model")
        if key not in known | _IDLE | _FIXED.keys():
            raise _wrong(
                source,
                key,
                value,
                "unknown, and may change what the model computes: remove it if it does not, or "
                "choose another model",
            )


def _longest(told: Mapping[str, Any], kind: str, source: str) -> int:
    longest = _count(told, "max_position_embeddings", source, CONTEXT)
    layers = told.get("layer_types", [])
    if not isinstance(layers, list) or any(
        one not in ("full_attention", "sliding_attention") for one in cast("list[object]", layers)
    ):
        raise _wrong(
            source, "layer_types", layers, "only full and sliding attention are known: choose "
            "another model"
        )  # fmt: skip
    slides = kind == "mistral" or _equal(told.get("use_sliding_window"), True)
    if layers:
        slides = "sliding_attention" in layers
    return min(longest, _count(told, "sliding_window", source, longest)) if slides else longest


def _count(told: Mapping[str, Any], key: str, source: str, missing: int) -> int:
    value = told.get(key, missing)
    if type(value) is not int or not 8 <= value <= 1 << 30:
        raise _wrong(source, key, value, "a number of tokens, at least 8, is expected")
    return value


def _rope(told: Mapping[str, Any], source: str) -> dict[str, Any]:
    """How positions turn. Release 5 has all of it in ``rope_parameters``, 4 in two other keys."""
    key = "rope_parameters" if "rope_parameters" in told else "rope_scaling"
    given = told.get(key, {})
    if not isinstance(given, dict):
        raise _wrong(source, key, given, "a table is expected")
    rope = cast("dict[str, Any]", given)
    base = rope.get("rope_theta", told.get("rope_theta", 10_000.0))
    if not _equal(told.get("rope_theta", base), base):
        raise _wrong(
            source, "rope_theta", told["rope_theta"], f"{key} says {_show(base)}: make both equal"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = {"rope_type", "type", "rope_theta"} | (
        set(ROPE.values()) if kind == "llama3" else set()
    )
    for name in rope:
        if kind in ("default", "llama3") and name not in names:
            raise _wrong(source, f"{key}.{name}", rope[name], "unknown: choose another model")
    if kind == "default":
        return {"rope_base": base}
    if kind != "llama3":
        raise _wrong(source, f"{key}.rope_type", kind, 'known are "default" and "llama3"')
    for name in ROPE.values():
        if name not in rope:
            raise ConfigError(f"{source}: {key}.{name} is missing: the file is not whole.")
    scaled = {ours: rope[theirs] for ours, theirs in ROPE.items()}
    return {"rope_base": base, "rope_scaling": "llama3", **scaled}


def _explained(error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # settings that do not work together
        return ConfigError(f"{source}: {message}.")
    ours = str(first["loc"][0])
    theirs = (PLAIN | ROPE | {"rope_base": "rope_theta"}).get(ours, ours)
    return _wrong(source, theirs, first["input"], message)


def _equal(value: object, wanted: object) -> bool:
    """Whether two values of JSON are equal: ``true`` is no number."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _wrong(source: str, key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{source}: {key[:_SHOWN]} = {_show(value)}: {remedy}.")


def _show(value: object) -> str:
    """A value of a stranger, short, whatever it is: a huge number has no ``repr``."""
    plain = isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() < 256)
    if plain or value is None:
        return repr(value)[:_SHOWN]
    return f"({type(value).__name__})"
