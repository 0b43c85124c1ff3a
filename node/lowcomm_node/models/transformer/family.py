"""The transformer as a family: how it is built, what it takes of memory, and the same model as
``transformers`` knows it: Qwen 3, Qwen 2 or Llama.

W is width, F feed_forward, V vocab; H query heads of Q channels in all, G heads of keys and values
of K channels in all. A layer keeps for the backward pass 6 W + 3 Q + 2 K + 4 F + H + 2 values a
token, and where queries and keys are normed 2 (Q + K) + H + G more (``test_memory.py`` counts
them): attention is torch's own, which keeps no matrix of context x context.

All those families turn channel pairs (i, i + width / 2) by the same angles. Qwen 3 norms queries
and keys by head, Qwen 2 has biases in their place, Llama neither; Mistral and SmolLM2 are Llamas.
So an export renames tensors and writes a configuration; no value changes.
"""

from collections import Counter
from typing import Any, cast

from lowcomm_node.models.base import Family, Footprint, HuggingFaceForm
from lowcomm_node.models.transformer.model import Transformer, build_transformer
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import ModelSettings

TYPES = {
    "qwen3": {"qk_norm": True, "qkv_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "llama": {"qk_norm": False, "qkv_bias": False},
}
"""What each ``model_type`` says of queries and keys."""
PLAIN = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "feed_forward": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Settings that are one key of ``config.json``. ``reading.py`` reads by the same tables."""
ROPE = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_original": "original_max_position_embeddings",
}
"""Those of ``rope_scaling = "llama3"``."""
FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
"""Keys that have one value in every model of ours."""
_CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
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

_NORMS = ("attention.query_norm", "attention.key_norm")
_BIASED = ("attention.query", "attention.key", "attention.value")


def huggingface_form(settings: TransformerSettings) -> HuggingFaceForm | None:
    """Configuration and names; a tied model has no ``lm_head``.

    None where queries and keys have both norms and biases, which no model there has.
    """
    shape = {"qk_norm": settings.qk_norm, "qkv_bias": settings.qkv_bias}
    kind = next((kind for kind, one in TYPES.items() if one == shape), None)
    if kind is None:
        return None
    names = dict(_OUTSIDE)
    if settings.tied:
        del names["head.weight"]
    for layer in range(settings.layers):
        names |= _names_of_block(settings, layer)
    return HuggingFaceForm(_config(settings, kind), names)


def _names_of_block(settings: TransformerSettings, layer: int) -> dict[str, str]:
    names: dict[str, str] = {}
    for ours, theirs in _IN_A_BLOCK.items():
        if ours in _NORMS and not settings.qk_norm:
            continue
        ends = ["weight", "bias"] if ours in _BIASED and settings.qkv_bias else ["weight"]
        for end in ends:
            names[f"blocks.{layer}.{ours}.{end}"] = f"model.layers.{layer}.{theirs}.{end}"
    return names


def _config(settings: TransformerSettings, kind: str) -> dict[str, Any]:
    rope = _rope(settings)
    told = settings.model_dump() | {
        "kv_heads": settings.kv_heads_used,
        "head_width": settings.head_width_used,
    }
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "max_position_embeddings": settings.context,
        **{theirs: told[ours] for ours, theirs in PLAIN.items()},
        **FIXED,
        # transformers 5 reads rope_parameters; 4 and most other programs read the other two.
        "rope_theta": settings.rope_base,
        "rope_scaling": rope if settings.rope_scaling != "none" else None,
        "rope_parameters": {**rope, "rope_theta": settings.rope_base},
        "use_cache": True,
    }


def _rope(settings: TransformerSettings) -> dict[str, Any]:
    if settings.rope_scaling == "none":
        return {"rope_type": "default"}
    told = settings.model_dump()
    return {"rope_type": "llama3", **{theirs: told[ours] for ours, theirs in ROPE.items()}}


class TransformerFamily(Family):
    def build(self, settings: ModelSettings, seed: int) -> Transformer:
        return build_transformer(cast("TransformerSettings", settings), seed)

    def blank(self, settings: ModelSettings) -> Transformer:
        return Transformer(cast("TransformerSettings", settings))

    def footprint(self, settings: ModelSettings) -> Footprint:
        model = cast("TransformerSettings", settings)
        width, inner, layers, vocab = model.width, model.feed_forward, model.layers, model.vocab
        head, heads, groups = model.head_width_used, model.heads, model.kv_heads_used
        queries, keys = heads * head, groups * head
        matrices: Counter[tuple[int, int]] = Counter()
        for shape, count in (
            ((queries, width), 1),
            ((keys, width), 2),
            ((width, queries), 1),
            ((inner, width), 2),
            ((width, inner), 1),
        ):
            matrices[shape] += count * layers
        tables = (1 if model.tied else 2) * vocab * width
        norms = width + layers * 2 * (width + (head if model.qk_norm else 0))
        biases = layers * (queries + 2 * keys) if model.qkv_bias else 0
        layer = 6 * width + 3 * queries + 2 * keys + 4 * inner + heads + 2
        if model.qk_norm:
            layer += 2 * (queries + keys) + heads + groups
        widest = 4 * width + 6 * queries + 4 * inner
        # Without gradients a block holds its input and that normed, and beside them in its second
        # half silu(gate), up and their product; in its first half queries, keys and values, turned
        # queries, and what turns keys.
        looking = 2 * width + max(3 * inner, 2 * queries + 4 * keys)
        return Footprint(
            matrices=matrices,
            others=tables + norms + biases,
            kept=layers * layer + 3 * width + 3,
            passing=widest,
            vocab=vocab,
            blocks=layers,
            in_block=layer,
            between=width,
            looking=looking,
        )

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        return huggingface_form(cast("TransformerSettings", settings))


FAMILY = TransformerFamily()
