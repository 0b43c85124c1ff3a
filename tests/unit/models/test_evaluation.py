"""What must hold for a look at held-out text: a slow machine takes fewer windows, the first ones,
and says how many."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lowcomm_node.data.stream import IGNORED
from lowcomm_node.models import evaluation
from lowcomm_node.models.evaluation import Evaluation, evaluate, total_loss

CONTEXT = 1024


class Model(torch.nn.Module):
    """The loss of a window is its first token; a whole one takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds, self.now = torch.nn.Parameter(torch.zeros(1)), seconds, 0.0

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.now += self.seconds * tokens.numel() / CONTEXT
        return tokens[:, 0].float().mean()


@pytest.fixture(autouse=True)
def numbered_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window number N begins with token N."""

    def numbered(
        _: object, context: int, count: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(count)[:, None].repeat(1, context)
        return tokens, tokens

    monkeypatch.setattr(evaluation, "held_out_windows", numbered)


def look(seconds: float, **how: Evaluation) -> tuple[Evaluation, float]:
    """An evaluation of a model that needs so many seconds a window, and how long it took."""
    model = Model(seconds)
    data = SimpleNamespace(held_out=None)
    total = partial(total_loss, model)  # type: ignore[arg-type]
    return evaluate(total, data, CONTEXT, clock=lambda: model.now, **how), model.now  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "windows"), [(0.5, 16), (1.0, 8), (3.0, 4), (5.0, 2), (100.0, 1)]
)
def test_a_slow_machine_takes_as_many_of_the_first_as_it_has_time_for(seconds: float, windows: int):
    found, took = look(seconds)
    assert (found.windows, found.loss) == (windows, (windows - 1) / 2)
    assert took <= max(seconds, evaluation.EVALUATION_SECONDS), "but always one"


def test_a_window_counts_by_its_learned_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.arange(2)[:, None].repeat(1, CONTEXT)
    targets = tokens.clone()
    targets[0, CONTEXT // 4 :] = IGNORED
    monkeypatch.setattr(evaluation, "held_out_windows", lambda *_, **__: (tokens, targets))
    assert look(1.0)[0].loss == 0.8, "a loss of 0 for a quarter of a window, of 1 for a whole one"


@pytest.mark.parametrize(
    ("per_window", "tokens"), [(1.0, 131_072), (75.0, 32_768), (600.0, 8192), (60_000.0, 1024)]
)
def test_a_long_context_is_bounded_by_time(per_window: float, tokens: int):
    """A window of 131,072 tokens, where each token looks at all before it."""
    context, model = 131_072, Model(0.0)

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model.now += per_window * (tokens.shape[1] / context) ** 2
        return tokens[:, 0].float().mean()

    model.loss = loss
    data = SimpleNamespace(held_out=None)
    total = partial(total_loss, model)  # type: ignore[arg-type]
    found = evaluate(total, data, context, clock=lambda: model.now)  # type: ignore[arg-type]
    assert (found.windows, found.tokens) == (1, tokens)
    assert model.now <= evaluation.EVALUATION_SECONDS
