"""``[model]`` of a run that trains a transformer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lowcomm_protocol.spec.settings import ModelSettings

Frequency = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]


class TransformerSettings(ModelSettings):
    """A decoder-only transformer; the defaults are the demo model of about 230,000 parameters.

    Its settings span Llama 2 and 3, Mistral, SmolLM2, Qwen 2, 2.5 and 3.
    """

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
