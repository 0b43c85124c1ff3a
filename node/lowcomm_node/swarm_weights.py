"""The weights of several nodes compared: their average, and how far they are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowcomm_node.data import open_data
from lowcomm_node.inference import load_checkpoint, load_model
from lowcomm_node.sampling import generate
from lowcomm_node.trainer.evaluation import held_out_loss


@dataclass(frozen=True)
class Comparison:
    """What the checkpoints of a swarm have in common."""

    average_loss: float
    """Held-out loss of the averaged weights, nats a token."""
    spread: float
    """Root mean square over all parameters of the (population) standard deviation across nodes."""
    sample: str


def compare(checkpoints: Sequence[Path], data_cache: Path, tokens: int) -> Comparison:
    """Average the weights of checkpoints on the built-in text. Raises CheckpointError if one is damaged."""
    loaded = [load_checkpoint(path) for path in checkpoints]
    weights = [checkpoint.tensors["weights"] for checkpoint in loaded]
    squares = numel = 0.0
    for name in weights[0]:
        stacked = torch.stack([each[name].double() for each in weights])
        squares += float(stacked.var(0, unbiased=False).sum())
        numel += stacked[0].numel()
        loaded[0].tensors["weights"][name] = stacked.mean(0).float()
    model = load_model(loaded[0])
    dataset = open_data("builtin:python", "bytes", data_cache)
    prompt = [int(token) for token in dataset.tokenizer.encode(b"import ")]
    sample = dataset.tokenizer.decode(list(generate(model, prompt, tokens, 0.6, 40, seed=1)))
    return Comparison(
        held_out_loss(model, dataset, model.settings.context), (squares / numel) ** 0.5, "import " + sample
    )
