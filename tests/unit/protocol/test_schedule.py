"""What must hold for when fragments are due."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.plan import FragmentProgress, SyncSchedule


def fresh(interval: int = 20, count: int = 4) -> SyncSchedule:
    return SyncSchedule(interval, [FragmentProgress() for _ in range(count)])


def settings():
    """An interval and at most as many fragments."""
    return st.integers(1, 60).flatmap(
        lambda interval: st.tuples(st.just(interval), st.integers(1, interval))
    )


def first_syncs(schedule: SyncSchedule, steps: int) -> dict[int, list[int]]:
    """The steps at which each fragment is due, when every sync is done at once."""
    found: dict[int, list[int]] = {fragment: [] for fragment in range(len(schedule))}
    for step in range(1, steps + 1):
        for fragment in list(schedule.due(step)):
            found[fragment].append(step)
            schedule.merged(fragment, step, step, step)
    return found


@given(settings())
def test_every_fragment_is_due_once_an_interval_and_no_two_at_one_step(setting):
    interval, count = setting
    found = first_syncs(fresh(interval, count), 6 * interval)
    for steps in found.values():
        assert all(later - earlier == interval for earlier, later in pairwise(steps))
        assert len(steps) == 6
    taken = [step for steps in found.values() for step in steps]
    assert len(taken) == len(set(taken))


def test_a_jump_over_several_sync_points_makes_one_sync_and_not_many():
    schedule = fresh()
    assert set(schedule.due(1000)) == {0, 1, 2, 3}
    for fragment in range(4):
        schedule.merged(fragment, 1000, 10, 10)
    assert list(schedule.due(1000)) == []


def test_a_skipped_sync_waits_for_the_next_sync_point_and_counts_as_no_merge():
    schedule = fresh(interval=20, count=1)
    step = next(step for step in range(100) if list(schedule.due(step)))
    schedule.skip(0, step)
    assert list(schedule.due(step)) == []
    assert schedule[0].version == schedule[0].merged_steps == 0
    assert list(schedule.due(step + 19)) == []
    assert list(schedule.due(step + 20)) == [0]


def test_a_fragment_that_waits_is_due_again_after_its_steps_or_at_its_next_sync_point():
    schedule = fresh(interval=20, count=1)
    dues = list[int]()
    for step in range(20, 61):
        if schedule.due(step):
            dues.append(step)
            schedule.wait(0, step, 8)
    assert dues == [20, 28, 36, 40, 48, 56, 60]
    assert schedule[0].synced == -1
    schedule.merged(0, 61, 61, 61)
    assert schedule.due_from(0) == 80, "what it has met, it waits for no more"


@given(st.lists(st.tuples(st.sampled_from(["skip", "merge"]), st.integers(0, 500)), max_size=40))
def test_the_sync_index_never_goes_back(calls):
    schedule = fresh(count=1)
    for what, step in calls:
        before = schedule[0].synced
        if what == "skip":
            schedule.skip(0, step)
        else:
            schedule.merged(0, step, step, step)
        assert schedule[0].synced == max(before, schedule.round_of(0, step))
        assert list(schedule.due(step)) == []


@pytest.mark.parametrize(
    ("steps", "intervals"), [(30, 1), (39, 1), (41, 1), (42, 2), (50, 2), (430, 40)]
)
def test_intervals_are_counted_since_the_last_merge_and_rounded(steps, intervals):
    schedule = SyncSchedule(10, [FragmentProgress(), FragmentProgress()])
    schedule.merged(0, swarm_step=90, steps=27, tokens=0)
    assert schedule.intervals_since(0, steps) == intervals
    assert schedule.intervals_since(1, steps) >= intervals, "another fragment has not met anybody"
