"""What must hold for a codec, an outer rule, a pairing and a kind of model of another package: they
are trained with."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from lowcomm_node import models
from lowcomm_node.data import Dataset, open_data
from lowcomm_node.models.base import Cache, Family, Footprint, Model, Place
from lowcomm_node.models.inference import generate
from lowcomm_node.simulation import simulate
from lowcomm_node.trainer.memory import estimate_memory
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import RunSpec, check_new_run, parse_canonical
from lowcomm_protocol.spec.sections import ModelSettings

TRANSFORMER = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}
STEPS = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Iterator[Dataset]:
    folder, threads = tmp_path_factory.mktemp("text"), torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(20):
        (folder / f"{number}.txt").write_text(
            f"The {number}th of twenty short texts, all much alike. " * 12
        )
    yield open_data(f"text:{folder}", "bytes", folder / "cache")
    torch.set_num_threads(threads)


def spec_of(model: dict[str, Any] | None = None, method: str = "noloco", **sync: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"name": "outside", "steps": STEPS},
            "model": model or TRANSFORMER,
            "train": {"batch": 4, "warmup": 2, "learning_rate": 0.01},
            "sync": {"method": method, "interval": 6} | sync,
        }
    )


class BigramSettings(ModelSettings):
    """A model that looks at one token alone."""

    channels: Annotated[int, Field(ge=1, le=64)] = 8


class Bigrams(Model):
    """Logits of the next token from the last one."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        assert isinstance(settings, BigramSettings)
        self.settings = settings
        self.reader = nn.Embedding(settings.vocab, settings.channels)
        self.writer = nn.Linear(settings.channels, settings.vocab, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.writer(self.reader(tokens))

    def place_of(self, name: str) -> Place:
        return Place("embedding" if name.startswith("reader") else "block", 0)


class BigramFamily(Family):
    def build(self, settings: ModelSettings, seed: int) -> Model:
        model, generator = Bigrams(settings), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        return model

    def footprint(self, settings: ModelSettings) -> Footprint:
        assert isinstance(settings, BigramSettings)
        table = settings.channels, settings.vocab
        size = settings.channels * settings.vocab
        return Footprint(Counter({table: 1}), size, kept=0, passing=0, vocab=settings.vocab)


def learned(spec: RunSpec, dataset: Dataset, peers: int = 2) -> None:
    """Peers train and exchange, and know more than at the beginning."""
    result = simulate(spec, dataset, peers)
    assert result.applied > 0 and result.loss < 5.3, (
        "a model that knows nothing of bytes is at 5.55"
    )


def test_a_family_of_models(dataset):
    models.register("bigrams", BigramFamily(), BigramSettings)
    try:
        spec = spec_of({"kind": "bigrams", "channels": 16, "context": 16}, fragments=2)
        learned(spec, dataset)
        again = parse_canonical(spec.canonical().decode())
        assert again == spec and again.run_id == spec.run_id
        check_new_run(spec.model_copy(update={"optional": ("model.channels",)}))
        with pytest.raises(SpecError, match=r"optional names .model\.layers., which is no setting"):
            check_new_run(spec.model_copy(update={"optional": ("model.layers",)}))
        assert estimate_memory(spec, gpu=False).host["optimizer"] > 0
        model = models.FAMILIES["bigrams"].build(spec.model, 0)
        assert len(list(generate(model, [1], 40))) == 40, "longer than its context"
        with pytest.raises(ValueError, match=r"model\.layers"):
            spec_of({"kind": "bigrams", "layers": 2})
    finally:
        models.unregister("bigrams")
    with pytest.raises(
        SpecError,
        match=r"model\.kind = 'bigrams': not known\. There are transformer, transformers\.$",
    ):
        parse_canonical(spec.canonical().decode())
