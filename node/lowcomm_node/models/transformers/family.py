"""Models of the library ``transformers`` as a family.

Its modules keep more for the backward pass than ours: norms a copy in float32, rotations and
activations their parts. ``test_families.py`` counts what they keep beside what is reckoned here.
"""

from typing import Any, cast

from lowcomm_node.models.base import Family, Footprint, HuggingFaceForm
from lowcomm_node.models.transformers.model import (
    LINEAR_HEADS,
    TransformersModel,
    blank_model,
    build_model,
    checked_model,
)
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.sections import ModelSettings

_PREFIX = "causal."
_STORED = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Names in files, where releases of 5 name a parameter in another way."""


class TransformersFamily(Family):
    """See the file."""

    def build(self, settings: ModelSettings, seed: int) -> TransformersModel:
        """See Family."""
        return build_model(cast("TransformersSettings", settings), seed)

    def blank(self, settings: ModelSettings) -> TransformersModel:
        """See Family."""
        return blank_model(cast("TransformersSettings", settings))

    def check(self, settings: ModelSettings) -> None:
        """See Family."""
        checked_model(cast("TransformersSettings", settings))

    def footprint(self, settings: ModelSettings) -> Footprint:
        """See Family."""
        model = cast("TransformersSettings", settings)
        size, vocab = model.architecture.sizes(model.config), model.vocab
        width, inner, queries, keys = size.width, size.inner, size.queries, size.keys
        layer = 6 * width + 3 * queries + 2 * keys + 4 * inner + 4 * size.heads
        layer += 2 * (queries + keys) + 3 * width * max(0, _norms(model) - 2)
        widest = 6 * width + 8 * queries + 5 * inner
        return Footprint(
            matrices=model.architecture.matrices(model.config),
            others=model.architecture.others(model.config, vocab, model.context),
            kept=size.layers * layer + 3 * width + 3,
            # A loss that is not computed in chunks holds all logits three times.
            passing=widest + (0 if model.type in LINEAR_HEADS else 3 * vocab),
            vocab=vocab,
            blocks=size.layers,
            in_block=layer,
            between=width,
        )

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        """See Family."""
        model = checked_model(cast("TransformersSettings", settings))
        causal: Any = model.causal
        config: dict[str, Any] = causal.config.to_dict()
        for name in ("_name_or_path", "transformers_version", "dtype"):
            config.pop(name, None)
        config["architectures"] = [type(causal).__name__]
        stored = _STORED.get(causal.config.model_type, {})
        names = {_PREFIX + name: stored.get(name, name) for name, _ in model.named()}
        ignored = tuple(causal._keys_to_ignore_on_load_unexpected or ())
        return HuggingFaceForm(config, names, causal.base_model_prefix, ignored)


def _norms(model: TransformersSettings) -> int:
    """Norms of a layer. Those of types without a gate have biases, which count as vectors."""
    return model.architecture.norms if model.architecture.gated else 2


FAMILY = TransformersFamily()
