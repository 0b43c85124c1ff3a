"""Loss on held-out text, of a model or of the averaged weights of several nodes.

Every peer that has the same data takes the same windows. A slow machine takes only the first 1, 2,
4, 8, ... windows, and where one is too much only the beginning of the first, so that two peers that
took equally many tokens can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from lowcomm_node.data import Dataset, Tokenizer, open_data
from lowcomm_node.data.stories import NAME as STORIES
from lowcomm_node.data.stream import held_out_windows
from lowcomm_node.data.tokenizer import prompt_of
from lowcomm_node.models.base import Model, computing
from lowcomm_node.models.cross_entropy import count_learned
from lowcomm_node.models.inference import generate, load_checkpoint, load_model
from lowcomm_protocol.spec.sections import DataSettings

EVALUATION_TOKENS = 32_768
EVALUATION_SECONDS = 15.0
BEGINNING = 1024
"""Tokens tried first of a longer window; their number doubles until the window is whole."""
_BATCH_TOKENS = 8_192
STORY_PROMPT, STORY_TEMPERATURE = "Once upon a time", 0.5
PYTHON_PROMPT, PYTHON_TEMPERATURE = "def ", 0.8
SAMPLE_TOP_K, DRAWS = 20, 4


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a learned token over windows with this many tokens in all."""

    loss: float
    windows: int
    tokens: int


def held_out_loss(model: Model, dataset: Dataset, context: int) -> float:
    """Mean cross-entropy in nats a learned token over ``EVALUATION_TOKENS`` of held-out text."""
    count = max(1, EVALUATION_TOKENS // context)
    tokens, targets = held_out_windows(dataset.held_out, context, count, seed=0)
    return total_loss(model, tokens, targets) / _learned_windows(targets)


def evaluate(
    total_of: Callable[[Tensor, Tensor], float],
    dataset: Dataset,
    context: int,
    *,
    like: Evaluation | None = None,
    seconds: float = EVALUATION_SECONDS,
    clock: Callable[[], float] = monotonic,
) -> Evaluation:
    """The same over as many tokens as ``seconds`` allow, and at most as many as ``like`` had.

    ``total_of``: ``total_loss`` of a model.
    """
    count = max(1, EVALUATION_TOKENS // context)
    tokens, targets = held_out_windows(dataset.held_out, context, count, seed=0)
    stop, length = len(tokens), context
    if like is not None:
        stop, length = min(stop, like.windows), like.tokens // like.windows
    total, done, began, tried = 0.0, 0, clock(), BEGINNING
    while tried < length:
        loss = total_of(tokens[:1, :tried], targets[:1, :tried])
        # Twice as many tokens take up to four times as long.
        if 5 * (clock() - began) > seconds:
            return Evaluation(loss / _learned_windows(targets[:1, :tried]), 1, tried)
        tried *= 2
    tokens, targets = tokens[:, :length], targets[:, :length]
    while done < stop:
        part = slice(done, min(stop, max(1, 2 * done)))
        total += total_of(tokens[part], targets[part])
        done = part.stop
        # The next part is as large as all before it.
        if 2 * (clock() - began) > seconds:
            break
    return Evaluation(total / _learned_windows(targets[:done]), done, done * length)


@torch.no_grad()
def total_loss(model: Model, tokens: Tensor, targets: Tensor) -> float:
    """The sum of the losses of windows, each by its share of learned tokens."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for part in torch.arange(len(tokens)).split(max(1, _BATCH_TOKENS // tokens.shape[1])):
        with computing(device):
            loss = model.loss(tokens[part].to(device), targets[part].to(device))
        total += float(loss) * _learned_windows(targets[part])
    model.train(was_training)
    return total


def _learned_windows(targets: Tensor) -> float:
    """Learned targets, as a number of windows; never 0."""
    return max(1, int(count_learned(targets))) / targets.shape[1]


@dataclass(frozen=True)
class Comparison:
    """Held-out loss of averaged weights in nats a token, root mean square of the standard deviation
    of parameters across nodes, and a text."""

    average_loss: float
    spread: float
    sample: str


def compare(
    checkpoints: Sequence[Path],
    data_cache: Path,
    tokens: int,
    data: DataSettings,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Average the weights of checkpoints, and evaluate them on the built-in text of their run.

    ``tell`` takes the progress. Raises CheckpointError if a checkpoint is damaged.
    """
    threads = torch.get_num_threads()
    # Small models gain little from more threads, and take five times as long on busy cores.
    torch.set_num_threads(1)
    try:
        tell("averaging their weights: what is their loss on held-out text?")
        loaded = [load_checkpoint(path) for path in checkpoints]
        weights = [checkpoint.tensors["weights"] for checkpoint in loaded]
        squares = numel = 0.0
        for name in weights[0]:
            stacked = torch.stack([each[name].double() for each in weights])
            squares += float(stacked.var(0, unbiased=False).sum())
            numel += stacked[0].numel()
            weights[0][name] = stacked.mean(0).float()
        model = load_model(loaded[0])
        dataset = open_data(data.source, data.tokenizer, data_cache)
        loss = held_out_loss(model, dataset, model.settings.context)
        tell("letting the averaged model write")
        sample = _sample(model, dataset.tokenizer, tokens, data.source == STORIES)
        return Comparison(loss, (squares / numel) ** 0.5, sample)
    finally:
        torch.set_num_threads(threads)


def _sample(model: Model, tokenizer: Tokenizer, tokens: int, stories: bool) -> str:
    """The stories that a model ends within some tokens, or the fullest of a few Python texts.

    Indentation is the likeliest text after indentation, so at low temperatures a small model of
    Python writes only blanks. At 0.8 of 20 tokens it writes words.
    """
    begin, temperature = (
        (STORY_PROMPT, STORY_TEMPERATURE) if stories else (PYTHON_PROMPT, PYTHON_TEMPERATURE)
    )
    prompt = prompt_of(tokenizer, begin)
    texts: list[str] = []
    for seed in range(1 if stories else DRAWS):
        written = generate(model, prompt, tokens, temperature, SAMPLE_TOP_K, seed)
        texts.append(begin + tokenizer.decode(list(written)))
    if stories:
        ended, _, rest = texts[0].rpartition("\n\n")
        return ended or rest
    return max(texts, key=lambda text: sum(not one.isspace() for one in text) / len(text))
