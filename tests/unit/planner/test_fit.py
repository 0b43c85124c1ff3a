"""What must hold for the memory of a GPU in a plan: the largest micro-batch that fits is named, or
the first change after which one does."""

import pytest

from lowcomm_node.planner.fit import fit, with_adapter
from lowcomm_node.planner.line import run_of_parameters
from lowcomm_node.planner.words import fit_in_words
from lowcomm_node.trainer.memory import GIB, estimate_memory
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_protocol.spec.run import RunSpec

WHOLE = run_of_parameters("300M", 1)
ADAPTED = with_adapter(run_of_parameters("300M", 1), 16, None)


def bytes_of(spec: RunSpec, cut: Cut, form: str = "fp32", gpus: int = 1) -> int:
    return estimate_memory(spec, True, cut=cut, form=form, ranks=gpus).device_bytes


@pytest.mark.parametrize("windows", [1, 3, 8])
def test_the_largest_micro_batch_that_fits_is_named(windows: int) -> None:
    found = fit(ADAPTED, bytes_of(ADAPTED, Cut(windows)))
    assert (found.windows, found.recompute, found.changes) == (windows, False, {})
    assert found.gpu_bytes == bytes_of(ADAPTED, Cut(windows))
    assert f"hold it: {windows} of the 8 windows" in fit_in_words(found)
    assert 2.8e6 < found.trained < 2.9e6 < 290e6 < found.parameters


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_several_gpus_hold_together_what_one_does_not(gpus: int) -> None:
    needed = bytes_of(WHOLE, Cut(1, True), gpus=gpus)
    one, found = fit(WHOLE, needed), fit(WHOLE, needed, gpus=gpus)
    assert one.windows is None and "captures and merges" in one.parts
    assert found.windows and found.recompute and found.gpu_bytes <= needed
    text = fit_in_words(found)
    assert f"{gpus} GPUs of" in text and "memory of each GPU" in text
    assert (
        f"hold it: {found.windows} of the {-(-8 // gpus)} windows that each has of a step" in text
    )
    roomy = fit(WHOLE, 10**12, gpus=gpus)
    assert roomy.windows == -(-8 // gpus) and roomy.parts["captures and merges"] == 0


NF4, RANK_128 = with_adapter(ADAPTED, None, "nf4"), with_adapter(ADAPTED, 128, "nf4")


@pytest.mark.parametrize(
    ("spec", "form", "changes", "changed", "form_then"),
    [
        (ADAPTED, "fp32", {"base": "int8"}, with_adapter(ADAPTED, None, "int8"), "fp32"),
        (ADAPTED, "fp32", {"base": "nf4"}, NF4, "fp32"),
        (NF4, "fp32", {"moments": "int8"}, NF4, "int8"),
        (RANK_128, "int8", {"rank": 64}, with_adapter(RANK_128, 64, None), "int8"),
        (ADAPTED, "fp32", {"base": "nf4", "moments": "int8"}, NF4, "int8"),
        (WHOLE, "fp32", {"moments": "int8"}, WHOLE, "int8"),
        (WHOLE, "fp32", {"adapter": "bf16"}, with_adapter(WHOLE, 16, None), "fp32"),
    ],
)
def test_the_first_change_that_makes_it_fit_is_named(
    spec: RunSpec, form: str, changes: dict[str, object], changed: RunSpec, form_then: str
) -> None:
    needed = bytes_of(changed, Cut(1, True), form_then)
    found = fit(spec, needed, form)
    assert found.windows is None and found.gpu_bytes > needed
    assert (found.changes, found.changed_bytes) == (changes, needed)
    text = fit_in_words(found)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(str(value) in text for value in changes.values())
    assert fit(spec, needed - 1, form).changes != changes


def test_where_nothing_helps_it_says_so() -> None:
    found = fit(ADAPTED, GIB)
    assert (found.windows, found.changes, found.changed_bytes) == (None, {}, None)
    assert "take a smaller model" in fit_in_words(found)


def test_a_shorter_context_helps_where_activations_are_most() -> None:
    spec = with_adapter(run_of_parameters("100M", 1), 16, "nf4")
    long = spec.model_copy(update={"model": spec.model.model_copy(update={"context": 65_536})})
    most = bytes_of(long, Cut(1, True), "int8")
    assert fit(long, most - 1, "int8").changes == {"context": 32_768}
