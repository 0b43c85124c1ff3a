"""A ``config.json`` of a stranger as settings of a run.

A key that changes the computation of a model must be one that a run can have, or the file is
refused. Keys of our own models are settings, or have the one value that our model has; those that
transformers does not read for the type are left out, and named.

For a model of the library its own class reads the keys, with their older names, and is compared
with the class that a run of these settings has: a difference is refused.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.transformer import PLAIN, ROPE, TYPES
from lowcomm_node.models.transformers import FULL, SLIDING, configuration, library
from lowcomm_protocol.spec.architectures import ARCHITECTURES, Architecture, Key, is_mixture
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import NO_MIXTURES, TransformerSettings, TransformersSettings
from lowcomm_protocol.spec.sections import ModelSettings, shown

CONTEXT = 1024
"""Tokens of a sequence in a new run, unless the model reads fewer: its creator may choose more."""
IDLE = frozenset(
    (
        *("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id"),
        *("initializer_range", "model_type", "pad_token_id", "torch_dtype"),
        *("transformers_version", "use_cache"),
    )
)
"""Keys of every file that do not change the computation."""
_SHOWN, _SHOWN_KEYS = 60, 20


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


def refuse_alarming(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for quantized weights and mixtures, which no family has."""
    quantized = config.get("quantization_config")
    if quantized:
        remedy = "its weights are quantized: name the folder of the original ones"
        raise wrong(source, "quantization_config", quantized, remedy)
    for key, value in config.items():
        if is_mixture(key) and value:
            raise wrong(source, key, value, NO_MIXTURES)


def left_out(config: Mapping[str, object], known: Set[str]) -> tuple[str, ...]:
    """The first unknown keys of a file, sorted, short."""
    return tuple(key[:_SHOWN] for key in sorted(config.keys() - known - IDLE)[:_SHOWN_KEYS])


def equal(value: object, other: object) -> bool:
    """Whether two values of JSON are equal: ``true`` is no number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def wrong(source: str, key: str, value: object, remedy: str) -> ConfigError:
    """The error for a key."""
    return ConfigError(f"{source}: {key[:_SHOWN]} = {shown(value, _SHOWN)}: {remedy}.")


KINDS = {**TYPES, "mistral": TYPES["llama"]}
"""Values of ``model_type`` that our own transformer has."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""Values that transformers takes where a key is missing."""
_NEEDED = ("vocab", "width", "feed_forward", "layers", "heads")
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
}
_OTHERS = (
    *("max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "rope_theta", "rope_scaling", "rope_parameters"),
    *("attention_dropout", "pretraining_tp"),  # of its training, which no run repeats
)


def read_config(config: Mapping[str, Any], source: str) -> Read:
    """The settings of our own transformer. Raises ConfigError, which names ``source``."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise wrong(source, "model_type", kind, f"known are {', '.join(sorted(KINDS))}")
    refuse_alarming(config, source)
    for key, value in config.items():
        if key in _FIXED and value is not None and not equal(value, _FIXED[key]):
            raise wrong(source, key, value, f"only {_FIXED[key]!r} is there: choose another model")
    given = {key: value for key, value in config.items() if value is not None}
    given = _DEFAULTS.get(kind, {}) | given
    longest = _longest(given, kind, source)
    values = {ours: given[theirs] for ours, theirs in PLAIN.items() if theirs in given}
    for ours in _NEEDED:
        if ours not in values:
            raise ConfigError(f"{source}: {PLAIN[ours]} is missing: the file is not whole.")
    values |= KINDS[kind] | _rope(given, source) | {"context": min(CONTEXT, longest)}
    try:
        settings = TransformerSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = expected_in_words(first)
        if not first["loc"]:  # settings that do not work together
            raise ConfigError(f"{source}: {message}.") from None
        ours = str(first["loc"][0])
        theirs = (PLAIN | ROPE | {"rope_base": "rope_theta"}).get(ours, ours)
        raise wrong(source, theirs, first["input"], message) from None
    return Read(settings, longest, left_out(config, {*PLAIN.values(), *_FIXED, *_OTHERS}))


def _longest(given: Mapping[str, Any], kind: str, source: str) -> int:
    layers: object = given.get("layer_types", [])
    known = ("full_attention", "sliding_attention")
    if not isinstance(layers, list) or any(one not in known for one in layers):
        remedy = "only full and sliding attention are known: choose another model"
        raise wrong(source, "layer_types", layers, remedy)
    slides = kind == "mistral" or equal(given.get("use_sliding_window"), True)
    if layers:
        slides = "sliding_attention" in layers
    longest = CONTEXT
    for key in ("max_position_embeddings", *(("sliding_window",) if slides else ())):
        value = given.get(key, longest)
        if type(value) is not int or not 8 <= value <= 1 << 30:
            raise wrong(source, key, value, "a number of tokens, at least 8, is expected")
        longest = value if key != "sliding_window" else min(longest, value)
    return longest


def _rope(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """How positions turn. Release 5 has all of it in ``rope_parameters``, 4 in two other keys."""
    key = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    rope: Any = given.get(key, {})
    if not isinstance(rope, dict):
        raise wrong(source, key, rope, "a table is expected")
    base = rope.get("rope_theta", given.get("rope_theta", 10_000.0))
    if not equal(given.get("rope_theta", base), base):
        remedy = f"{key} says {shown(base, _SHOWN)}: make both equal"
        raise wrong(source, "rope_theta", given["rope_theta"], remedy)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise wrong(source, f"{key}.rope_type", kind, 'known are "default" and "llama3"')
    scaling = ROPE if kind == "llama3" else {}
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", *scaling.values()}):
        raise wrong(source, f"{key}.{name}", rope[name], "unknown: choose another model")
    for name in scaling.values():
        if name not in rope:
            raise ConfigError(f"{source}: {key}.{name} is missing: the file is not whole.")
    scaled = {ours: rope[theirs] for ours, theirs in scaling.items()}
    return {"rope_base": base, **scaled, **({"rope_scaling": kind} if scaling else {})}


_LAYERS = ("num_hidden_layers", "n_layer")
"""Names by which a type may count layers: the library makes lists as long as that."""
_COUNT = Key(int, None, 1, 512)
_LARGEST = 1 << 31
_OLDER = {
    *("partial_rotary_factor", "rope_local_base_freq", "rope_scaling", "rope_theta"),
    *("rotary_emb_base", "rotary_pct", "sliding_window_pattern"),
}
"""Names of earlier releases, which the classes of 5 still read."""
_IDLE = IDLE | {"is_decoder", "original_max_position_embeddings"}
"""Keys of the classes that change no logits: a rope that uses the last is refused by its type."""


def read_library_config(config: Mapping[str, Any], source: str) -> Read:
    """The settings of a model of the library. Raises ConfigError, which names ``source``."""
    type_ = config["model_type"]
    architecture = ARCHITECTURES[type_]
    refuse_alarming(config, source)
    _check_numbers(config, architecture, source)
    known = _known(type_)
    given = {name: config[name] for name in known & config.keys() - IDLE}
    try:
        theirs = library().AutoConfig.for_model(type_, **given).to_dict()
    except ConfigError:
        raise
    except Exception as error:  # whatever the library thinks of a stranger's values
        raise ConfigError(
            f"{source}: transformers can't read it ({str(error)[:200]}): load it anew."
        ) from None
    longest = theirs.get(architecture.context)
    if type(longest) is not int or longest < 8:
        raise wrong(source, architecture.context, longest, "a number of tokens is expected")
    # A table of positions is as long as it is; angles are computed for any.
    context = longest if architecture.learned_positions else min(CONTEXT, longest)
    values = {"vocab": theirs.get("vocab_size"), "config": _values(theirs, architecture)}
    try:
        settings = TransformersSettings.model_validate({"type": type_, "context": context} | values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{source}: {expected_in_words(first)[:300]}.") from None
    _compare(theirs, settings, source)
    return Read(cast("ModelSettings", settings), longest, left_out(config, known))


def _known(type_: str) -> frozenset[str]:
    """Keys that the library's class of a type reads, without those of every class."""
    class_ = library().CONFIG_MAPPING[type_]
    of_all = library().PreTrainedConfig().to_dict().keys()
    return frozenset(class_().to_dict().keys() - of_all | _OLDER | class_.attribute_map.keys())


def _check_numbers(config: Mapping[str, Any], architecture: Architecture, source: str) -> None:
    """Refuse sizes out of bounds, before the library allocates by them."""
    for name, value in config.items():
        key = _COUNT if name in _LAYERS else architecture.keys.get(name)
        problem = key.problem(value) if key is not None and value is not None else None
        if isinstance(value, int) and abs(value) >= _LARGEST:
            problem = problem or f"must be below {_LARGEST:,}"
        if problem:
            raise wrong(source, name, value, problem)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        parts = [rope, *rope.values()] if isinstance(rope, dict) else []
        for part in parts:
            if isinstance(part, dict):
                kind = part.get("rope_type", part.get("type", "default"))
                if kind != "default":
                    raise wrong(source, f"{name}.rope_type", kind, 'only "default" is known here')


def _values(theirs: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    rope = theirs.get("rope_parameters") or {}
    far, near = rope.get(FULL, rope), rope.get(SLIDING, rope)
    values = {**far, **theirs}
    if "rope_theta" in near:
        values["rope_local_base_freq"] = near["rope_theta"]
    return {name: values[name] for name in architecture.keys if values.get(name) is not None}


def _compare(theirs: Mapping[str, Any], settings: TransformersSettings, source: str) -> None:
    """Raise ConfigError where the model of a run would differ from that of the file."""
    arguments = configuration(settings)
    ours = library().AutoConfig.for_model(settings.type, **arguments).to_dict()
    free = _IDLE | {settings.architecture.context}
    for name in sorted(_known(settings.type) & ours.keys() - free):
        if "drop" in name or name.startswith("summary_"):
            continue
        mine, other = ours.get(name), theirs.get(name)
        if not equal(mine, other) and not (name == "sliding_window" and not (mine or other)):
            remedy = "remove it if it changes nothing, or choose another model"
            raise wrong(source, name, other, f"this model can't have that: {remedy}")
