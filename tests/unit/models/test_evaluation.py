"""What must hold for a look at held-out text: a slow machine takes fewer windows, the first ones,
and says how many."""

from types import SimpleNamespace

import pytest
import torch

from lowcomm_node.models import evaluation
from lowcomm_node.models.evaluation import EVALUATION_TOKENS, Evaluation, evaluate, held_out_loss

CONTEXT = 1024
ALL = EVALUATION_TOKENS // CONTEXT


class Model(torch.nn.Module):
    """The loss of a window is its first token; each takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds, self.now = torch.nn.Parameter(torch.zeros(1)), seconds, 0.0

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.now += self.seconds * len(tokens)
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


def look(seconds: float, **how: int) -> tuple[Evaluation, float]:
    """An evaluation of a model that needs so many seconds a window, and how long it took."""
    model = Model(seconds)
    data = SimpleNamespace(held_out=None)
    return evaluate(model, data, CONTEXT, clock=lambda: model.now, **how), model.now  # type: ignore[arg-type]


def test_a_fast_machine_takes_all_windows():
    found, _ = look(0.01)
    data = SimpleNamespace(held_out=None)
    assert (found.windows, found.tokens) == (ALL, EVALUATION_TOKENS)
    assert found.loss == held_out_loss(Model(0.0), data, CONTEXT) == (ALL - 1) / 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "windows"), [(0.5, 16), (1.0, 8), (3.0, 4), (5.0, 2), (100.0, 1)]
)
def test_a_slow_machine_takes_as_many_of_the_first_as_it_has_time_for(seconds: float, windows: int):
    found, took = look(seconds)
    assert (found.windows, found.loss) == (windows, (windows - 1) / 2)
    assert took <= max(seconds, evaluation.EVALUATION_SECONDS), "but always one"


def test_it_takes_no_more_windows_than_the_time_before():
    assert look(0.01, most=8)[0].windows == 8
