"""What a plan says of each method, which one it takes, and how far it goes beyond measurements."""

import pytest

from lowcomm_node.planner.line import Line, run_of_parameters
from lowcomm_node.planner.plan import OPTIMIZER, Plan, choice_of, plan, with_method
from lowcomm_node.planner.words import interval_in_words, plan_in_words
from lowcomm_protocol.spec.run import RunSpec

LINE = Line(up="20Mbit", down="100Mbit", step_seconds=1.0, peers=4)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(run_of_parameters("10M", LINE.peers), LINE, from_file=False)


def test_each_fits_the_line_as_the_plan_would_write_it(planned: Plan) -> None:
    spec = run_of_parameters("10M", LINE.peers)
    for choice in planned.choices:
        written = with_method(spec, choice.method, OPTIMIZER, choice.settings)
        assert choice_of(written, LINE) == choice
        assert interval_in_words(choice) is None, choice.method


def test_a_run_that_does_not_fit_is_told_with_the_interval_that_results() -> None:
    spec = RunSpec.model_validate(
        {
            "run": {"name": "a"},
            "model": run_of_parameters("10M", 2).model,
            "sync": {"method": "lowcomm"},
        }
    )
    line = Line(up="1Mbit", down="5Mbit", step_seconds=0.5, peers=4)
    written = plan(spec, line, from_file=True).as_written
    assert written.written == 5
    assert written.interval > 40
    assert "this line makes it every" in interval_in_words(written)
    wide = Line(up="8Gbit", down="8Gbit", step_seconds=5.0, peers=4, latency=0.0)
    assert interval_in_words(choice_of(spec, wide)) is None


def test_where_nothing_was_measured_a_plan_says_so() -> None:
    line = Line(up="1Mbit", down="5Mbit", step_seconds=1.0, peers=24)
    far = plan(run_of_parameters("1B", 24), line, from_file=False)
    assert all(choice.share is None for choice in far.choices)
    assert "nobody knows" in far.reason


def test_it_is_read_without_a_terminal_in_80_columns() -> None:
    line = Line(up="1Mbit", down="5Mbit", step_seconds=1.0, peers=4)
    for parameters in ("1M", "1B"):
        text = plan_in_words(plan(run_of_parameters(parameters, 4), line, from_file=False))
        assert text.replace("\n", "").isprintable()
        assert max(map(len, text.splitlines())) <= 80
