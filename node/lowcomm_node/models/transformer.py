"""Our own transformer, decoder-only, from 230,000 parameters to several billion.

    tokens -> embedding -> layers x (attention, SwiGLU) -> norm -> head -> logits

Each half of a block reads a normed copy of the residual stream and adds to it. RMSNorm
(1910.07467), rotary positions (2104.09864), normed queries and keys (2302.05442), SwiGLU
(2002.05202), grouped queries (2305.13245), no dropout.

``transformers`` knows the same model under other names. Qwen 3 norms queries and keys by head, Qwen
2 has biases in their place, Llama neither; Mistral and SmolLM2 are Llamas. All turn channel pairs
(i, i + width / 2) by the same angles. So an export renames tensors and writes a configuration.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowcomm_node.models.base import (
    Cache,
    Family,
    Footprint,
    HuggingFaceForm,
    Model,
    Place,
    Stage,
    StagedModel,
    as_computed,
    fill_normal,
)
from lowcomm_node.models.cross_entropy import cross_entropy
from lowcomm_node.models.documents import Mask, attend, document_mask, document_starts
from lowcomm_protocol.plan import Role
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import ModelSettings

INIT_STD = 0.02
INTO_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_ROLES: dict[str, Role] = {"embedding": "embedding", "norm": "norm", "head": "head"}
"""What a tensor outside of the blocks is for, by the first part of its name."""


class KeyValueCache:
    """Keys and values of at most ``context`` tokens of one text."""

    def __init__(self, settings: TransformerSettings, like: Tensor) -> None:
        heads, width = settings.kv_heads_used, settings.head_width_used
        shape = (settings.layers, 1, heads, settings.context, width)
        self.keys, self.values = like.new_empty(shape), like.new_empty(shape)
        self.length = 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[1, heads, new, head width]`` of one layer; those of the whole
        text."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Linear(nn.Module):
    """A matrix. Unlike torch's own it leaves the global random state alone."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Scale vectors to a root mean square of 1, then each channel by its weight, in fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon)
        return normed.type_as(x)


class Attention(nn.Module):
    """Causal self-attention; separate matrices, as Muon treats each as one."""

    def __init__(self, settings: TransformerSettings, layer: int) -> None:
        super().__init__()
        width, head = settings.width, settings.head_width_used
        queries, keys = settings.heads * head, settings.kv_heads_used * head
        bias, epsilon, normed = settings.qkv_bias, settings.norm_epsilon, settings.qk_norm
        self.layer, self.head_width, self.is_grouped = layer, head, keys < queries
        self.query = Linear(width, queries, bias=bias)
        self.key = Linear(width, keys, bias=bias)
        self.value = Linear(width, keys, bias=bias)
        self.output = Linear(queries, width)
        self.query_norm = RMSNorm(head, epsilon) if normed else None
        self.key_norm = RMSNorm(head, epsilon) if normed else None

    def forward(
        self, x: Tensor, rope: Tensor, cache: KeyValueCache | None, documents: Mask
    ) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, rope), rotate(key, rope)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        past = key.shape[2] - length
        # torch's own causal mask starts at the first key, so several tokens after a cached text
        # need theirs.
        mask, causal = None, length > 1 and not past
        if past and length > 1:
            mask = x.new_ones(length, past + length, dtype=torch.bool).tril(past)
        if documents is not None:
            mixed = attend(query, key, value, documents, self.is_grouped)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=causal, enable_gqa=self.is_grouped
            )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.gate = Linear(settings.width, settings.feed_forward)
        self.up = Linear(settings.width, settings.feed_forward)
        self.down = Linear(settings.feed_forward, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, settings: TransformerSettings, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(settings.width, settings.norm_epsilon)
        self.attention = Attention(settings, layer)
        self.feed_forward_norm = RMSNorm(settings.width, settings.norm_epsilon)
        self.feed_forward = FeedForward(settings)

    def forward(
        self, x: Tensor, rope: Tensor, cache: KeyValueCache | None, documents: Mask = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache, documents)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(StagedModel):
    """The whole model; its weights are arbitrary until the family or a checkpoint sets them."""

    rope: Tensor

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(settings.vocab, settings.width), freeze=False
        )
        self.blocks = nn.ModuleList(Block(settings, layer) for layer in range(settings.layers))
        self.norm = RMSNorm(settings.width, settings.norm_epsilon)
        # A tied head is no module: one matrix under one name is stored, counted and sent once.
        self.head = None if settings.tied else Linear(settings.width, settings.vocab)
        self.register_buffer("rope", rope_table(settings), persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Raises ConfigError if the text exceeds the context."""
        return F.linear(self._states(tokens, cache), self._head_weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self._states(tokens, None), self._head_weight, targets)

    def keep(self, stage: Stage) -> None:
        for number in range(len(self.blocks)):
            if not stage.start <= number < stage.stop:
                self.blocks[number] = nn.Identity()
        if not stage.outside:
            for name in ("embedding", "norm", "head"):
                setattr(self, name, None)

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _states(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        """Input of the head, ``[batch, length, width]``."""
        cache = cast("KeyValueCache | None", cache)
        self.check_length(tokens.shape[1] + (cache.length if cache is not None else 0))
        x, starts = self.enter(tokens, cache)
        if self.elsewhere is not None:
            x = self.elsewhere(x, starts)
        return self.norm(x)

    def fill(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = math.sqrt(2 * len(self.blocks)) if name.endswith(INTO_RESIDUAL) else 1.0
                fill_normal(parameter, INIT_STD / deep, f"{seed}:{name}")
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith(".bias") else 1.0)

    def enter(
        self, tokens: Tensor, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        # Else the embedding, which autocast leaves in fp32, would keep the residual stream in it.
        x, starts = as_computed(self.embedding(tokens)), None
        if self.separator is not None and cache is None:
            starts = document_starts(tokens, self.separator)
        return self.through(x, starts, cache), starts

    def through(
        self, states: Tensor, starts: Tensor | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        x, start, mask = states, cache.length if cache is not None else 0, None
        end = start + x.shape[1]
        rope = self.rope[:, start:end]
        if starts is not None:
            mask = document_mask(starts, x.dtype, self.compiled and x.device.type != "cpu")
        for block in self.compiled_parts():
            # Compiled blocks are for training: a text that grows would be compiled at each length.
            step = block if cache is None else block.forward
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(
                    step, x, rope, None, mask, use_reentrant=False, preserve_rng_state=self.draws
                )
            else:
                x = step(x, rope, cache, mask)
        if cache is not None:
            cache.length = end
        return x

    def leave(self, states: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.norm(states), self._head_weight, targets)

    def new_cache(self) -> KeyValueCache | None:
        if self.elsewhere is not None:
            return None
        return KeyValueCache(cast("TransformerSettings", self.settings), self.embedding.weight)

    def compiled_parts(self) -> Iterable[nn.Module]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def place_of(self, name: str) -> Place:
        block = _BLOCK.match(name)
        return Place("block", int(block[1])) if block else Place(_ROLES[name.split(".")[0]])


def rope_table(settings: TransformerSettings) -> Tensor:
    """Cosines and sines ``[2, context, head width / 2]`` of the angles ``position * frequency``,
    fp32."""
    length, width = settings.context, settings.head_width_used
    if torch.get_default_device().type == "meta":  # whose arange would import the whole compiler
        return torch.empty(2, length, width // 2)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequencies(settings)
    return torch.stack((angle.cos(), angle.sin())).float()


def frequencies(settings: TransformerSettings) -> Tensor:
    """Angle of each channel pair from one position to the next, ``[head width / 2]``, fp64."""
    width = settings.head_width_used
    plain = settings.rope_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if settings.rope_scaling == "none":
        return plain
    # Llama 3.1: low frequencies are divided by a factor, high ones stay, a blend lies between.
    turns = settings.rope_original * plain / (2 * math.pi)
    share = (turns - settings.rope_low) / (settings.rope_high - settings.rope_low)
    kept = share.clamp(0.0, 1.0)
    return plain * (kept + (1.0 - kept) / settings.rope_factor)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn channel pairs ``(i, i + width / 2)`` of x ``[..., length, width]`` by the angles of
    their positions."""
    cosine, sine = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cosine - second * sine, second * cosine + first * sine), dim=-1
    ).type_as(x)


TYPES = {
    "qwen3": {"qk_norm": True, "qkv_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "llama": {"qk_norm": False, "qkv_bias": False},
}
"""Norms and biases of queries and keys by ``model_type``."""
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
"""Settings that are one key of ``config.json``."""
ROPE = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_original": "original_max_position_embeddings",
}
"""Keys of ``rope_scaling = "llama3"``."""
FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
"""Keys that have one value in every model of ours."""
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


class TransformerFamily(Family):
    """Builds transformers and estimates their memory.

    W is width, F feed_forward; H query heads of Q channels in all, keys and values of K channels in
    all, in G groups. A layer keeps 6 W + 3 Q + 2 K + 4 F + H + 2 values a token for the backward
    pass, and 2 (Q + K) + H + G more where queries and keys are normed: torch's attention keeps no
    matrix of context x context. ``test_memory.py`` counts them.
    """

    separates = True

    def can_stage(self, settings: ModelSettings) -> bool:
        return True

    def build(self, settings: ModelSettings, seed: int) -> Transformer:
        model = self.blank(settings)
        model.fill(seed)
        return model

    def blank(self, settings: ModelSettings) -> Transformer:
        return Transformer(cast("TransformerSettings", settings))

    def allocate(self, model: Model, device: torch.device) -> None:
        model.to_empty(device=device)
        ours = cast("Transformer", model)
        ours.rope = rope_table(cast("TransformerSettings", model.settings)).to(device)

    def footprint(self, settings: ModelSettings) -> Footprint:
        model = cast("TransformerSettings", settings)
        width, inner, layers, vocab = model.width, model.feed_forward, model.layers, model.vocab
        head, heads, groups = model.head_width_used, model.heads, model.kv_heads_used
        queries, keys = heads * head, groups * head
        of_a_layer = [(queries, width), (width, queries), (width, inner)]
        of_a_layer += 2 * [(keys, width), (inner, width)]
        matrices = Counter({shape: layers * n for shape, n in Counter(of_a_layer).items()})
        tables = (1 if model.tied else 2) * vocab * width
        norms = width + layers * 2 * (width + (head if model.qk_norm else 0))
        biases = layers * (queries + 2 * keys) if model.qkv_bias else 0
        layer = 6 * width + 3 * queries + 2 * keys + 4 * inner + heads + 2
        normed = 2 * width
        if model.qk_norm:
            layer += 2 * (queries + keys) + heads + groups
            normed += queries + keys
        return Footprint(
            matrices=matrices,
            others=tables + norms + biases,
            kept=layers * layer + 3 * width + 3,
            kept_for_matrices=layers * (2 * width + queries + inner),
            kept_for_norms=layers * normed + width,
            passing_for_matrices=4 * width + 6 * queries + 2 * inner,
            passing=4 * width + 6 * queries + 4 * inner,
            vocab=vocab,
            blocks=layers,
            in_block=layer,
            between=width,
            # Without gradients a block holds its input and that normed, and beside them in its
            # second half silu(gate), up and their product; in its first half queries, keys and
            # values, turned queries, and what turns keys.
            looking=2 * width + max(3 * inner, 2 * queries + 4 * keys),
        )

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        """None where queries and keys have both norms and biases, which no model there has."""
        ours = cast("TransformerSettings", settings)
        shape = {"qk_norm": ours.qk_norm, "qkv_bias": ours.qkv_bias}
        kind = next((kind for kind, one in TYPES.items() if one == shape), None)
        if kind is None:
            return None
        names = dict(_OUTSIDE)
        if ours.tied:
            del names["head.weight"]
        for layer in range(ours.layers):
            for mine, theirs in _IN_A_BLOCK.items():
                if mine in _NORMS and not ours.qk_norm:
                    continue
                for end in ("weight", "bias") if mine in _BIASED and ours.qkv_bias else ("weight",):
                    names[f"blocks.{layer}.{mine}.{end}"] = f"model.layers.{layer}.{theirs}.{end}"
        values = ours.model_dump()
        values |= {"kv_heads": ours.kv_heads_used, "head_width": ours.head_width_used}
        rope: dict[str, Any] = {"rope_type": "default"}
        if scaled := ours.rope_scaling != "none":
            rope = {theirs: values[mine] for mine, theirs in ROPE.items()} | {"rope_type": "llama3"}
        config = {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            "max_position_embeddings": ours.context,
            **{theirs: values[mine] for mine, theirs in PLAIN.items()},
            **FIXED,
            # transformers 5 reads rope_parameters; 4 and most other programs read the other two.
            "rope_theta": ours.rope_base,
            "rope_scaling": rope if scaled else None,
            "rope_parameters": {**rope, "rope_theta": ours.rope_base},
            "use_cache": True,
        }
        return HuggingFaceForm(config, names)


FAMILY = TransformerFamily()
