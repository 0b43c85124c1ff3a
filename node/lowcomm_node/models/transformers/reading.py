"""A ``config.json`` of a model that the library computes, as settings of a run.

The library's own class reads the keys that it knows, with their older names, and is compared with
the one that a run of these settings has: what differs changes the model, and is refused.
"""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.strange_config import (
    CONTEXT,
    IDLE,
    Read,
    equal,
    left_out,
    refuse_alarming,
    wrong,
)
from lowcomm_node.models.transformers.family import FULL, SLIDING, configuration, library
from lowcomm_protocol.spec.architectures import ARCHITECTURES, Architecture, Key
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.sections import ModelSettings

_LAYERS = ("num_hidden_layers", "n_layer")
"""Names by which a type may count layers: the library makes lists as long as that."""
_COUNT = Key(int, None, 1, 512)
_LARGEST = 1 << 31
_OLDER = {
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_pct",
    "sliding_window_pattern",
}
"""Names of earlier releases, which the classes of 5 still read."""
_IDLE = IDLE | {"is_decoder", "original_max_position_embeddings"}
"""Keys of the classes that change no logits: a rope that uses the last is refused by its type."""


def read_config(config: Mapping[str, Any], source: str) -> Read:
    """The settings of a model. Raises ConfigError, which names ``source``."""
    type_ = config["model_type"]
    architecture = ARCHITECTURES[type_]
    refuse_alarming(config, source)
    _check_numbers(config, architecture, source)
    known = _known(type_)
    theirs = _of_library(type_, {key: config[key] for key in known & config.keys()}, source)
    longest = theirs.get(architecture.context)
    if type(longest) is not int or longest < 8:
        raise wrong(source, architecture.context, longest, "a number of tokens is expected")
    # A table of positions is as long as it is; angles are computed for any.
    context = longest if architecture.learned_positions else min(CONTEXT, longest)
    try:
        settings = TransformersSettings.model_validate(
            {
                "type": type_,
                "vocab": theirs.get("vocab_size"),
                "context": context,
                "config": _values(theirs, architecture),
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{source}: {expected_in_words(first)[:300]}.") from None
    _compare(theirs, settings, source)
    return Read(cast("ModelSettings", settings), longest, left_out(config, known))


def _known(type_: str) -> frozenset[str]:
    """Keys that the library's class of a type reads, but for those of every class."""
    class_ = library().CONFIG_MAPPING[type_]
    of_all = library().PreTrainedConfig().to_dict().keys()
    return frozenset(class_().to_dict().keys() - of_all | _OLDER | class_.attribute_map.keys())


def _check_numbers(config: Mapping[str, Any], architecture: Architecture, source: str) -> None:
    """Before the library sees them."""
    for name, value in config.items():
        key = _COUNT if name in _LAYERS else architecture.keys.get(name)
        problem = key.problem(value) if key is not None and value is not None else None
        if isinstance(value, int) and abs(value) >= _LARGEST:
            problem = problem or f"must be below {_LARGEST:,}"
        if problem:
            raise wrong(source, name, value, problem)
    for name in ("rope_parameters", "rope_scaling"):
        told = config.get(name)
        rope = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            kind = one.get("rope_type", one.get("type", "default"))
            if kind != "default":
                raise wrong(source, f"{name}.rope_type", kind, 'only "default" is known here')


def _of_library(type_: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    given = {name: value for name, value in config.items() if name not in IDLE}
    try:
        return library().AutoConfig.for_model(type_, **given).to_dict()
    except ConfigError:
        raise
    except Exception as error:  # whatever the library thinks of a stranger's values
        raise ConfigError(
            f"{source}: transformers can't read it ({str(error)[:200]}): load it anew."
        ) from None


def _values(theirs: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    rope = theirs.get("rope_parameters") or {}
    far, near = rope.get(FULL, rope), rope.get(SLIDING, rope)
    found = {**far, **theirs}
    if "rope_theta" in near:
        found["rope_local_base_freq"] = near["rope_theta"]
    return {name: found[name] for name in architecture.keys if found.get(name) is not None}


def _compare(theirs: Mapping[str, Any], settings: TransformersSettings, source: str) -> None:
    """Raise ConfigError where the model of a run would differ from that of the file."""
    told = configuration(settings)
    ours = library().AutoConfig.for_model(settings.type, **told).to_dict()
    free = _IDLE | {settings.architecture.context}
    for name in sorted(_known(settings.type) & ours.keys() - free):
        if "drop" in name or name.startswith("summary_"):
            continue
        mine, other = ours.get(name), theirs.get(name)
        if not equal(mine, other) and not (name == "sliding_window" and not (mine or other)):
            raise wrong(
                source,
                name,
                other,
                "this model can't have that: remove it if it changes nothing, or choose another "
                "model",
            )
