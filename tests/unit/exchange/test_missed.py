"""What must hold where members of a group have missed outer steps: who hands them over, by the
offers of all."""

from dataclasses import replace

import pytest

from helpers.virtual import OFFER
from lowcomm_protocol.exchange.underway import KEPT, Lacking, kept, lacking, state_mark
from lowcomm_protocol.matching import Offer

STATES = [(bytes([number]) * 32, bytes([100 + number]) * 32) for number in range(9)]
MARKS = [state_mark(*state) for state in STATES]


def held(step: int, *, known: int = KEPT, round_: int = 0) -> Offer:
    """The offer of a peer that has taken so many steps, and can hand over ``known`` of them."""
    slow, momentum = STATES[step]
    previous = tuple(MARKS[max(0, step - known) : step])
    return replace(
        OFFER, slow_digest=slow, momentum_digest=momentum, previous=previous, round=round_
    )


def test_a_member_that_missed_steps_gets_as_many_from_one_that_has_them():
    found = lacking({"a": held(5), "b": held(3), "c": held(5)})
    assert found is not None
    assert (found.steps, found.donors) == ({"b": 2}, {"b": "a"})
    assert (found.slow_digest, found.momentum_digest) == STATES[5]
    assert [found.receivers(peer) for peer in "abc"] == [("b",), (), ()]


def among(*offers: Offer) -> Lacking | None:
    return lacking(dict(zip("abcdef", offers, strict=False)), is_whole=True)


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        ((held(5), held(5), held(5)), "all hold the same"),
        ((held(5), held(4)), "one is no majority: a liar could lead the other anywhere"),
        ((held(2), held(2), held(8), held(8)), "neither half leads to the other"),
        ((held(5), held(6), held(7)), "all differ"),
        ((held(5), held(5), held(5), held(8), held(8)), "two that agree are no lone liar"),
    ],
)
def test_all_realign_if_they_differ_and_most_do_not_hold_the_same(offers, why):
    assert among(*offers) is None, why


@pytest.mark.parametrize(
    ("offers", "stranded", "why"),
    [
        ((held(6), held(6), held(1)), "c", "more steps than are kept"),
        ((held(5, known=0), held(5, known=0), held(4)), "c", "both have just begun"),
        ((held(5, known=1), held(5, known=1), held(3)), "c", "both keep too few"),
        ((held(5), held(5), held(5), held(8)), "d", "nobody else holds that"),
        ((held(5), held(5), held(4), held(8)), "d", "a liar beside a member that is late"),
        ((held(5), held(5), held(8), held(7)), "cd", "both are alone"),
        ((held(4), held(4), held(5)), "c", "most are behind: they do not take the word of one"),
        ((held(5), held(5, known=0), held(5), held(4), held(3, known=0)), "", "all are served"),
    ],
)
def test_a_lone_member_that_nobody_can_serve_is_stranded_and_costs_the_others_nothing(
    offers, stranded, why
):
    found = among(*offers)
    assert found is not None
    assert found.stranded == frozenset(stranded), why
    assert not found.stranded & (found.steps.keys() | found.donors.keys())


def test_all_realign_for_a_lone_member_that_may_come_from_another_group():
    offers = {"a": held(5), "b": held(5), "c": held(8)}
    assert lacking(offers) is None
    assert lacking(offers, is_whole=True) is not None


def test_half_of_four_hand_over_to_the_other_half_what_these_lack():
    for offers in (held(5), held(5), held(4), held(4)), (held(4), held(5), held(4), held(5)):
        found = among(*offers)
        assert found is not None
        assert (found.slow_digest, found.momentum_digest) == STATES[5]
        assert sorted(found.steps.values()) == [1, 1]
        assert not found.stranded


@pytest.mark.parametrize(
    ("coded", "whole", "count"), [(10, 100, 4), (25, 100, 3), (50, 100, 1), (99, 100, 0)]
)
def test_what_is_kept_is_no_larger_than_a_realignment(coded, whole, count):
    assert kept(coded, whole) == count
    assert not count or (1 + count) * coded <= whole
