"""Tiny models of every type of the library ``transformers`` that a run may choose."""

from typing import Any

import tomlkit

from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformersSettings


def tiny(type_: str, **more: Any) -> TransformersSettings:
    """Two layers of 32 channels; ``more``: further keys of its configuration."""
    one = ARCHITECTURES[type_]
    config = {one.width: 32, one.layers: 2, one.heads: 4, one.inner: 48}
    if one.kv_heads:
        config[one.kv_heads] = 2
    return TransformersSettings(type=type_, context=16, config=config | more)


def section(settings: TransformersSettings) -> str:
    """The section ``[model]`` of a run file, without its heading."""
    told = settings.model_dump()
    config = told.pop("config")
    return f"{tomlkit.dumps(told)}\n[model.config]\n{tomlkit.dumps(config)}"
