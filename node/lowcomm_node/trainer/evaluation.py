"""Loss on held-out text: the same windows at every peer that has the same data."""

import torch

from lowcomm_node.data import Dataset
from lowcomm_node.data.stream import held_out_windows
from lowcomm_node.model import Transformer

EVALUATION_TOKENS = 32_768
_BATCH_TOKENS = 8_192


@torch.no_grad()
def held_out_loss(model: Transformer, dataset: Dataset, context: int) -> float:
    """Mean cross-entropy in nats a token over ``EVALUATION_TOKENS`` tokens of held-out text."""
    count = max(1, EVALUATION_TOKENS // context)
    tokens, targets = held_out_windows(dataset.held_out, context, count, seed=0)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for part in torch.arange(count).split(max(1, _BATCH_TOKENS // context)):
        loss = model.loss(tokens[part].to(device), targets[part].to(device))
        total += float(loss) * len(part)
    model.train(was_training)
    return total / count
