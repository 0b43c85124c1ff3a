"""A model's configuration as the library ``transformers`` takes it.

All keys of a type are passed, never the library's own defaults, which may change. No dropout: an
inner step must give the same bits after a restart.
"""

from typing import Any

from lowcomm_protocol.spec.architectures import Value
from lowcomm_protocol.spec.models import TransformersSettings

_ROTARY = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
"""Keys that the library takes together, as ``rope_parameters``."""
_WITHOUT_DROPOUT = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "phi3": ("attention_dropout", "embd_pdrop", "resid_pdrop"),
    "starcoder2": ("attention_dropout", "embedding_dropout", "residual_dropout"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
}
_FULL_EVERY = {"olmo3": 4, "gemma3_text": 6}
"""Every so many layers one looks back at the whole text."""
FULL, SLIDING = "full_attention", "sliding_attention"


def configuration(settings: TransformersSettings) -> dict[str, Any]:
    """Arguments of ``AutoConfig.for_model``, beside the type."""
    type_, values, sizes = (
        settings.architecture,
        settings.values,
        settings.architecture.sizes(settings.config),
    )
    told: dict[str, Any] = {name: one for name, one in values.items() if name not in _ROTARY}
    if type_.kv_heads:
        told[type_.kv_heads] = sizes.kv_heads
    if type_.head:
        told[type_.head] = sizes.head
    told[type_.inner] = values[type_.inner] or None
    if "sliding_window" in told:
        told["sliding_window"] = told["sliding_window"] or None
    if settings.type in _FULL_EVERY:
        told["layer_types"] = _layer_types(sizes.layers, _FULL_EVERY[settings.type])
    if "rope_theta" in values:
        told["rope_parameters"] = _rotary(settings.type, values)
    dropouts = _WITHOUT_DROPOUT.get(settings.type, ("attention_dropout",))
    return {
        **told,
        "vocab_size": settings.vocab,
        type_.context: settings.context,
        **dict.fromkeys(dropouts, 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _layer_types(layers: int, every: int) -> list[str]:
    return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


def _rotary(type_: str, values: dict[str, Value]) -> dict[str, Any]:
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    if "partial_rotary_factor" in values:
        plain["partial_rotary_factor"] = values["partial_rotary_factor"]
    if type_ not in _FULL_EVERY:
        return plain
    near = {**plain, "rope_theta": values.get("rope_local_base_freq", values["rope_theta"])}
    return {FULL: plain, SLIDING: near}
