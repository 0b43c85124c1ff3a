"""What every ``config.json`` of a stranger is judged by, whatever the family of its model."""

from collections.abc import Mapping
from dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.settings import ModelSettings

CONTEXT = 1024
"""Tokens of a sequence in a new run, unless the model reads fewer: its creator may choose more."""
IDLE = frozenset(
    {
        "_name_or_path",  # where it once lay: nobody opens it
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Keys that say nothing of what the model computes, beside its type."""
ALARMING = {
    "auto_map": "it names code of its own, which lowcomm never runs: choose a model that "
    "transformers knows without it",
    "quantization_config": "its weights are quantized: name the folder of the original ones",
}
_SHOWN = 60


@dataclass(frozen=True)
class Read:
    """What a ``config.json`` says."""

    settings: ModelSettings
    longest: int
    """Tokens that the model reads at most: its positions, or a sliding window, which would matter
    beyond that."""


def refuse_alarming(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for what no model of any family may say."""
    for key in config.keys() & ALARMING.keys():
        raise wrong(source, key, config[key], ALARMING[key])


def equal(value: object, wanted: object) -> bool:
    """Whether two values of JSON are equal: ``true`` is no number."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def wrong(source: str, key: str, value: object, remedy: str) -> ConfigError:
    """The error for a key."""
    return ConfigError(f"{source}: {key[:_SHOWN]} = {show(value)}: {remedy}.")


def show(value: object) -> str:
    """A value of a stranger, short, whatever it is: a huge number has no ``repr``."""
    plain = isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() < 256)
    if plain or value is None:
        return repr(value)[:_SHOWN]
    return f"({type(value).__name__})"
