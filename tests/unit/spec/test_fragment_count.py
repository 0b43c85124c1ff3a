"""What must hold for ``fragments = "auto"``: a signed run holds a number, whose fragments are small
enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.cli.creator import parameters_of
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import (
    MOST_VALUES,
    VALUES,
    fragment_count,
    parse_canonical,
    parse_toml,
)

RUN = """
[run]
name = "auto"
[model]
width = 768
heads = 12
feed_forward = 2048
layers = 12
vocab = 32000
tied = true
[sync]
method = "lowcomm"
interval = 16
fragments = "auto"
"""


@given(st.integers(1, 10**11), st.integers(1, 4096), st.integers(1, 8))
def test_no_fragment_is_too_large_and_no_two_are_due_at_once(parameters, interval, least):
    try:
        count = fragment_count(parameters, interval, least)
    except SpecError:
        assert parameters > interval * MOST_VALUES
        return
    assert 1 <= count <= interval and parameters <= count * MOST_VALUES
    assert count in (min(least, interval), interval) or parameters > (count - 1) * VALUES


def test_the_document_of_a_run_holds_the_number():
    spec = parse_toml(RUN, parameters=parameters_of)
    assert spec.sync.fragments == 7
    assert parse_canonical(spec.canonical().decode()).sync.fragments == 7
    written = parse_toml(RUN.replace('fragments = "auto"', "fragments = 7"))
    assert written.canonical() == spec.canonical(), "who writes the number gets the same run"


def test_too_few_steps_and_a_machine_that_does_not_know_models_are_told_what_to_do():
    large = RUN.replace("width = 768", "width = 6144").replace("interval = 16", "interval = 4")
    with pytest.raises(SpecError, match=r"in interval = 4 fragments .* set interval = \d+ or more"):
        parse_toml(large, parameters=parameters_of)
    with pytest.raises(SpecError, match="publish the run with one, or set a"):
        parse_toml(RUN)
