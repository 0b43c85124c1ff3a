"""The weights of several nodes compared: their average, and how far they are apart."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lowcomm_node.data import Tokenizer, open_data
from lowcomm_node.data.stories import NAME as STORIES
from lowcomm_node.data.tokenizer import prompt_of
from lowcomm_node.models.base import Model
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.models.inference import generate, load_checkpoint, load_model
from lowcomm_node.storage.checkpoint import Checkpoint
from lowcomm_protocol.spec.sections import DataSettings

PYTHON_PROMPT = "def "
STORY_PROMPT = "Once upon a time"
TEMPERATURE, SAMPLE_TOP_K = 0.8, 20
STORY_TEMPERATURE = 0.5
DRAWS = 4
LEAST_VISIBLE = 1 / 3
"""Of the characters of a sample."""


@dataclass(frozen=True)
class Comparison:
    """What the checkpoints of a swarm have in common."""

    average_loss: float
    """Held-out loss of the averaged weights, nats a token."""
    spread: float
    """Root mean square over all parameters of the (population) standard deviation across nodes."""
    sample: str


def compare(
    checkpoints: Sequence[Path],
    data_cache: Path,
    tokens: int,
    data: DataSettings,
    tell: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Average the weights of checkpoints, and evaluate them on the built-in text of their run.

    ``tell`` is told what is done now. Raises CheckpointError if a checkpoint is damaged.
    """
    with _one_thread():
        tell("averaging their weights: what is their loss on held-out text?")
        model, spread = _average([load_checkpoint(path) for path in checkpoints])
        average_loss, tokenizer = _held_out(model, data_cache, data)
        tell("letting the averaged model write")
        write = stories_of if data.source == STORIES else sample_of
        return Comparison(average_loss, spread, write(model, tokenizer, tokens))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small models gain little from more threads, and take five times as long on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _average(loaded: Sequence[Checkpoint]) -> tuple[Model, float]:
    """The model of averaged weights, and their spread."""
    weights = [checkpoint.tensors["weights"] for checkpoint in loaded]
    squares = numel = 0.0
    for name in weights[0]:
        stacked = torch.stack([each[name].double() for each in weights])
        squares += float(stacked.var(0, unbiased=False).sum())
        numel += stacked[0].numel()
        loaded[0].tensors["weights"][name] = stacked.mean(0).float()
    return load_model(loaded[0]), (squares / numel) ** 0.5


def _held_out(model: Model, data_cache: Path, data: DataSettings) -> tuple[float, Tokenizer]:
    """The loss on the built-in text, and its tokenizer."""
    dataset = open_data(data.source, data.tokenizer, data_cache)
    return held_out_loss(model, dataset, model.settings.context), dataset.tokenizer


def stories_of(model: Model, tokenizer: Tokenizer, tokens: int) -> str:
    """The stories that a model ends within some tokens; what there is if it ends none."""
    prompt = prompt_of(tokenizer, STORY_PROMPT)
    written = generate(model, prompt, tokens, STORY_TEMPERATURE, SAMPLE_TOP_K)
    text = STORY_PROMPT + tokenizer.decode(list(written))
    ended, _, rest = text.rpartition("\n\n")
    return ended or rest


def sample_of(model: Model, tokenizer: Tokenizer, tokens: int) -> str:
    """Text of a model, the first of a few draws in which there is something to see.

    Indentation is the likeliest text after indentation, so at low temperatures a small model writes
    only blanks. At 0.8 of 20 tokens it writes words, and few of the bytes that it hardly knows.
    """
    prompt = prompt_of(tokenizer, PYTHON_PROMPT)
    samples = (
        PYTHON_PROMPT
        + tokenizer.decode(list(generate(model, prompt, tokens, TEMPERATURE, SAMPLE_TOP_K, seed)))
        for seed in range(DRAWS)
    )
    fullest = ""
    for sample in samples:
        if visible(sample) >= LEAST_VISIBLE:
            return sample
        fullest = max(fullest, sample, key=visible)
    return fullest


def visible(text: str) -> float:
    """The share of characters that are not blank."""
    return sum(not character.isspace() for character in text) / max(1, len(text))
