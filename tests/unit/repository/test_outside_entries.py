"""What must hold for a codec, an outer rule, a pairing and a kind of model of another package: they
are trained with."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from lowcomm_node import models
from lowcomm_node.data import Dataset, open_data
from lowcomm_node.models.base import Cache, Family, Footprint, Model, Place
from lowcomm_node.models.sampling import generate
from lowcomm_node.simulation import simulate
from lowcomm_node.trainer.memory import reckon
from lowcomm_protocol.codecs import Codec, FixedCodec, codec, coder
from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.errors import CodecError, SpecError
from lowcomm_protocol.matching import Meeting, Pairing
from lowcomm_protocol.spec.names import (
    CODECS,
    OUTER_RULES,
    PAIRINGS,
    SIZE_VARIES,
    CodecEntry,
    Table,
)
from lowcomm_protocol.spec.outer import OuterRule, OuterSettings
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


@contextmanager
def registered(table: Table[Any], name: str, entry: Any) -> Iterator[None]:
    table.register(name, entry)
    try:
        yield
    finally:
        table.unregister(name)


class Half(FixedCodec):
    """float16, little-endian."""

    name = "half"

    def _size(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, vector: Vector, out: Bytes) -> None:
        out.view("<f2")[:] = vector

    def _decode(self, data: Bytes, out: Vector) -> None:
        if not np.isfinite(data.view("<f2")).all():
            raise CodecError("half: not finite")
        out[:] = data.view("<f2")


class Sparse(Codec):
    """The values that are at least half as large as the largest: place and value of each, 8
    bytes."""

    name = "sparse"

    def _sizes(self, numel: int) -> tuple[int, int]:
        return 0, 8 * numel

    def _write(self, vector: Vector, out: Bytes) -> int:
        largest = np.abs(vector).max(initial=0.0)
        kept = np.flatnonzero((2 * np.abs(vector) >= largest) & (vector != 0)).astype("<u4")
        coded = np.concatenate((kept.view(np.uint8), vector[kept].astype("<f4").view(np.uint8)))
        out[: coded.size] = coded
        return coded.size

    def _decode(self, data: Bytes, out: Vector) -> None:
        count = data.size // 8
        places, values = data[: 4 * count].view("<u4"), data[4 * count : 8 * count].view("<f4")
        if (
            data.size % 8
            or (np.diff(places.astype(np.int64)) <= 0).any()
            or (places >= out.size).any()
        ):
            raise CodecError("sparse: places that are none: drop this contribution")
        if not np.isfinite(values).all():
            raise CodecError("sparse: not finite: drop this contribution")
        out[:] = 0
        out[places] = values


class Plain(OuterRule):
    """``phi += pooled``: no momentum."""

    def __init__(self) -> None:
        self.taken = 0

    def gain(self, settings: OuterSettings) -> float:
        return settings.outer_lr

    def dynamics(self, settings: OuterSettings) -> tuple[float, float, float, float]:
        return 0.0, -settings.consensus, 0.0, 0.0

    def step(self, settings: OuterSettings, phi: Vector, delta: Vector, pooled: Vector) -> None:
        self.taken += 1
        phi += pooled


class ByName(Pairing):
    """The first by name meets the second, the third the fourth, always."""

    def __init__(self) -> None:
        self.asked = 0

    def partner(self, meeting: Meeting, me: str) -> str | None:
        self.asked += 1
        line = sorted(meeting.peers)
        place = line.index(me) ^ 1
        return line[place] if place < len(line) else None


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


def test_a_codec_of_fixed_size_in_pairs_and_in_groups(dataset):
    with registered(CODECS, "half", CodecEntry(Half())):
        learned(spec_of(codec="half"), dataset)
        learned(spec_of(method="diloco", codec="half"), dataset, peers=3)
        assert codec("half").coded_size(10) == 20
    with pytest.raises(SpecError, match=r"'half': not known.* There are fp32, bf16, .*, mod8\.$"):
        parse_canonical(spec_of().canonical().decode().replace('"fp32"', '"half"'))


def test_a_sparse_codec_whose_size_varies_in_pairs_and_groups_refuse_it(dataset):
    told = {"codec": "sparse", "consensus": 0.0, "error_feedback": True}
    with registered(CODECS, "sparse", CodecEntry(Sparse(), coarse=True, only_in_pairs=SIZE_VARIES)):
        learned(spec_of(**told), dataset)
        sizes = coder("sparse", 100).min_size, coder("sparse", 100).max_size
        assert sizes == (0, 800)
        with pytest.raises(SpecError, match="too coarse for absolute weights"):
            parse_canonical(
                spec_of(**told).canonical().decode().replace('"consensus":0.0', '"consensus":1.0')
            )
        with pytest.raises(
            ValueError, match=r"codec = 'sparse' has a size that is known only after coding, which"
        ):
            spec_of(**told, group=3)
        with pytest.raises(
            CodecError,
            match="codec 'sparse' has a size that is known only after coding: use it in pairs",
        ):
            codec("sparse")


def test_a_codec_that_hides_that_its_size_varies_is_refused_by_groups(dataset):
    with (
        registered(CODECS, "sparse", CodecEntry(Sparse())),
        pytest.raises(
            CodecError,
            match="codec 'sparse' has a size that is known only after coding: use it in pairs",
        ),
    ):
        simulate(spec_of(method="diloco", codec="sparse"), dataset, 3)


def test_an_outer_rule(dataset):
    rule = Plain()
    with registered(OUTER_RULES, "plain", rule):
        learned(spec_of(outer="plain"), dataset)
        assert rule.taken > 0
        with pytest.raises(
            SpecError, match=r"plain with consensus = 3\.0 .* diverges in groups of 2"
        ):
            parse_canonical(
                spec_of(outer="plain")
                .canonical()
                .decode()
                .replace('"consensus":1.0', '"consensus":3.0')
            )
    with pytest.raises(ValueError, match=r"not known\. There are nesterov, noloco"):
        spec_of(outer="plain")


def test_an_order_of_candidates(dataset):
    by_name = ByName()
    with registered(PAIRINGS, "by-name", by_name):
        learned(spec_of(pairing="by-name"), dataset, peers=4)
    assert by_name.asked > 4


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
        assert reckon(spec, gpu=False).host["optimizer"] > 0
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
