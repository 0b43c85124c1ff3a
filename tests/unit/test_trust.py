"""What must hold for leaving peers out."""

from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.trust import MAX_DOUBLINGS, MAX_PEERS, Trust


def test_a_stranger_is_trusted_and_a_struck_peer_is_not_for_a_while():
    trust = Trust(20)
    assert trust.trusts("a", 0)
    trust.strike("a", 100)
    assert not trust.trusts("a", 119)
    assert trust.trusts("a", 120)
    assert trust.trusts("b", 100)


def test_each_further_strike_lasts_twice_as_long():
    trust = Trust(20)
    lasting = [trust.strike("a", 0).until for _ in range(4)]
    assert lasting == [20, 40, 80, 160]
    assert trust.strikes()["a"].count == 4


@given(st.integers(1, 10**6), st.integers(0, 40))
def test_however_often_it_ends_some_time(interval, strikes):
    trust = Trust(interval)
    for _ in range(strikes):
        trust.strike("a", 0)
    assert trust.trusts("a", interval << MAX_DOUBLINGS)


def test_memory_is_bounded_and_the_newest_are_remembered():
    trust = Trust(20)
    for number in range(MAX_PEERS + 10):
        trust.strike(f"peer{number}", 0)
    trust.strike("peer10", 0)
    assert len(trust.strikes()) == MAX_PEERS
    assert trust.trusts("peer9", 0) and not trust.trusts("peer10", 0)


def test_an_exchange_that_is_applied_wipes_strikes_out():
    trust = Trust(20)
    trust.strike("a", 0)
    trust.strike("a", 20)
    trust.forgive("a")
    trust.forgive("b")
    assert trust.trusts("a", 21)
    assert trust.strike("a", 100).until == 120
