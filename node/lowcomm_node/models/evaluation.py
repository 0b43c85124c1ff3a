"""Loss on held-out text: the same windows at every peer that has the same data.

A slow machine takes only the first 1, 2, 4, 8, ... windows, and where one is too much only the
beginning of the first, so that two peers that took equally many tokens can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from lowcomm_node.data import Dataset
from lowcomm_node.data.stream import held_out_windows
from lowcomm_node.models.base import Model, computing

EVALUATION_TOKENS = 32_768
EVALUATION_SECONDS = 15.0
"""How long one evaluation may hold up training."""
BEGINNING = 1024
"""Tokens of a longer window that are tried first; then twice as many, until it is whole."""
_BATCH_TOKENS = 8_192


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, and what it is the mean of."""

    loss: float
    """Nats a token."""
    windows: int
    tokens: int
    """Sum over all windows."""


def held_out_loss(model: Model, dataset: Dataset, context: int) -> float:
    """Mean cross-entropy in nats a token over ``EVALUATION_TOKENS`` tokens of held-out text."""
    tokens, targets = _windows(dataset, context)
    return _total_loss(model, tokens, targets) / len(tokens)


def evaluate(
    model: Model,
    dataset: Dataset,
    context: int,
    *,
    like: Evaluation | None = None,
    seconds: float = EVALUATION_SECONDS,
    clock: Callable[[], float] = monotonic,
) -> Evaluation:
    """The same over as many tokens as ``seconds`` allow, and at most as many as ``like``, an
    earlier one, had."""
    tokens, targets = _windows(dataset, context)
    stop, length = len(tokens), context
    if like is not None:
        stop, length = min(stop, like.windows), like.tokens // like.windows
    total, done, began, tried = 0.0, 0, clock(), BEGINNING
    while tried < length:
        loss = _total_loss(model, tokens[:1, :tried], targets[:1, :tried])
        # Twice as many tokens take up to four times as long.
        if 5 * (clock() - began) > seconds:
            return Evaluation(loss, 1, tried)
        tried *= 2
    tokens, targets = tokens[:, :length], targets[:, :length]
    while done < stop:
        part = slice(done, min(stop, max(1, 2 * done)))
        total += _total_loss(model, tokens[part], targets[part])
        done = part.stop
        # The next part is as large as all before it.
        if 2 * (clock() - began) > seconds:
            break
    return Evaluation(total / done, done, done * length)


def _windows(dataset: Dataset, context: int) -> tuple[Tensor, Tensor]:
    return held_out_windows(dataset.held_out, context, max(1, EVALUATION_TOKENS // context), seed=0)


@torch.no_grad()
def _total_loss(model: Model, tokens: Tensor, targets: Tensor) -> float:
    """The sum of the losses of windows."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for part in torch.arange(len(tokens)).split(max(1, _BATCH_TOKENS // tokens.shape[1])):
        with computing(device):
            loss = model.loss(tokens[part].to(device), targets[part].to(device))
        total += float(loss) * len(part)
    model.train(was_training)
    return total
