"""``[model]`` of a run that trains a transformer."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from lowcomm_protocol.spec.settings import ModelSettings


class TransformerSettings(ModelSettings):
    """A decoder-only transformer; the defaults are the demo model of about 230,000 parameters."""

    layers: Annotated[int, Field(ge=1, le=512)] = 4
    width: Annotated[int, Field(ge=8, le=65_536)] = 64
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    feed_forward: Annotated[int, Field(ge=8, le=262_144)] = 176
    tied: bool = False
    rope_base: Annotated[float, Field(gt=1.0, le=1e9, allow_inf_nan=False)] = 10_000.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 * heads = {2 * self.heads}, "
                "because rotary embedding turns pairs of channels in every head"
            )
        return self
