"""A model of so many parameters, and numbers as people write them."""

import pytest

from lowcomm_node.planner.question import count, model_of, read_parameters


@pytest.mark.parametrize(
    "text, number",
    [("234k", 234_000), ("10M", 10_000_000), ("1.3B", 1_300_000_000), ("500000", 500_000)],
)
def test_parameters_are_read_as_people_write_them(text: str, number: int) -> None:
    assert read_parameters(text) == number


@pytest.mark.parametrize("text", ["", "1", "99k", "1G", "10m", "-1M", "nan", "900B", "1e9"])
def test_what_is_no_number_of_parameters_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write such as 10M"):
        read_parameters(text)


@pytest.mark.parametrize("wanted", [100_000, 10**6, 10**7, 10**8, 10**9, 7 * 10**9, 2 * 10**11])
def test_a_model_has_about_so_many_parameters_and_a_usual_shape(wanted: int) -> None:
    model = model_of(wanted)
    assert count(model) == pytest.approx(wanted, rel=0.25)
    assert 32 <= model.width / model.layers <= 128
