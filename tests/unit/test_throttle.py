"""What must hold for limits of bandwidth: a rate is kept over all streams together, and can be changed at any time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.exchange.throttle import SHORTEST_PIECE, Throttle, TokenBucket

sizes = st.lists(st.integers(1, 10**6), min_size=1, max_size=50)
pauses = st.floats(0.0, 5.0, allow_nan=False)


@given(sizes, st.floats(1.0, 1e9), st.data())
def test_no_stretch_of_time_carries_more_than_the_rate_and_one_piece(counts, rate, data):
    bucket, now, passed = TokenBucket(rate), 0.0, []
    for count in counts:
        now += data.draw(pauses)
        passed.append((now + bucket.take(count, now), count))
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            end = passed[last][0]
            carried = sum(count for _, count in passed[first:last])
            assert carried <= rate * (end - begin) * (1 + 1e-9) + 1.0


def test_a_link_that_was_idle_allows_no_burst():
    bucket = TokenBucket(100.0)
    assert bucket.take(100, now=1000.0) == 0.0
    assert bucket.take(100, now=1000.0) == 1.0
    assert bucket.take(100, now=2000.0) == 0.0
    assert bucket.take(100, now=2000.0) == 1.0


def test_without_a_rate_nobody_waits():
    bucket = TokenBucket(None)
    assert [bucket.take(10**12, now=5.0) for _ in range(3)] == [0.0] * 3


@pytest.mark.parametrize("rate", [1e3, 1e5, 1e7])
def test_pieces_are_short_where_the_link_is_slow(rate):
    piece = Throttle(rate).piece(256 * 1024)
    assert piece == min(256 * 1024, max(SHORTEST_PIECE, rate * 0.1))
    assert Throttle().piece(256 * 1024) == 256 * 1024


async def test_who_waits_goes_on_when_the_owner_lifts_the_limit():
    throttle = Throttle(1.0)
    await throttle.pass_(10**6)
    waiting = asyncio.create_task(throttle.pass_(1))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done, "a million bytes at one a second are not paid for yet"
    throttle.allow(None)
    async with asyncio.timeout(10.0):
        await waiting
        await throttle.pass_(10**12)
    assert throttle.total == 10**6 + 1 + 10**12


async def test_streams_share_one_rate():
    now = 0.0
    throttle = Throttle(100.0, clock=lambda: now)
    waits = [throttle._bucket.take(50, now) for _ in range(4)]
    assert waits == [0.0, 0.5, 1.0, 1.5]
