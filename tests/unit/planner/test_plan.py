"""What a plan says of each method, which one it takes, and how far it goes beyond measurements."""

from dataclasses import replace

import pytest

from lowcomm_node.planner.plan import Plan, choice_of, plan, with_method
from lowcomm_node.planner.question import Line, Question, run_of
from lowcomm_node.planner.words import interval_in_words, plan_in_words
from lowcomm_protocol.spec.run import RunSpec

MBIT = 1e6 / 8


def question(
    parameters: int = 10**7, mbit: float = 20.0, step: float = 1.0, peers: int = 4
) -> Question:
    line = Line(up=mbit * MBIT, down=5 * mbit * MBIT, latency=0.05)
    return Question(spec=run_of(parameters, peers), line=line, step_seconds=step, peers=peers)


@pytest.fixture(scope="module")
def told() -> Plan:
    return plan(question(), from_file=False)


def test_each_fits_the_line_as_the_plan_would_write_it(told: Plan) -> None:
    for choice in told.choices:
        again = choice_of(
            replace(
                question(),
                spec=with_method(question().spec, choice.method, choice.optimizer, choice.settings),
            )
        )
        assert again.as_written, choice.method
        assert again.exchange == choice.exchange


def test_a_run_that_does_not_fit_is_told_with_the_interval_that_results() -> None:
    spec = RunSpec.model_validate(
        {"run": {"name": "a"}, "model": run_of(10**7, 2).model, "sync": {"method": "lowcomm"}}
    )
    asked = replace(question(mbit=1.0, step=0.5), spec=spec)
    written = plan(asked, from_file=True).as_written
    assert written.written == 5
    assert written.interval > 40
    assert "this line makes it every" in interval_in_words(written)
    wide = choice_of(replace(asked, line=Line(up=1e9, down=1e9, latency=0.0), step_seconds=5.0))
    assert interval_in_words(wide) is None


def test_a_plan_says_in_words_how_far_it_goes_beyond_what_was_measured() -> None:
    said = plan(question(10**9, mbit=1.0, step=1.0, peers=24), from_file=False)
    assert [one.partition(":")[0] for one in said.beyond] == [
        "model",
        "peers",
        "interval",
        "length",
    ]
    assert "nobody knows" in said.reason


def test_it_is_read_without_a_terminal_in_80_columns() -> None:
    for parameters in (10**6, 10**9):
        text = plan_in_words(plan(question(parameters, mbit=1.0), from_file=False))
        assert text.replace("\n", "").isprintable()
        assert max(map(len, text.splitlines())) <= 80
