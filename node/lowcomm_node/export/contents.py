"""What an export is made of: weights of one checkpoint, their model, and where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lowcomm_node.data import Tokenizer
from lowcomm_node.errors import CheckpointError
from lowcomm_node.export.averaging import average
from lowcomm_node.export.choices import Weights
from lowcomm_node.models.base import HuggingFaceForm, Model, family_of, tensor_specs
from lowcomm_node.models.inference import load_model, tokenizer_of
from lowcomm_node.storage.checkpoint import Checkpoint
from lowcomm_protocol.plan import FragmentPlan, plan_fragments
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.spec.sections import ExportSettings, ModelSettings


@dataclass(frozen=True)
class Contents:
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
) -> Contents:
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
    return Contents(
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
