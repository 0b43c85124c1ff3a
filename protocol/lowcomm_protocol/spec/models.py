"""Sections ``[model]`` of a run by kind: ``transformer`` is our own model, ``transformers`` one of
the library of that name (docs/specification.md).

A specification chooses from a list of types, of keys for each, and of bounds for each key
(architectures.py). It names no path and no repository, so nothing of it is ever looked up.
"""

from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lowcomm_protocol.spec.architectures import ARCHITECTURES, Architecture, Value, is_mixture
from lowcomm_protocol.spec.sections import ModelSettings, shown

MAX_PARAMETERS = 1 << 37
"""Values of all parameters: more than any peer could hold."""
NO_MIXTURES = (
    "mixtures of experts can't be trained: peers route their texts to other experts, so one would "
    "average weights that it has trained with weights that another has not"
)


class TransformersSettings(ModelSettings):
    """A model of the library ``transformers``: its type, and keys of its configuration."""

    kind: str = "transformers"
    type: str
    """``model_type`` of the library."""
    config: dict[str, Any]
    """Keys of the library's configuration of this type, with its own names."""
    layout: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of names and shapes of all tensors; empty: nobody checks it."""
    release: Annotated[str, Field(pattern=r"^([0-9]{1,4}(\.[0-9]{1,4}){1,3})?$")] = ""
    """Release of the library that the layout is of."""

    @property
    def architecture(self) -> Architecture:
        """What there is to know of the type."""
        return ARCHITECTURES[self.type]

    @property
    def layers(self) -> int:
        """Blocks, which a fragment holds as a whole."""
        return self.architecture.sizes(self.config).layers

    @property
    def values(self) -> dict[str, Value]:
        """All keys of the configuration, those that were left out by their defaults."""
        return self.architecture.filled(self.config)

    @property
    def parameters(self) -> int:
        """Values of all parameters, reckoned."""
        return self.architecture.parameters(self.config, self.vocab, self.context)

    @field_validator("type")
    @classmethod
    def _type_is_listed(cls, name: str) -> str:
        if name in ARCHITECTURES:
            return name
        if is_mixture(name):
            raise ValueError(f"{NO_MIXTURES}. There are {', '.join(ARCHITECTURES)}")
        near = get_close_matches(name[:80], ARCHITECTURES, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"not known{meant} There are {', '.join(ARCHITECTURES)}")

    @field_validator("config", mode="before")
    @classmethod
    def _keys_are_listed(cls, config: Any, told: ValidationInfo) -> Any:
        if not isinstance(config, dict) or "type" not in told.data:
            return cast("object", config)
        name = cast("str", told.data["type"])
        return _checked(cast("dict[object, object]", config), name, ARCHITECTURES[name])

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        size = self.architecture.sizes(self.config)
        names = self.architecture
        if size.heads % size.kv_heads:
            raise ValueError(
                f"config.{names.heads} = {size.heads} must be a multiple of "
                f"config.{names.kv_heads} = {size.kv_heads}, because each of these serves as many "
                "query heads"
            )
        if not self.config.get(names.head) and size.width % size.heads:
            raise ValueError(
                f"config.{names.width} = {size.width} must be a multiple of "
                f"config.{names.heads} = {size.heads}"
            )
        turned = int(size.head * float(self.values.get("partial_rotary_factor", 1.0)))
        if not names.learned_positions and (turned < 2 or turned % 2):
            raise ValueError(
                f"{turned} channels of each head would be rotated, which must be an even number: "
                f"change config.{names.width} or config.{names.heads}"
            )
        if self.parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the model has {self.parameters:,} parameters, more than {MAX_PARAMETERS:,}: "
                f"lower config.{names.width} or config.{names.layers}"
            )
        return self


def _checked(config: dict[object, object], name: str, type_: Architecture) -> dict[str, Value]:
    """The configuration, its numbers of the kind that their keys have. Raises ValueError."""
    keys = type_.keys
    found: dict[str, Value] = {}
    for key, value in config.items():
        if not isinstance(key, str) or key not in keys:
            raise ValueError(_unknown(str(key)[:80], name, type_))
        problem = keys[key].problem(value)
        if problem is not None:
            raise ValueError(f"{key} = {shown(value, 40)} {problem}")
        found[key] = float(cast("float", value)) if keys[key].kind is float else cast("int", value)
    missing = [key for key, one in keys.items() if one.default is None and key not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing: add it")
    return found


def _unknown(key: str, name: str, type_: Architecture) -> str:
    if is_mixture(key):
        return f"{key}: {NO_MIXTURES}"
    if key in ("auto_map", "trust_remote_code", "_name_or_path"):
        return f"{key} is refused, because code and paths of a model are never followed: remove it"
    if key in ("vocab_size", type_.context):
        return f"{key} is {'vocab' if key == 'vocab_size' else 'context'} of [model]: move it there"
    near = get_close_matches(key, type_.keys, 1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown key {key!r}{meant} {name} has {', '.join(type_.keys)}"


Frequency = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]


class TransformerSettings(ModelSettings):
    """A decoder-only transformer, as Llama, Mistral, SmolLM2 and Qwen 2 to 3; small by default."""

    layers: Annotated[int, Field(ge=1, le=512)] = 4
    width: Annotated[int, Field(ge=8, le=65_536)] = 64
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    kv_heads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Heads of keys and values, each shared by as many query heads; 0: as many as ``heads``."""
    head_width: Annotated[int, Field(ge=0, le=1024)] = 0
    """Channels of a head; 0: ``width / heads``."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    qk_norm: bool = True
    """Whether queries and keys are normed by head."""
    feed_forward: Annotated[int, Field(ge=8, le=262_144)] = 176
    tied: bool = False
    norm_epsilon: Annotated[float, Field(gt=0.0, le=1e-2, allow_inf_nan=False)] = 1e-6
    rope_base: Annotated[float, Field(gt=1.0, le=1e9, allow_inf_nan=False)] = 10_000.0
    rope_scaling: Literal["none", "llama3"] = "none"
    """How positions beyond a shorter context are reached; ``llama3`` slows the low frequencies."""
    rope_factor: Frequency = 8.0
    """By how much it slows them."""
    rope_low: Frequency = 1.0
    """Turns in ``rope_original`` tokens up to which a frequency counts as low."""
    rope_high: Frequency = 4.0
    """Turns from which on it counts as high, and stays."""
    rope_original: Annotated[int, Field(ge=8, le=1_048_576)] = 8192
    """Tokens of the shorter context."""

    @property
    def kv_heads_used(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_width_used(self) -> int:
        """Channels of a head."""
        return self.head_width or self.width // self.heads

    @property
    def parameters(self) -> int:
        """Values of all parameters."""
        head, width = self.head_width_used, self.width
        queries, keys = self.heads * head, self.kv_heads_used * head
        layer = 2 * width * (queries + keys) + 3 * width * self.feed_forward + 2 * width
        layer += (2 * head if self.qk_norm else 0) + (queries + 2 * keys if self.qkv_bias else 0)
        return self.layers * layer + width + (1 if self.tied else 2) * self.vocab * width

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if not self.head_width and self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 * heads = {2 * self.heads}, "
                "because rotary embedding turns pairs of channels in every head"
            )
        if self.head_width % 2:
            raise ValueError(
                f"head_width = {self.head_width} must be even, because rotary embedding turns "
                "pairs of channels in every head"
            )
        if self.heads % self.kv_heads_used:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}, because "
                "each of these serves as many query heads"
            )
        if self.rope_low >= self.rope_high:
            raise ValueError(
                f"rope_low = {self.rope_low} must be less than rope_high = {self.rope_high}"
            )
        return self
