"""What `plan` knows of methods is what the committed results say."""

import pytest

from helpers.scripts import load_benchmark


def test_the_shares_that_the_package_brings_are_those_of_the_results() -> None:
    script = load_benchmark("measured_shares")
    assert script.OUT.read_text() == script.content(), "run `python benchmarks/measured_shares.py`"


def test_rows_that_only_show_what_limits_a_method_are_no_points_of_a_plan() -> None:
    script = load_benchmark("measured_shares")
    points = [one for one in script.of_shares() if one["method"] == "lowcomm"]
    assert {(one["interval"], one["sync"].get("codec", "mod4")) for one in points} == {
        (4, "mod3"),
        (4, "mod4"),
        (5, "mod4"),
        (21, "mod4"),
        (52, "mod4"),
        (69, "mod4"),
        (250, "mod4"),
    }


def test_a_row_is_taken_that_keeps_more_on_the_seeds_that_both_have() -> None:
    keeps_more = load_benchmark("measured_shares").keeps_more
    three = {0: 0.45, 1: 0.47, 2: 0.53}
    assert keeps_more({0: 0.46}, three), "by luck of a seed it is below the other's mean"
    assert not keeps_more({2: 0.5}, three), "by luck of a seed it is above the other's mean"
    assert keeps_more(three, {2: 0.53}), "as much, on more seeds"
    assert keeps_more(three, {7: 0.9}), "nothing in common: more seeds"
    assert not keeps_more({7: 0.9}, three)


def a_point(**what: object) -> dict[str, object]:
    alike = {"optimizer": "muon", "method": "lowcomm", "peers": 4}
    return alike | {"interval": 69, "steps": 2800, "shares": {0: 0.5}} | what


@pytest.mark.parametrize(
    ("rare", "is_left_out"),
    [
        ({"interval": 52, "shares": {0: 0.3}}, True),
        ({"interval": 69, "shares": {0: 0.44}}, True),
        ({"interval": 52, "shares": {0: 0.46}}, False),
        ({"interval": 21, "shares": {0: 0.6}}, False),
        ({"interval": 100, "shares": {0: 0.3}}, False),
        ({"interval": 52, "shares": {0: 0.3}, "peers": 8}, False),
        ({"interval": 52, "shares": {0: 0.3}, "optimizer": "adamw"}, False),
        ({"interval": 52, "shares": {0: 0.3}, "steps": 2800}, False),
    ],
    ids=[
        "rarer",
        "as rare",
        "nearly as much",
        "keeps more",
        "rarest",
        "other peers",
        "other optimizer",
        "as long",
    ],
)
def test_a_short_run_is_left_out_where_a_longer_one_kept_more_with_exchanges_as_rare(
    rare: dict[str, object], is_left_out: bool
) -> None:
    beats = load_benchmark("measured_shares").beats
    assert beats(a_point(), a_point(steps=1000) | rare) == is_left_out
