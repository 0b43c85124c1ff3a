"""What `plan` knows of methods is what the committed results say."""

from helpers.scripts import load_benchmark


def test_the_shares_that_the_package_brings_are_those_of_the_results() -> None:
    script = load_benchmark("measured_shares")
    assert script.OUT.read_text() == script.content(), "run `python benchmarks/measured_shares.py`"


def test_rows_that_only_show_what_limits_a_method_are_no_points_of_a_plan() -> None:
    script = load_benchmark("measured_shares")
    points = [one for one in script.of_shares() if one["method"] == "lowcomm"]
    assert {(one["interval"], one["sync"].get("codec", "mod4")) for one in points} == {
        (4, "mod3"),
        (5, "mod4"),
        (21, "mod4"),
        (52, "mod4"),
    }


def test_a_row_is_taken_that_keeps_more_on_the_seeds_that_both_have() -> None:
    keeps_more = load_benchmark("measured_shares").keeps_more
    three = {0: 0.45, 1: 0.47, 2: 0.53}
    assert keeps_more({0: 0.46}, three), "by luck of a seed it is below the other's mean"
    assert not keeps_more({2: 0.5}, three), "by luck of a seed it is above the other's mean"
    assert keeps_more(three, {2: 0.53}), "as much, on more seeds"
    assert keeps_more(three, {7: 0.9}), "nothing in common: more seeds"
    assert not keeps_more({7: 0.9}, three)
