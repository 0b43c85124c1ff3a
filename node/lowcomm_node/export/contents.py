"""What an export is made of: weights of one checkpoint, or their average with those of peers, their
model, and where they come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data import Tokenizer
from lowcomm_node.errors import CheckpointError
from lowcomm_node.export import Weights
from lowcomm_node.models.base import HuggingFaceForm, Model, family_of, tensor_specs
from lowcomm_node.models.inference import load_model, tokenizer_of
from lowcomm_node.storage.checkpoint import Checkpoint
from lowcomm_protocol.plan import FragmentPlan, plan_fragments
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.spec.sections import ExportSettings, ModelSettings

FAR_APART = 0.25
"""Distance of a peer's weights from ours, in norms of the larger, from which on they are left
out."""
_PIECE = 1 << 22
"""Values that are compared at once."""


@dataclass(frozen=True)
class Averaged:
    """Slow weights by the names of a checkpoint, and whose they are beside ours."""

    outer: Mapping[str, Tensor]
    peers: tuple[str, ...]


def average(
    outer: Mapping[str, Tensor], plan: FragmentPlan, gathered: Mapping[str, Path]
) -> Averaged:
    """The mean over ourselves and all peers whose weights are near ours.

    ``gathered``: by peer, a file with the slow weights of all fragments in order, float32.
    """
    names = [f"phi.{fragment.index}" for fragment in plan.fragments]
    if not all(
        name in outer and outer[name].numel() == plan.fragments[p].numel
        for p, name in enumerate(names)
    ):
        return Averaged(outer, ())  # whoever reads it tells what is missing
    size = plan.numel * 4
    theirs = {
        peer: np.memmap(file, dtype="<f4", mode="r")
        for peer, file in gathered.items()
        if file.stat().st_size == size
    }
    ours = [outer[name].flatten().numpy() for name in names]
    kept = {peer: vector for peer, vector in theirs.items() if _is_near(ours, vector)}
    mean = dict(outer)
    start = 0
    for name, mine in zip(names, ours, strict=True):
        total = mine.astype(np.float32)
        for vector in kept.values():
            total += vector[start : start + len(mine)]
        mean[name] = torch.from_numpy(total / np.float32(1 + len(kept)))
        start += len(mine)
    return Averaged(mean, tuple(kept))


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
    tensors: Mapping[str, Tensor]
    """By the names of the form."""
    settings: ModelSettings
    tokenizer: Tokenizer
    meta: Mapping[str, Any]
    """Of the checkpoint: run id, steps, tokens."""
    step: int
    weights: Weights
    run: SignedRun | None
    """The specification that it was trained by, where the home has it."""
    peers: tuple[str, ...] = ()
    """Whose slow weights were averaged with ours."""

    @property
    def says(self) -> ExportSettings:
        """Tokens that begin and end a text, and what else its run keeps for other programs."""
        told = self.run.spec.export if self.run else ExportSettings()
        end, begins = self.tokenizer.separator, self.tokenizer.begins
        found = {
            "bos_token_id": begins[0]
            if begins and told.bos_token_id is None
            else told.bos_token_id,
            "eos_token_id": told.eos_token_id or (() if end is None else (end,)),
        }
        return told.model_copy(update=found)

    @property
    def positions(self) -> int:
        """Tokens that the model reads at most."""
        learned = "max_position_embeddings" not in self.form.config  # a table of as many rows
        return self.settings.context if learned else max(self.settings.context, self.says.positions)

    @property
    def name(self) -> str:
        """A name for files: that of the run, or of nothing better than its family."""
        return self.run.spec.run.name if self.run else f"lowcomm-{self.settings.kind}"


def contents_of(
    checkpoint: Checkpoint,
    weights: Weights,
    run: SignedRun | None,
    tokenizer: str | None = None,
    gathered: Mapping[str, Path] = MappingProxyType({}),
) -> ExportContents:
    """Read what an export needs of a checkpoint.

    ``checkpoint`` holds the part ``weights``, and ``outer`` where slow weights are wanted;
    ``tokenizer`` is a file, where the home keeps no copy; ``gathered`` are files of slow weights of
    peers, to be averaged with ours. Raises CheckpointError, ConfigError.
    """
    model = load_model(checkpoint)
    peers: tuple[str, ...] = ()
    if weights is not Weights.FAST:
        plan = _plan_of(model, checkpoint, run)
        averaged = average(checkpoint.tensors["outer"], plan, gathered)
        _put_slow_weights(model, plan, averaged.outer)
        weights, peers = (Weights.AVERAGE if averaged.peers else Weights.SLOW), averaged.peers
    form = family_of(model.settings).huggingface(model.settings)
    if form is None:
        raise CheckpointError(
            f"transformers knows no model of kind {model.settings.kind!r}: export it with "
            "--format safetensors."
        )
    return ExportContents(
        form=form,
        tensors={form.names[name]: one.detach() for name, one in model.named_parameters()},
        settings=model.settings,
        tokenizer=tokenizer_of(checkpoint, tokenizer),
        meta=checkpoint.meta,
        step=checkpoint.info.step,
        weights=weights,
        run=run,
        peers=peers,
    )


def has_slow_weights(run: SignedRun | None) -> bool:
    """Whether a node of this run moves slow weights: one that never exchanges leaves them where
    they began."""
    return run is not None and run.spec.sync.group > 1


def _plan_of(model: Model, checkpoint: Checkpoint, run: SignedRun | None) -> FragmentPlan:
    """How the slow weights of a checkpoint are cut. Raises CheckpointError."""
    if run is None or not has_slow_weights(run):
        raise CheckpointError(
            f"{checkpoint.info.path} has no slow weights: export the fast ones with --weights fast."
        )
    sync = run.spec.sync
    plan = plan_fragments(tensor_specs(model), sync.fragments, sync.pattern)
    if plan.digest != checkpoint.meta.get("plan"):
        raise CheckpointError(
            f"{checkpoint.info.path} is cut in another way than run {run.fingerprint} says: export "
            "the fast weights with --weights fast."
        )
    return plan


def _put_slow_weights(model: Model, plan: FragmentPlan, outer: Mapping[str, Tensor]) -> None:
    """Replace the weights of a model by slow ones. Raises CheckpointError."""
    parameters = dict(model.named_parameters())
    for name, rows, values in _slices(plan, outer):
        part = parameters[name].data[rows] if parameters[name].dim() else parameters[name].data
        part.copy_(values.view(part.shape))


def _slices(plan: FragmentPlan, outer: Mapping[str, Tensor]) -> list[tuple[str, slice, Tensor]]:
    """Name, rows and slow weights of each slice. Raises CheckpointError if any are missing."""
    found: list[tuple[str, slice, Tensor]] = []
    for fragment in plan.fragments:
        phi = outer.get(f"phi.{fragment.index}")
        if phi is None or phi.numel() != fragment.numel:
            raise CheckpointError(
                f"The slow weights of fragment {fragment.index} are missing or of another size: "
                "export the fast weights with --weights fast."
            )
        begin = 0
        for one in fragment.slices:
            values = phi[begin : begin + one.numel]
            found.append((one.tensor, slice(one.start, one.stop), values))
            begin += one.numel
    return found
