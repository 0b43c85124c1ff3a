"""Rules for the ``config.json`` of a stranger, whatever the family of its model.

What changes the computation of a model must be what a run can have, or the file is refused. A key
that the class of its type in transformers does not read changes nothing: it is left out, and named.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.architectures import is_mixture
from lowcomm_protocol.spec.models import NO_MIXTURES
from lowcomm_protocol.spec.sections import ModelSettings

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
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of every file that say nothing of what the model computes, beside its type."""
_SHOWN, _SHOWN_KEYS = 60, 20


@dataclass(frozen=True)
class Read:
    """What a ``config.json`` says."""

    settings: ModelSettings
    longest: int
    """Tokens that the model reads at most: its positions, or a sliding window, which would matter
    beyond that."""
    left_out: tuple[str, ...] = ()
    """Keys that transformers does not read for this type."""
    note: str = ""
    """What the creator of a run should know of it."""


def refuse_alarming(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for what no model of any family may say."""
    if config.get("quantization_config"):
        raise wrong(
            source,
            "quantization_config",
            config["quantization_config"],
            "its weights are quantized: name the folder of the original ones",
        )
    for key, value in config.items():
        if is_mixture(key) and value:
            raise wrong(source, key, value, NO_MIXTURES)


def left_out(config: Mapping[str, object], known: Set[str]) -> tuple[str, ...]:
    """The keys of a file that are not known, sorted, short; the first few of them."""
    return tuple(key[:_SHOWN] for key in sorted(config.keys() - known - IDLE)[:_SHOWN_KEYS])


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
    return "(a list)" if isinstance(value, list) else "(an object)"
