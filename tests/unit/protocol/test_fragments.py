"""What must hold for a fragment plan: every value once, similar sizes, the same plan everywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.errors import PlanError
from lowcomm_protocol.plan import (
    Fragment,
    Slice,
    TensorSpec,
    offset,
    plan_fragments,
    sync_index,
)
from lowcomm_protocol.rows import gather, scatter

PATTERNS = ("strided", "sequential")


def transformer(
    layers: int, vocab: int = 300, width: int = 16, tied: bool = True
) -> list[TensorSpec]:
    specs = [TensorSpec("embed", (vocab, width), None, "embedding", "tokens")]
    for layer in range(layers):
        specs += [
            TensorSpec(f"h.{layer}.norm", (width,), layer, "block"),
            TensorSpec(f"h.{layer}.attention", (4 * width, width), layer, "block"),
            TensorSpec(f"h.{layer}.mlp", (width, 8 * width), layer, "block"),
        ]
    head = TensorSpec("head", (vocab, width), None, "head", "tokens" if tied else None)
    return [*specs, TensorSpec("norm", (width,), None, "norm"), head]


def memory(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    return {
        one.name: stored.setdefault(one.storage or one.name, torch.zeros(one.shape))
        for one in specs
    }


def homes(plan) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for fragment in plan.fragments:
        for part in fragment.slices:
            found.setdefault(part.tensor, set()).add(fragment.index)
    return found


def imbalance(plan) -> float:
    return max(one.numel for one in plan.fragments) * len(plan.fragments) / plan.numel


@st.composite
def models(draw) -> list[TensorSpec]:
    specs = []
    for number in range(draw(st.integers(1, 9))):
        role = draw(st.sampled_from(["embedding", "block", "block", "norm", "head"]))
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        layer = draw(st.integers(0, 5)) if role == "block" else None
        specs.append(TensorSpec(f"t{number}", shape, layer, role))
    return specs


@given(specs=models(), data=st.data(), pattern=st.sampled_from(PATTERNS))
def test_every_value_lies_in_exactly_one_fragment_and_none_is_empty(specs, data, pattern):
    rows = sum(one.shape[0] if one.shape else 1 for one in specs)
    count = data.draw(st.integers(1, rows))
    plan = plan_fragments(specs, count, pattern)
    tensors = memory(specs)
    assert [one.index for one in plan.fragments] == list(range(count))
    for fragment in plan.fragments:
        assert fragment.numel > 0
        assert all(part.stop > part.start for part in fragment.slices)
        vector = torch.empty(fragment.numel)
        gather(fragment, tensors, vector)
        scatter(fragment, vector + 1, tensors)
    assert all((tensor == 1).all() for tensor in tensors.values())
    assert plan.numel == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_tied_tensors_are_sent_once_under_the_first_name(pattern, count):
    specs = transformer(6)
    plan = plan_fragments(specs, count, pattern)
    assert "head" not in homes(plan)
    assert plan.numel == sum(one.numel for one in specs if one.name != "head")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "layers, vocab", [(12, 3000), (12, 20), (13, 1300), (24, 100), (2, 5000), (4, 256)]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24])
def test_the_largest_fragment_is_at_most_a_quarter_above_the_mean_where_layers_permit(
    tied, pattern, layers, vocab, count
):
    specs = transformer(layers, vocab, tied=tied)
    plan = plan_fragments(specs, count, pattern)
    layer = sum(one.numel for one in specs if one.layer == 0)
    whole = -(-layers // count) * layer if count <= layers else 0
    assert imbalance(plan) <= max(1.25, whole * count / plan.numel) + 0.001
    if count > layers:
        assert max(one.numel for one in plan.fragments) <= plan.numel / count + 128  # one row


def test_the_plan_and_its_digest_are_fixed():
    specs = [
        TensorSpec("a", (3, 2), None, "embedding"),
        TensorSpec("b", (4,), 0, "block"),
        TensorSpec("c", (), 1, "block"),
    ]
    plan = plan_fragments(specs, 2, "strided")
    assert plan.fragments == (
        Fragment(0, (Slice("a", 0, 1, 2), Slice("b", 0, 4, 4))),
        Fragment(1, (Slice("a", 1, 3, 4), Slice("c", 0, 1, 1))),
    )
    assert plan.digest == "3678f2a5e78bdce5e45934b4a314631b338a807d189de818971af6801c64e558"


@pytest.mark.parametrize(
    ("specs", "count", "pattern", "message"),
    [
        (transformer(2), 0, "strided", "0 fragments"),
        (
            [TensorSpec("a", (3, 9), None, "head")],
            4,
            "strided",
            "4 fragments of a model with 3 rows",
        ),
        ([], 1, "strided", "0 rows"),
        (transformer(2), 2, "random", "'random'"),
        ([TensorSpec("a", (3,), None, "norm")] * 2, 1, "strided", "'a' is listed twice"),
        ([TensorSpec("a", (3, 0), None, "norm")], 1, "strided", "holds nothing"),
        ([TensorSpec("a", (3,), None, "block")], 1, "strided", "no layer"),
        (
            [TensorSpec(n, s, None, "norm", "x") for n, s in (("a", (6,)), ("b", (2, 3)))],
            1,
            "strided",
            "one shape",
        ),
    ],
)
def test_plans_that_can_not_be_made_are_refused(specs, count, pattern, message):
    with pytest.raises(PlanError, match=message):
        plan_fragments(specs, count, pattern)


@given(count=st.integers(1, 50), interval=st.integers(1, 500), data=st.data())
def test_offsets_are_those_of_the_paper(count, interval, data):
    index = data.draw(st.integers(0, count - 1))
    assert offset(index, count, interval) == round(interval * (index + 1) / count) % interval


@given(count=st.integers(1, 9), interval=st.integers(1, 40), data=st.data())
def test_the_sync_index_grows_exactly_when_a_fragment_is_due(count, interval, data):
    index = data.draw(st.integers(0, count - 1))
    for step in range(1, 3 * interval):
        grown = sync_index(step, index, count, interval) - sync_index(
            step - 1, index, count, interval
        )
        assert grown == ((step - offset(index, count, interval)) % interval == 0)


FRAGMENT = Fragment(0, (Slice("a", 1, 3, 4), Slice("scalar", 0, 1, 1), Slice("bias", 2, 5, 3)))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(8.0).reshape(2, 4).T,  # not contiguous
        "scalar": torch.tensor(50.0, dtype=torch.bfloat16),
        "bias": torch.nn.Parameter(torch.arange(5.0) * 10),
    }


def test_gather_and_scatter_go_row_by_row_through_any_layout_and_dtype():
    model, vector = tensors(), torch.zeros(8)
    gather(FRAGMENT, model, vector)
    assert vector.tolist() == [1, 5, 2, 6, 50, 20, 30, 40]
    scatter(FRAGMENT, -vector, model)
    assert model["a"].T.tolist() == [[0, -1, -2, 3], [4, -5, -6, 7]]
    assert model["scalar"].item() == -50
    assert model["bias"].tolist() == [0, 10, -20, -30, -40]


@pytest.mark.parametrize(
    "vector",
    [
        torch.zeros(7),
        torch.zeros(9),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(2, 4),
        torch.zeros(16)[::2],
    ],
    ids=["short", "long", "float64", "2-D", "strided"],
)
def test_vectors_that_do_not_fit_the_fragment_are_refused(vector):
    with pytest.raises(PlanError, match=r"pass contiguous float32 of shape \(8,\)"):
        gather(FRAGMENT, tensors(), vector)
    with pytest.raises(PlanError, match=r"pass contiguous float32 of shape \(8,\)"):
        scatter(FRAGMENT, vector, tensors())


@pytest.mark.parametrize(
    "change",
    [{"bias": torch.zeros(shape)} for shape in ((4,), (5, 2), (3, 3), ())] + [{"bias": None}],
    ids=["few rows", "wide rows", "few and wide rows", "no rows", "missing"],
)
def test_models_that_do_not_fit_the_fragment_are_refused_before_anything_is_written(change):
    model, vector = tensors() | change, torch.full((8,), 9.0)
    before = model["a"].clone()
    with pytest.raises(PlanError, match="'bias'"):
        scatter(FRAGMENT, vector, model)
    assert torch.equal(model["a"], before)
    with pytest.raises(PlanError, match="'bias'"):
        gather(FRAGMENT, model, vector)
    assert (vector == 9.0).all()
