"""What must hold for the score by which peers are left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.errors import Offence
from lowcomm_protocol.peers.trust import (
    BOUND,
    FORGIVEN,
    GOOD,
    LIGHT,
    MAX_PEERS,
    MOST_AT_ONCE,
    PRICE_LASTS,
    PRICE_SECONDS,
    Trust,
)


def lasts(trust: Trust, peer: str, steps: int) -> int:
    """Steps until a peer that has just done something is let in again."""
    after = 0
    while not trust.trusts(peer, steps + after):
        after += 1
    return after


def test_an_unknown_peer_is_trusted_and_a_liar_is_not_for_an_interval():
    trust = Trust(20)
    assert trust.trusts("a", 0) and trust.score("a", 0) == 1.0
    trust.hold("a", Offence.HEAVY, 100, "lies")
    assert trust.score("a", 100) == 0.0
    assert not trust.trusts("a", 119) and list(trust.left_out(119)) == ["a"]
    assert trust.trusts("a", 120) and list(trust.left_out(120)) == []
    assert trust.trusts("b", 100)
    assert (trust.reason("a"), trust.reason("b")) == ("lies", "")


def test_who_lies_and_behaves_in_turn_is_left_out_ever_longer():
    trust, steps, costs = Trust(20), 0, []
    for _ in range(8):
        trust.hold("a", Offence.HEAVY, steps)
        costs.append(lasts(trust, "a", steps))
        steps += costs[-1]
        trust.thank("a", steps)
    assert costs == sorted(costs) and costs[-1] >= 16 * costs[0]


def test_an_honest_peer_that_was_unlucky_has_its_name_back_after_some_exchanges():
    trust = Trust(20)
    trust.hold("a", Offence.HEAVY, 0)
    trust.hold("a", Offence.HEAVY, 20)
    for number in range(8):
        trust.thank("a", 60 + number)
    trust.hold("a", Offence.HEAVY, 100)
    assert lasts(trust, "a", 100) == 20
    trust.thank("stranger", 0)
    assert len(trust) == 1, "who has done nothing wrong costs no memory"


def test_what_each_deed_and_each_exchange_changes():
    trust = Trust(20)
    one = trust.hold("a", Offence.LIGHT, 5, "late")
    assert (one.missing, one.since, one.half_life, one.heavy, one.reason) == (
        LIGHT,
        5,
        20,
        0.0,
        "late",
    )
    one = trust.hold("a", Offence.HEAVY, 5, "lies")
    assert (one.missing, one.since, one.half_life, one.heavy, one.reason) == (
        1.0,
        5,
        20,
        1.0,
        "lies",
    )
    trust.thank("a", 5)
    assert trust.score("a", 5) == pytest.approx(GOOD)
    one = trust.hold("a", Offence.HEAVY, 5)
    assert (one.heavy, one.half_life) == (pytest.approx(2.0 - GOOD), 40)
    one = trust.hold("a", Offence.LIGHT, 5)
    assert (one.missing, one.half_life) == (1.0, 40), (
        "a light deed does not shorten what is left of a heavy one"
    )
    one = trust.hold("a", Offence.LIGHT, 45)
    assert (one.missing, one.half_life) == (pytest.approx(0.5 + LIGHT), 20), (
        "who is trusted again has done its time"
    )
    for steps in (45, 0):
        assert trust.score("a", steps) == pytest.approx(1 - 0.5 - LIGHT), (
            "a clock that goes back changes no score"
        )
    assert trust.hold("a", Offence.LIGHT, 0).since == 45


@given(
    st.lists(
        st.tuples(st.sampled_from(["light", "heavy", "good"]), st.integers(0, 200)), max_size=40
    )
)
def test_a_score_is_between_0_and_1_and_never_falls_by_itself(deeds: list[tuple[str, int]]):
    trust, steps = Trust(20), 0
    for deed, after in deeds:
        before = trust.score("a", steps)
        steps += after
        assert before <= trust.score("a", steps) + 1e-12
        if deed == "good":
            trust.thank("a", steps)
        else:
            trust.hold("a", Offence(deed), steps)
        assert 0.0 <= trust.score("a", steps) <= 1.0
        assert trust.trusts("a", steps) == (trust.score("a", steps) >= BOUND)


def test_stumbles_cost_nothing_until_there_are_too_many_in_a_row():
    trust = Trust(20)
    for _ in range(3):
        assert [trust.stumbled("a") for _ in range(FORGIVEN + 2)] == [False] * FORGIVEN + [True] * 2
        trust.thank("a", 0)
    assert not trust.stumbled("b") and len(trust) == 0
    for number in range(MAX_PEERS + 1):
        trust.stumbled(f"peer{number}")
    assert [trust.stumbled("b") for _ in range(FORGIVEN)] == [False] * FORGIVEN, "forgotten"


def test_exchanges_that_wait_for_a_peer_at_the_same_time_are_one_stumble():
    """A machine that stops holds up all exchanges that are under way with it."""
    trust = Trust(20)
    for _ in range(10 * FORGIVEN):
        assert not trust.stumbled("a", seconds=10.0, usual=1.0, now=100.0)
    assert trust.lost("a") == 10 * FORGIVEN * 10.0
    assert list(trust.keeping_us(since=100.0)) == [("a", trust.lost("a"))]
    assert list(trust.keeping_us(since=101.0)) == []


def waits(trust: Trust, seconds: float, usual: float, after: float = 0.0) -> int:
    """How many waits for a peer, one after the other, are forgiven."""
    count = 0
    while not trust.stumbled("a", seconds, usual, now=after + (count + 1) * 1000.0):
        count += 1
    return count


def test_a_wait_counts_by_how_much_longer_than_usual_it_was_but_one_alone_is_no_deed():
    assert waits(Trust(20), 1.0, 1.0) == FORGIVEN
    assert waits(Trust(20), 2.0, 1.0) == FORGIVEN // 2
    assert waits(Trust(20), 300.0, 1.0) == FORGIVEN // MOST_AT_ONCE > 1


def test_the_price_of_waits_is_their_seconds_and_lasts_longer_than_they_did():
    trust = Trust(20)
    assert waits(trust, PRICE_SECONDS, PRICE_SECONDS) == FORGIVEN
    one = trust.hold("a", Offence.LIGHT, 0, step_seconds=0.5)
    lost = (FORGIVEN + 1) * PRICE_SECONDS
    assert trust.lost("a") == lost
    assert one.missing == 1.0 and one.half_life == PRICE_LASTS * lost / 0.5
    assert lasts(trust, "a", 0) * 0.5 >= lost
    assert trust.hold("b", Offence.LIGHT, 0, step_seconds=0.5).missing == LIGHT, "who cost no time"
