"""What is checked between nodes can fail: a check that finds nothing anywhere would let everything
pass."""

from typing import Any

import pytest
from invariants import MAX_FAR_APART, violations


def told(
    outcome: str, partner: str = "", reason: str = "", in_doubt: bool = False
) -> dict[str, Any]:
    """An exchange as a node prints it."""
    partners = [partner] if partner else []
    return {
        "event": f"exchange.{outcome}",
        "outcome": outcome,
        "partners": partners,
        "reason": reason,
        "in_doubt": in_doubt,
    }


APPLIED = {one: [told("applied", other)] * 9 for one, other in (("a", "b"), ("b", "a"))}


def test_two_that_applied_the_same_violate_nothing():
    assert violations(APPLIED) == []


def test_what_one_has_applied_and_the_other_has_not_is_found():
    (found,) = violations(APPLIED | {"b": APPLIED["b"][MAX_FAR_APART + 1 :]})
    assert "a applied 9 with b, which applied 6" in found


def test_what_is_in_doubt_or_was_cut_off_by_a_kill_is_no_violation():
    few = APPLIED["b"][MAX_FAR_APART + 1 :]
    assert violations(APPLIED | {"b": [*few, told("failed", "a", "broke", in_doubt=True)]}) == []
    assert violations(APPLIED | {"b": few}, disturbed=["b"]) == []


@pytest.mark.parametrize(
    "event",
    [told("failed", "b"), told("applied"), {"event": "evaluated", "loss": float("nan")}],
    ids=["no reason", "nobody", "no number"],
)
def test_what_one_node_must_not_tell_is_found(event: dict[str, Any]):
    assert len(violations({"a": [event]})) == 1
