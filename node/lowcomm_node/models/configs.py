"""A ``config.json`` of a stranger as settings of a run.

transformers' own class reads the keys, with their older names and its defaults, and reads those of
a model that a run of these settings has. A difference is refused: a key that changes the
computation must be one that a run can have. Keys that the class does not read are left out, and
named.
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.transformer import FAMILY, PLAIN, ROPE, TYPES
from lowcomm_node.models.transformers import FULL, SLIDING, configuration, library
from lowcomm_protocol.spec.architectures import ARCHITECTURES, Architecture, Key, is_mixture
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import NO_MIXTURES, TransformerSettings, TransformersSettings
from lowcomm_protocol.spec.sections import ModelSettings, shown

CONTEXT = 1024
"""Tokens of a sequence in a new run, unless the model reads fewer: its creator may choose more."""
KINDS = {**TYPES, "mistral": TYPES["llama"]}
"""Values of ``model_type`` that our own transformer has."""
IDLE = frozenset(
    (
        *("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id"),
        *("initializer_range", "is_decoder", "model_type", "original_max_position_embeddings"),
        *("pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache"),
    )
)
"""Keys that change no logits: a rope that uses one of them is refused by its type."""
_WINDOW = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
_OLDER = {
    *("partial_rotary_factor", "rope_local_base_freq", "rope_scaling", "rope_theta"),
    *("rotary_emb_base", "rotary_pct", "sliding_window_pattern"),
}
"""Names of earlier releases, which the classes of 5 still read."""
_LAYERS = ("num_hidden_layers", "n_layer")
"""Names by which a type may count layers: the library makes lists as long as that."""
_COUNT = Key(int, None, 1, 512)
_LARGEST = 1 << 31
_SHOWN, _SHOWN_KEYS = 60, 20
Settings = TypeVar("Settings", bound=ModelSettings)


@dataclass(frozen=True)
class Read:
    """Content of a ``config.json``."""

    settings: ModelSettings
    longest: int
    """Most tokens that the model reads: its positions, or a sliding window."""
    left_out: tuple[str, ...] = ()
    """Keys that transformers does not read for this type."""
    note: str = ""
    """A warning for the creator of a run."""


def read_config(config: Mapping[str, Any], source: str) -> Read:
    """Settings of one of our models, else of one that transformers computes.

    A model of ours whose context a sliding window would narrow is read as that of transformers.
    Raises ConfigError, which names ``source``.
    """
    type_ = config.get("model_type")
    if not isinstance(type_, str) or type_ not in ARCHITECTURES:
        reason = NO_MIXTURES if isinstance(type_, str) and is_mixture(type_) else "not known"
        known = ", ".join(sorted(ARCHITECTURES))
        raise wrong(source, "model_type", type_, f"{reason}: choose a model of {known}")
    _check(config, type_, source)
    known = _known(type_)
    given = {name: config[name] for name in known & config.keys() - IDLE}
    try:
        theirs = library().AutoConfig.for_model(type_, **given).to_dict()
    except ConfigError:
        raise
    except Exception as error:  # whatever the library thinks of a stranger's values
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{source}: transformers can't read it ({reason}): download it again."
        ) from None
    context = ARCHITECTURES[type_].context
    positions = theirs.get(context)
    if type(positions) is not int or positions < 8:
        raise wrong(source, context, positions, "a number of tokens, at least 8, is expected")
    left_out = tuple(key[:_SHOWN] for key in sorted(config.keys() - known - IDLE)[:_SHOWN_KEYS])
    if type_ not in KINDS:
        return Read(_of_library(theirs, type_, source), positions, left_out)
    longest, note = positions, ""
    if SLIDING in theirs.get("layer_types", [SLIDING]) and theirs.get("sliding_window") is not None:
        longest = min(longest, theirs["sliding_window"])
        if longest < 8:
            raise wrong(source, "sliding_window", longest, "at least 8 tokens are expected")
    if longest < min(CONTEXT, positions):
        why = f"layers look back {longest} tokens, which lowcomm's own transformer can't"
        with suppress(ConfigError):
            note = f'kind = "transformers", as {why}: `checkpoint export --format gguf` does not '
            note += "write it"
            return Read(_of_library(theirs, type_, source), positions, left_out, note)
        note = f"context = {longest}, as {why}; nor does transformers fit this model"
    return Read(_ours(theirs, type_, longest, source), longest, left_out, note)


def wrong(source: str, key: str, value: object, remedy: str) -> ConfigError:
    """The error for a key."""
    return ConfigError(f"{source}: {key[:_SHOWN]} = {shown(value, _SHOWN)}: {remedy}.")


def _check(config: Mapping[str, Any], type_: str, source: str) -> None:
    """Refuse what no family has, and sizes out of bounds, before the library allocates by them."""
    if quantized := config.get("quantization_config"):
        remedy = "its weights are quantized: name the folder of the original ones"
        raise wrong(source, "quantization_config", quantized, remedy)
    keys = ARCHITECTURES[type_].keys
    for name, value in config.items():
        if is_mixture(name) and value:
            raise wrong(source, name, value, NO_MIXTURES)
        key = _COUNT if name in _LAYERS else keys.get(name)
        problem = key.problem(value) if key is not None and value is not None else None
        if isinstance(value, int) and abs(value) >= _LARGEST:
            problem = problem or f"must be below {_LARGEST:,}"
        if problem:
            raise wrong(source, name, value, problem)
    known = ("default", "llama3") if type_ in KINDS else ("default",)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        by_layer = [rope.get(key, {}) for key in (FULL, SLIDING)] if isinstance(rope, dict) else []
        for part in (rope, *by_layer):
            if not isinstance(part, dict):
                raise wrong(source, name, part, "a table is expected")
            kind = part.get("rope_type", part.get("type", "default"))
            if kind not in known:
                raise wrong(source, f"{name}.rope_type", kind, f"known are {', '.join(known)}")


def _known(type_: str) -> frozenset[str]:
    """Keys that the library's class of a type reads, without those of every class."""
    class_ = library().CONFIG_MAPPING[type_]
    of_all = library().PreTrainedConfig().to_dict().keys()
    return frozenset(class_().to_dict().keys() - of_all | _OLDER | class_.attribute_map.keys())


def _ours(theirs: Mapping[str, Any], type_: str, longest: int, source: str) -> ModelSettings:
    """Settings of our own transformer."""
    values = {ours: theirs[key] for ours, key in PLAIN.items() if theirs.get(key) is not None}
    rope = theirs.get("rope_parameters") or {}
    values["rope_base"] = rope.get("rope_theta", 10_000.0)
    if rope.get("rope_type") == "llama3":
        values |= {ours: rope.get(key) for ours, key in ROPE.items()} | {"rope_scaling": "llama3"}
    values |= KINDS[type_] | {"context": min(CONTEXT, longest)}
    names = PLAIN | ROPE | {"rope_base": "rope_theta"}
    settings = _validated(TransformerSettings, values, source, names)
    form = FAMILY.huggingface(settings)
    assert form is not None
    arguments = {key: value for key, value in form.config.items() if key not in IDLE}
    layers = theirs.get("layer_types") or []
    free = _WINDOW if set(layers) <= {FULL, SLIDING} else _WINDOW - {"layer_types"}
    _compare(theirs, type_, arguments, free, source)
    return settings


def _of_library(theirs: Mapping[str, Any], type_: str, source: str) -> ModelSettings:
    """Settings of a model of the library."""
    architecture, longest = ARCHITECTURES[type_], theirs[ARCHITECTURES[type_].context]
    # A table of positions is as long as it is; angles are computed for any.
    context = longest if architecture.learned_positions else min(CONTEXT, longest)
    values = {"type": type_, "context": context, "vocab": theirs.get("vocab_size")}
    values["config"] = _values(theirs, architecture)
    settings = _validated(TransformersSettings, values, source, {})
    _compare(theirs, type_, configuration(settings), set(), source)
    return settings


def _validated(
    kind: type[Settings], values: Mapping[str, Any], source: str, names: Mapping[str, str]
) -> Settings:
    """Check settings; ``names``: keys of the file, by the settings that they give."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    message, ours = expected_in_words(first)[:300], str(next(iter(first["loc"]), ""))
    if ours not in names:
        raise ConfigError(f"{source}: {message}.")
    raise wrong(source, names[ours], first["input"], message)


def _values(theirs: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    rope = theirs.get("rope_parameters") or {}
    far, near = rope.get(FULL, rope), rope.get(SLIDING, rope)
    values = {**far, **theirs}
    if "rope_theta" in near:
        values["rope_local_base_freq"] = near["rope_theta"]
    return {name: values[name] for name in architecture.keys if values.get(name) is not None}


def _compare(
    theirs: Mapping[str, Any], type_: str, arguments: Mapping[str, Any], free: Set[str], source: str
) -> None:
    """Raise ConfigError where the model of a run would differ from that of the file."""
    ours = library().AutoConfig.for_model(type_, **arguments).to_dict()
    free = free | IDLE | {ARCHITECTURES[type_].context}
    for name in sorted(_known(type_) & ours.keys() - free):
        if "drop" in name or name.startswith("summary_"):
            continue
        mine, other = ours.get(name), theirs.get(name)
        is_equal = mine == other and isinstance(mine, bool) == isinstance(other, bool)
        if not is_equal and not (name == "sliding_window" and not (mine or other)):
            if isinstance(mine, dict) and isinstance(other, dict):
                key = next(key for key in {**mine, **other} if mine.get(key) != other.get(key))
                name, other = f"{name}.{key}", other.get(key)
            remedy = "remove it if it changes nothing, or choose another model"
            raise wrong(source, name, other, f"this model can't have that: {remedy}")
