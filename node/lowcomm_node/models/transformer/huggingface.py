"""The transformer as `transformers` knows it: Qwen3, which is the same model under other names.

Qwen3 turns channel pairs (i, i + width / 2) by the same angles, norms queries and keys by head, and
has no biases. So an export renames tensors and writes a configuration; no value changes.
"""

from typing import Any

from lowcomm_node.models.base import HuggingFaceForm
from lowcomm_node.models.transformer.model import NORM_EPSILON
from lowcomm_protocol.spec.transformer import TransformerSettings

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_A_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def huggingface_form(settings: TransformerSettings) -> HuggingFaceForm:
    """Configuration and names; a tied model has no ``lm_head``."""
    names = dict(_OUTSIDE)
    if settings.tied:
        del names["head.weight"]
    for layer in range(settings.layers):
        for ours, theirs in _IN_A_BLOCK.items():
            names[f"blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return HuggingFaceForm(_config(settings), names)


def _config(settings: TransformerSettings) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": settings.vocab,
        "max_position_embeddings": settings.context,
        "hidden_size": settings.width,
        "intermediate_size": settings.feed_forward,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.width // settings.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": NORM_EPSILON,
        # transformers 5 reads rope_parameters, 4 and most other programs read rope_theta.
        "rope_theta": settings.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_base},
        "tie_word_embeddings": settings.tied,
        "use_cache": True,
    }
