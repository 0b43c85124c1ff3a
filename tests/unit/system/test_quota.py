"""Strangers get no more than is given, each and all together."""

from lowcomm_node.system.quota import MAX_CALLERS, Allowed, Quota, prefixes_of


def test_what_was_taken_comes_back_evenly():
    quota = Quota(Allowed(each=10, all=100, seconds=100.0))
    assert quota.take("a", 10, 0.0) and not quota.take("a", 1, 0.0)
    assert not quota.take("a", 6, 50.0)
    assert quota.take("a", 5, 50.0) and not quota.take("a", 1, 50.0)


def test_all_together_get_no_more_than_is_given():
    quota = Quota(Allowed(each=10, all=25, seconds=100.0))
    assert [quota.take(caller, 10, 0.0) for caller in "abc"] == [True, True, False]
    assert quota.take("c", 5, 0.0)
    # Nobody who was refused has taken anything.
    assert quota.take("d", 10, 100.0)


def test_callers_are_forgotten_before_they_fill_the_memory():
    quota = Quota(Allowed(each=1, all=10 * MAX_CALLERS, seconds=100.0))
    for number in range(MAX_CALLERS + 10):
        assert quota.take(str(number), 1, 0.0)
    assert len(quota._callers) == MAX_CALLERS
    assert not quota.take(str(MAX_CALLERS), 1, 0.0)


def test_a_household_is_one_caller():
    assert prefixes_of("203.0.113.7") == ("203.0.113.7", "203.0.113.0/24")
    one, other, next_door = map(
        prefixes_of, ("2a00:128:1:2:3::4", "2a00:128:1:2:ffff::1", "2a00:128:1:3::1")
    )
    assert one == other and one[0] != next_door[0] and one[1] == next_door[1]
    assert prefixes_of("::1") == ("::/64", "::/48")
    assert prefixes_of("12D3KooWRelay") == ("12D3KooWRelay",)
