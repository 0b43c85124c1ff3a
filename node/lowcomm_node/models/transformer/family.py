"""The transformer as a family: how it is built, and what it takes of memory.

W, F, H, V are width, feed_forward, heads and vocab. A layer keeps for the backward pass 15 W + 4 F
+ 3 H + 2 values a token (``test_memory.py`` counts them): attention is torch's own, which keeps no
matrix of context x context. The loss holds two copies of the logits beside the one that is kept.
"""

from collections import Counter
from typing import cast

from lowcomm_node.models.base import Family, Footprint, HuggingFaceForm
from lowcomm_node.models.transformer.huggingface import huggingface_form
from lowcomm_node.models.transformer.model import Transformer, build_transformer
from lowcomm_protocol.spec.settings import ModelSettings
from lowcomm_protocol.spec.transformer import TransformerSettings


class TransformerFamily(Family):
    """See the file."""

    def build(self, settings: ModelSettings, seed: int) -> Transformer:
        """See Family."""
        return build_transformer(cast("TransformerSettings", settings), seed)

    def footprint(self, settings: ModelSettings) -> Footprint:
        """See Family."""
        model = cast("TransformerSettings", settings)
        width, inner, layers, vocab = model.width, model.feed_forward, model.layers, model.vocab
        matrices: Counter[tuple[int, int]] = Counter()
        for shape, count in (((width, width), 4), ((inner, width), 2), ((width, inner), 1)):
            matrices[shape] += count * layers
        tables = (1 if model.tied else 2) * vocab * width
        norms = width + layers * (2 * width + 2 * (width // model.heads))
        layer = 15 * width + 4 * inner + 3 * model.heads + 2
        return Footprint(
            matrices=matrices,
            others=tables + norms,
            kept=layers * layer + 3 * width + 3 + vocab,
            passing=max(2 * vocab, 10 * width + 4 * inner),
            evaluated=2 * vocab + 10 * width + 4 * inner,
        )

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm:
        """See Family."""
        return huggingface_form(cast("TransformerSettings", settings))


FAMILY = TransformerFamily()
