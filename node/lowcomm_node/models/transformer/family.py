"""The transformer as a family: how it is built, and what it takes of memory.

W is width, F feed_forward, V vocab; H query heads of Q channels in all, G heads of keys and values
of K channels in all. A layer keeps for the backward pass 6 W + 3 Q + 2 K + 4 F + H + 2 values a
token, and where queries and keys are normed 2 (Q + K) + H + G more (``test_memory.py`` counts
them): attention is torch's own, which keeps no matrix of context x context.
"""

from collections import Counter
from typing import cast

from lowcomm_node.models.base import Family, Footprint, HuggingFaceForm
from lowcomm_node.models.transformer.huggingface import huggingface_form
from lowcomm_node.models.transformer.model import Transformer, build_transformer
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import ModelSettings


class TransformerFamily(Family):
    """See the file."""

    def build(self, settings: ModelSettings, seed: int) -> Transformer:
        """See Family."""
        return build_transformer(cast("TransformerSettings", settings), seed)

    def blank(self, settings: ModelSettings) -> Transformer:
        """See Family."""
        return Transformer(cast("TransformerSettings", settings))

    def footprint(self, settings: ModelSettings) -> Footprint:
        """See Family."""
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
        """See Family."""
        return huggingface_form(cast("TransformerSettings", settings))


FAMILY = TransformerFamily()
