"""Exports a checkpoint of a node, which may be running."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lowcomm_node.errors import CheckpointError, ConfigError
from lowcomm_node.export import Dtype, ExportChoices, Format, Weights
from lowcomm_node.export.contents import contents_of
from lowcomm_node.export.gguf import write_file
from lowcomm_node.export.huggingface import write_adapter, write_folder
from lowcomm_node.models.base import trained
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import kept_run, new_folder


@dataclass(frozen=True)
class ExportResult:
    """A written export."""

    weights: Weights
    step: int
    """Inner steps of this node in the checkpoint."""
    peers: tuple[str, ...] = ()


def export_checkpoint(
    of_run: Path,
    folder: Path,
    choices: ExportChoices,
    gathered: Mapping[str, Path] = MappingProxyType({}),
) -> ExportResult:
    """Write a new folder from a checkpoint of a run, ``of_run`` in a home.

    ``gathered``: files of slow weights of peers, by peer, for an average; without any our own slow
    weights are written. Raises CheckpointError, ConfigError, DiskFull.
    """
    if choices.dtype is Dtype.Q8_0 and choices.format is not Format.GGUF:
        raise ConfigError("--dtype q8_0 is for --format gguf: choose float32 or bfloat16.")
    is_copy, of_slow = choices.format is Format.SAFETENSORS, (Weights.SLOW, Weights.AVERAGE)
    if is_copy and (choices.dtype is not Dtype.FLOAT32 or choices.weights in of_slow):
        raise ConfigError(
            "--format safetensors copies the fast weights as they are: leave --dtype and --weights "
            "away, or choose --format hf."
        )
    store = CheckpointStore(of_run / "checkpoints")
    newest = store.latest()
    if newest is None:
        raise CheckpointError(f"There is no checkpoint in {store.folder} yet.")
    step = newest.step if choices.step is None else choices.step
    if is_copy:
        store.export(step, folder)
        return ExportResult(Weights.FAST, step)
    contents = contents_of(store, step, kept_run(of_run / "run.json"), choices, gathered)
    adapter = choices.format is Format.ADAPTER
    written = trained(contents.model).values() if adapter else contents.tensors.values()
    size = sum(tensor.nbytes for tensor in written)
    with new_folder(folder, size) as fresh:
        if choices.format is Format.HF:
            write_folder(contents, fresh, choices.dtype)
        elif adapter:
            write_adapter(contents, fresh, choices.dtype)
        else:
            write_file(contents, fresh, choices.dtype)
    return ExportResult(contents.weights, step, contents.peers)
