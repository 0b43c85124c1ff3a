"""What must hold for the norm and the direction of a contribution."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.trainer.judging import (
    GROWTH,
    MAX_CLAIM,
    MAX_LONE,
    MIN_COSINES,
    PLAUSIBLE,
    RECENT,
    Bound,
    Directions,
    UsualNorm,
    believed_steps,
    growth,
    plausible_norm,
)
from lowcomm_protocol.errors import ImplausibleError, Offence


def test_what_is_usual_is_the_lower_median_of_what_each_peer_brought_last():
    usual = UsualNorm()
    assert usual.value == 0.0
    usual.saw("liar", 100.0)
    assert usual.value == 0.0, "one alone could be the liar"
    usual.saw("honest", 1.0)
    assert usual.value == 1.0
    for _ in range(9):
        usual.saw("liar", 1000.0)
        usual.saw("liar", math.nan)
        usual.saw("liar", math.inf)
    assert usual.value == 1.0, "the same peer counts once, however often it tries"
    usual.saw("far", 5.0)
    assert usual.value == 5.0, "two of three are far away: so we are"


def test_a_partner_that_always_brings_as_much_as_it_may_does_not_raise_what_it_may_for_ever():
    usual, bounds = UsualNorm(), []
    for _ in range(200):
        bounds.append(plausible_norm(1.0, usual.value))
        usual.saw("liar", bounds[-1])
        usual.applied(bounds[-1], own=1.0)
    assert max(bounds) <= PLAUSIBLE * MAX_LONE and usual.learned == 1.0
    assert bounds[-1] == bounds[100], "it has levelled off"


def test_an_applied_norm_is_usual_up_to_what_our_own_made_plausible():
    for norm in (1000.0, PLAUSIBLE * 10.0):
        usual = UsualNorm(100.0)
        usual.applied(norm, own=10.0)
        assert usual.learned == plausible_norm(10.0, 0.0)


def test_what_was_applied_of_late_is_usual_where_half_of_it_agrees():
    usual = UsualNorm()
    usual.applied(5.0, own=5.0)
    assert usual.value == 5.0, "the first one"
    for _ in range(RECENT):
        usual.applied(2.0, own=5.0)
    assert usual.value == 2.0
    for _ in range(RECENT):
        usual.applied(5.0, own=3.0)
    assert usual.value == 3.0


def test_a_liar_that_comes_while_our_progress_is_large_has_no_larger_bound_from_then_on():
    usual = UsualNorm()
    assert plausible_norm(34.0, usual.value) > 81.0, (
        "five steps after the start of a run nobody can tell"
    )
    usual.saw("liar", 81.0)
    usual.applied(81.0, own=34.0)
    usual.saw("honest", 3.0)
    usual.applied(3.0, own=4.0)
    usual.saw("liar", 75.0)
    assert plausible_norm(4.0, usual.value) < 30.0


def test_who_claims_to_have_trained_for_longer_may_bring_more_up_to_a_bound():
    assert believed_steps(20, 0, 20, False) == 20
    assert believed_steps(20, -15, 20, False) == 20, "who has trained less makes us no smaller"
    assert believed_steps(20, 10, 20, False) == 30
    assert believed_steps(20, 10**9, 20, False) == 20 * MAX_CLAIM
    assert believed_steps(60, 10**9, 20, False) == 60 * MAX_CLAIM
    assert believed_steps(20, 10**9, 20, False, most=200) == 200, "as far as any honest peer can be"
    assert believed_steps(2, 0, 20, False) == 20, (
        "who has just synced expects a whole interval of others"
    )
    assert believed_steps(2, 0, 20, True) == 2, "but not in the first interval"


def test_progress_grows_with_the_learning_rates_of_its_steps():
    assert growth(20.0, 20.0) == growth(20.0, 5.0) == growth(1.0, 0.0) == 1.0
    assert growth(20.0, 30.0) == pytest.approx(1.5**GROWTH)
    warming_up = [sum(range(1, steps + 1)) for steps in (3, 20)]
    assert growth(*warming_up) > 2 * growth(3, 20), (
        "the norm of 20 steps of warm-up where ours has 3"
    )


@given(st.floats(0, 1e30), st.floats(0, 1e30), st.floats(1, 100), st.floats(1, 100))
def test_whatever_is_known_no_norm_that_is_none_is_plausible(own, usual, grows, claims):
    for norm in (math.nan, math.inf):
        with pytest.raises(ImplausibleError) as refused:
            Bound(own, usual, grows, claims).check(norm)
        assert refused.value.deed is Offence.HEAVY


@pytest.mark.parametrize(
    ("norm", "deed", "realigning_deed"),
    [
        (6.0, "", ""),
        (6.1, None, None),
        (12.0, None, None),
        (12.1, Offence.STUMBLE, Offence.STUMBLE),
        (36.0, Offence.STUMBLE, Offence.STUMBLE),
        (36.1, Offence.HEAVY, Offence.STUMBLE),
        (math.inf, Offence.HEAVY, Offence.HEAVY),
        (math.nan, Offence.HEAVY, Offence.HEAVY),
    ],
)
def test_what_a_norm_beyond_the_bound_costs(
    norm: float, deed: Offence | str | None, realigning_deed: Offence | str | None
):
    for realigns, costs in ((False, deed), (True, realigning_deed)):
        bound = Bound(
            own=1.0, usual=0.0, growth=2.0, claimed_growth=4.0, heavy=3.0, realigns=realigns
        )
        try:
            bound.check(norm)
        except ImplausibleError as error:
            assert error.deed == costs and "limit 6)" in str(error)
        else:
            assert costs == ""


def refused_at(directions: Directions, peer: str, cosine: float, tries: int = 30) -> int | None:
    """At which contribution with this cosine a peer is refused, if at all."""
    for number in range(1, tries + 1):
        try:
            directions.check(peer, cosine)
        except ImplausibleError as error:
            assert error.deed is None, "it is held against nobody"
            return number
    return None


@pytest.mark.parametrize(
    ("cosine", "at"),
    [
        (1.0, None),
        (0.0, None),
        (-0.05, None),
        (-0.07, MIN_COSINES),
        (-0.24, MIN_COSINES),
        (-0.26, 1),
        (-1.0, 1),
    ],
)
def test_who_points_against_us_is_refused_at_once_and_who_does_so_a_little_once_it_is_clear(
    cosine: float, at: int | None
):
    assert refused_at(Directions(), "b", cosine) == at
