"""What must hold for attention within documents: a replica keeps to the run's setting and to its
tokenizer's separator, and a run that can't have it is refused with the remedy."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lowcomm_node import models
from lowcomm_node.data import Dataset, Split, open_tokenizer
from lowcomm_node.data.stream import IGNORED
from lowcomm_node.data.tokenizer import BytesTokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Family, Footprint
from lowcomm_node.models.documents import Flex, attend, document_mask, document_starts
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import ModelSettings

CPU = torch.device("cpu")


class NoSeparator(BytesTokenizer):
    separator = None


class Blind(Family):
    def footprint(self, settings: ModelSettings) -> Footprint:
        return Footprint(Counter(), 0, kept=0, passing=0, vocab=settings.vocab)

    def build(self, settings: ModelSettings, seed: int) -> models.base.Model:
        raise AssertionError("built")


def spec_of(kind: str = "transformer", masked: bool = True) -> RunSpec:
    model = {"kind": kind, "context": 16}
    train = {"document_mask": masked, "batch": 2}
    return RunSpec.model_validate({"run": {"name": "a"}, "model": model, "train": train})


def dataset() -> Dataset:
    """Documents of seven bytes and a separator."""
    tokens = torch.arange(1, 801) % 8 * 30
    split = Split(tokens.numpy().astype("uint16"), 256)
    return Dataset("sevens", open_tokenizer("bytes"), split, split)


def test_documents_begin_behind_separators() -> None:
    tokens = torch.tensor([[5, 0, 5, 5, 0, 0, 5], [0, 5, 5, 5, 5, 5, 0]])
    starts = [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert document_starts(tokens, 0).tolist() == starts


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_both_kinds_of_mask_let_a_token_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flex, "mask", create_block_mask)  # not compiled
    monkeypatch.setattr(Flex, "attention", flex_attention)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 200, 16, generator=draw) for heads in (4, 2, 2))
    starts = document_starts(torch.randint(30, (2, 200), generator=draw), 3)
    added, blocks = (
        attend(query, key, value, document_mask(starts, query.dtype, kind), True)
        for kind in (False, True)
    )
    torch.testing.assert_close(blocks, added)


def test_a_replica_trains_within_documents_where_the_run_says_so() -> None:
    within, beyond = (Replica(spec_of(masked=on), "a", dataset(), CPU) for on in (True, False))
    losses = [[one.inner_step() for _ in range(2)] for one in (within, beyond)]
    assert within.model.separator == 0 and beyond.model.separator is None
    assert losses[0][0] != losses[1][0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_batch_without_learned_targets_teaches_nothing_and_harms_nothing(optimizer: str) -> None:
    train = spec_of().train.model_copy(update={"optimizer": optimizer, "weight_decay": 0.0})
    replica = Replica(spec_of().model_copy(update={"train": train}), "a", dataset(), CPU)
    before, real = replica.fast(0), replica.stream.next_batch
    replica.stream.next_batch = lambda: (real()[0], torch.full((2, 16), IGNORED))
    assert replica.inner_step() == 0 and torch.equal(replica.fast(0), before)
    replica.stream.next_batch = real
    assert replica.inner_step() > 0 and replica.skipped == 0
    assert not torch.equal(replica.fast(0), before) and replica.fast(0).isfinite().all()


def test_a_run_that_no_model_or_tokenizer_can_keep_to_is_refused() -> None:
    nameless = replace(dataset(), tokenizer=NoSeparator())
    with pytest.raises(ConfigError, match=r"bytes names none: .* data.end_token .* = false"):
        Replica(spec_of(), "a", nameless, CPU)
    models.register("blind", Blind(), ModelSettings)
    try:
        with pytest.raises(ConfigError, match=r"kind 'blind' can't keep attention within .* false"):
            Replica(spec_of("blind"), "a", dataset(), CPU)
    finally:
        models.unregister("blind")
