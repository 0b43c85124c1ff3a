"""How often fragments are really exchanged, and what is told to be why."""

import pytest

from helpers.statuses import make_exchange
from lowcomm_node.sync.history import Circumstances, interval_of

WRITTEN, FRAGMENTS = 4, 4


def around(**changes) -> Circumstances:
    usual = {
        "written": WRITTEN,
        "fragments": FRAGMENTS,
        "hindrance": None,
        "line_seconds": 0.1,
        "step_seconds": 1.0,
    }
    return Circumstances(**usual | changes)


def exchanges(every: int, outcome: str = "applied", count: int = 20, seconds: float = 0.5):
    """So many exchanges, one each ``every`` steps."""
    return [
        make_exchange(swarm_step=every * number, outcome=outcome, seconds=seconds)
        for number in range(1, count + 1)
    ]


def test_exchanges_as_often_as_the_run_says_need_no_reason() -> None:
    told = interval_of(exchanges(1), 20, around())
    assert (told.written, told.cause, told.reason) == (WRITTEN, None, "")
    assert told.effective == pytest.approx(WRITTEN)


def test_nothing_is_told_before_three_were_applied() -> None:
    assert interval_of(exchanges(1, count=2), 500, around()).effective is None


def test_a_full_line_is_why() -> None:
    told = interval_of(exchanges(3), 60, around(line_seconds=2.9))
    assert told.effective == pytest.approx(12)
    assert told.cause == "line"
    assert "2.9 s on the line" in told.reason


def test_time_without_an_exchange_counts() -> None:
    few, many = (interval_of(exchanges(1), now, around()).effective for now in (20, 80))
    assert many > few


def test_limits_of_the_owner_are_why_also_before_anything_was_applied() -> None:
    told = interval_of([], 10, around(hindrance="at the limits on traffic"))
    assert (told.cause, told.reason) == ("budget", "at the limits on traffic")


@pytest.mark.parametrize(("outcome", "cause"), [("no-partner", "partner"), ("failed", "failed")])
def test_exchanges_that_come_to_nothing_are_why(outcome: str, cause: str) -> None:
    mixed = [one for pair in zip(exchanges(4), exchanges(4, outcome), strict=True) for one in pair]
    told = interval_of(mixed, 80, around())
    assert told.cause == cause
    assert "8 of 16" in told.reason


def test_a_long_exchange_over_an_idle_line_is_why() -> None:
    told = interval_of(exchanges(2, seconds=7.5), 40, around())
    assert (told.cause, told.effective) == ("exchange", pytest.approx(8))
