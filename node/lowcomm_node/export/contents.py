"""Contents of an export: weights of one checkpoint, or their average with those of peers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data import Tokenizer
from lowcomm_node.errors import CheckpointError
from lowcomm_node.export import ExportChoices, Weights
from lowcomm_node.models.adapters import merged
from lowcomm_node.models.base import HuggingFaceForm, Model, family_of, tensor_specs
from lowcomm_node.models.inference import load_model, tokenizer_of
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_protocol.plan import FragmentPlan, plan_fragments
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.spec.sections import ExportSettings, ModelSettings

FAR_APART = 0.25
"""Largest distance of a peer's weights from ours, in norms of the larger."""
_PIECE = 1 << 22
"""Values that are compared at once."""


def average(
    outer: Mapping[str, Tensor], plan: FragmentPlan, gathered: Mapping[str, Path]
) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """The mean of our slow weights and of all near ours, by the names of a checkpoint; the peers in
    it.

    ``gathered``: by peer, a file with the slow weights of all fragments in order, float32.
    """
    slow = [outer.get(f"phi.{fragment.index}") for fragment in plan.fragments]
    ours = [one.flatten().numpy() for one in slow if one is not None]
    if [len(one) for one in ours] != [fragment.numel for fragment in plan.fragments]:
        return outer, ()  # the reader reports the missing fragment
    theirs = {
        peer: np.memmap(file, dtype="<f4", mode="r")
        for peer, file in gathered.items()
        if file.stat().st_size == plan.numel * 4
    }
    kept = {peer: vector for peer, vector in theirs.items() if _is_near(ours, vector)}
    mean, start = dict(outer), 0
    for fragment, mine in zip(plan.fragments, ours, strict=True):
        total = mine.astype(np.float32)
        for vector in kept.values():
            total += vector[start : start + len(mine)]
        mean[f"phi.{fragment.index}"] = torch.from_numpy(total / np.float32(1 + len(kept)))
        start += len(mine)
    return mean, tuple(kept)


def _is_near(ours: list[NDArray[np.float32]], vector: NDArray[np.float32]) -> bool:
    """Whether all values are finite, and near ours together."""
    apart = mine = theirs = 0.0
    start = 0
    for fragment in ours:
        for begin in range(0, len(fragment), _PIECE):
            one = fragment[begin : begin + _PIECE].astype(np.float64)
            other = vector[start + begin : start + begin + len(one)].astype(np.float64)
            apart += float(np.square(one - other).sum())
            mine += float(np.square(one).sum())
            theirs += float(np.square(other).sum())
        start += len(fragment)
    # NaN and infinity fail the comparison.
    return apart <= FAR_APART**2 * max(mine, theirs) < np.inf


@dataclass(frozen=True)
class ExportContents:
    """A model as an export writes it."""

    form: HuggingFaceForm
    settings: ModelSettings
    tokenizer: Tokenizer
    meta: Mapping[str, Any]
    step: int
    weights: Weights
    model: Model
    run: SignedRun | None
    """None where the home has no specification."""
    peers: tuple[str, ...] = ()
    """Peers whose slow weights were averaged with ours."""

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The whole model, by the names of the form; an adapter is in it."""
        return {self.form.names[name]: one for name, one in merged(self.model).items()}

    @property
    def says(self) -> ExportSettings:
        """Section ``[export]`` of the run, with the tokens that begin and end a text."""
        says = self.run.spec.export if self.run else ExportSettings()
        end, begins = self.tokenizer.separator, self.tokenizer.begins
        bos = begins[0] if begins and says.bos_token_id is None else says.bos_token_id
        eos = says.eos_token_id or (() if end is None else (end,))
        return says.model_copy(update={"bos_token_id": bos, "eos_token_id": eos})

    @property
    def positions(self) -> int:
        """Most tokens that the model reads."""
        learned = "max_position_embeddings" not in self.form.config  # a table of as many rows
        return self.settings.context if learned else max(self.settings.context, self.says.positions)

    @property
    def name(self) -> str:
        """Name of files: the run's, or the family's."""
        return self.run.spec.run.name if self.run else f"lowcomm-{self.settings.kind}"


def contents_of(
    store: CheckpointStore,
    step: int,
    run: SignedRun | None,
    choices: ExportChoices,
    gathered: Mapping[str, Path],
) -> ExportContents:
    """The contents of an export of a checkpoint. Raises CheckpointError, ConfigError.

    ``gathered``: by peer, a file of slow weights to be averaged with ours.
    """
    moves_slow = run is not None and run.spec.sync.group > 1
    weights = choices.weights or (Weights.AVERAGE if moves_slow else Weights.FAST)
    checkpoint = store.load(step, ["weights", *(["outer"] if weights is not Weights.FAST else [])])
    model, path, peers = load_model(checkpoint), checkpoint.info.path, ()
    if weights is not Weights.FAST:
        if run is None or not moves_slow:
            raise CheckpointError(
                f"{path} has no slow weights: export the fast ones with --weights fast."
            )
        sync, outer = run.spec.sync, checkpoint.tensors["outer"]
        plan = plan_fragments(tensor_specs(model), sync.fragments, sync.pattern)
        if plan.digest != checkpoint.meta.get("plan"):
            raise CheckpointError(
                f"{path} is cut in another way than run {run.fingerprint} says: export the fast "
                "weights with --weights fast."
            )
        if weights is Weights.AVERAGE:
            outer, peers = average(outer, plan, gathered)
            weights = Weights.AVERAGE if peers else Weights.SLOW
        _put_slow_weights(model, plan, outer)
    form = family_of(model.settings).huggingface(model.settings)
    if form is None:
        raise CheckpointError(
            f"transformers knows no model of kind {model.settings.kind!r}: export it with "
            "--format safetensors."
        )
    return ExportContents(
        form=form,
        model=model,
        settings=model.settings,
        tokenizer=tokenizer_of(checkpoint, choices.tokenizer),
        meta=checkpoint.meta,
        step=step,
        weights=weights,
        run=run,
        peers=peers,
    )


def _put_slow_weights(model: Model, plan: FragmentPlan, outer: Mapping[str, Tensor]) -> None:
    """Replace the weights of a model by slow ones. Raises CheckpointError if any are missing."""
    parameters = dict(model.named_parameters())
    for fragment in plan.fragments:
        phi = outer.get(f"phi.{fragment.index}")
        if phi is None or phi.numel() != fragment.numel:
            raise CheckpointError(
                f"The slow weights of fragment {fragment.index} are missing or of another size: "
                "export the fast weights with --weights fast."
            )
        sizes = [one.numel for one in fragment.slices]
        for one, values in zip(fragment.slices, phi.split(sizes), strict=True):
            weights = parameters[one.tensor].data
            part = weights[one.start : one.stop] if weights.dim() else weights
            part.copy_(values.view(part.shape))
