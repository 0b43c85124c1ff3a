"""What must hold for the swarm step."""

from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.plan import SwarmClock, is_supported, largest_jump

STEPS = st.integers(0, 10**9)


@given(STEPS, st.lists(st.one_of(st.none(), STEPS), max_size=30))
def test_the_clock_never_goes_back_and_a_tick_is_one(start, observations):
    clock = SwarmClock(start)
    for seen in observations:
        before = clock.step
        after = clock.tick() if seen is None else clock.observe(seen)
        assert after == clock.step == (before + 1 if seen is None else max(before, seen))


@given(STEPS, STEPS, st.lists(STEPS, max_size=5), st.integers(0, 1000))
def test_a_claim_holds_up_to_the_jump_beyond_the_most_advanced(claim, own, others, jump):
    ahead = max([own, *others])
    assert is_supported(claim, own, others, jump) == (claim <= ahead + jump)
    assert is_supported(ahead + jump, own, iter(others), jump)
    assert not is_supported(ahead + jump + 1, own, others, jump)


def test_who_merged_with_nobody_for_long_believes_whom_it_meets_as_many_steps_more():
    assert largest_jump(20, alone=25) == largest_jump(20) == 200, "in company nothing changes"
    assert is_supported(9 * 1000, 1000, [], largest_jump(20, alone=1000))
    assert not is_supported(9 * 1000 + 1, 1000, [], largest_jump(20, alone=1000))


def test_a_short_pause_of_one_of_two_peers_is_no_lie_however_short_the_interval():
    assert largest_jump(4) == 200
    assert largest_jump(100) == 1000
    assert is_supported(1150, 1000, [], largest_jump(4))
    assert not is_supported(10**9, 1000, [], largest_jump(4))
