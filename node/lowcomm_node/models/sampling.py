"""Text from a model, token by token."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowcomm_node.errors import ConfigError, NotFinite
from lowcomm_node.models.base import Cache, Model
from lowcomm_node.storage.state_file import is_finite

TOP_K = 40
"""Tokens to draw from where nobody says otherwise: the same for a running node and a checkpoint."""


def generate(
    model: Model,
    prompt: Sequence[int],
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt by ``count`` tokens, each given as soon as it is drawn.

    Temperature 0 takes the likeliest token, ``top_k`` draws from the likeliest few only. When the
    text outgrows the context, the model goes on from its last half. Raises ConfigError on an empty
    prompt or settings out of range.
    """
    vocab = model.settings.vocab
    if not prompt or not all(0 <= token < vocab for token in prompt):
        raise ConfigError(
            f"The prompt needs at least one token, each from 0 to {vocab - 1}: pass some text of "
            "this run."
        )
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"temperature = {temperature} must be 0 or a positive number, top_k = {top_k} at least "
            "1."
        )
    return _continue(
        model, list(prompt), count, temperature, top_k, torch.Generator().manual_seed(seed)
    )


def _continue(
    model: Model,
    text: list[int],
    count: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    cache: Cache | None = None
    for _ in range(count):
        logits, cache = _predict(model, text, cache)
        text.append(_draw(logits, temperature, top_k, generator))
        yield text[-1]


@torch.no_grad()
def _predict(model: Model, text: list[int], cache: Cache | None) -> tuple[Tensor, Cache | None]:
    """Logits ``[vocab]`` after ``text``, of which all but the last token is in the cache."""
    context = model.settings.context
    if cache is None or cache.length == context:
        # Read anew rather than slide: positions stay those that the model was trained on, and half
        # a context of tokens follows before it happens again.
        text = text if len(text) <= context else text[-(context // 2) :]
        cache = model.new_cache()
    shown = text[-1:] if cache is not None and cache.length else text
    tokens = torch.tensor([shown], device=next(model.parameters()).device)
    return model(tokens, cache)[0, -1], cache


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    logits = logits.float().cpu()
    if not is_finite(logits):
        raise NotFinite("The weights give no finite probabilities: use an older checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    # From the largest down and in fp64, so that the lowest temperatures overflow to the likeliest
    # token, not to NaN.
    scaled = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=0), 1, generator=generator))
