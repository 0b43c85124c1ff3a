"""What must hold for limits of bandwidth: a rate is kept over all streams together, and can be
changed at any time."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.net.bandwidth import (
    CREDIT_SECONDS,
    FREE_FLOW,
    LEAST_WINDOW,
    MOST_WINDOW,
    Arrival,
    BandwidthLimit,
    flow_options,
    window,
)

sizes = st.lists(st.integers(1, 10**6), min_size=1, max_size=50)
pauses = st.floats(0.0, 5.0, allow_nan=False)


@given(sizes, st.floats(1.0, 1e9), st.data())
def test_no_stretch_of_time_carries_more_than_the_rate_one_piece_and_the_credit(counts, rate, data):
    now, passed = 0.0, []
    bucket = BandwidthLimit(rate, lambda: now)
    for count in counts:
        now += data.draw(pauses)
        passed.append((now + bucket.take(count)[0], count))
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            end = passed[last][0]
            carried = sum(count for _, count in passed[first:last])
            assert carried <= rate * (end - begin + CREDIT_SECONDS) * (1 + 1e-9) + 1.0


@given(sizes, st.floats(1.0, 1e9), st.data())
def test_what_is_paid_for_ahead_never_exceeds_the_rate_and_the_credit(counts, rate, data):
    now, begun, paid = 0.0, None, 0
    bucket = BandwidthLimit(rate, lambda: now)
    for count in counts:
        now += data.draw(pauses)
        begun = now if begun is None else begun
        at = now + bucket.take(count)[1]
        paid += count
        assert paid <= rate * (at - begun + CREDIT_SECONDS) * (1 + 1e-9) + 1.0


def test_a_moment_in_which_nobody_was_awake_is_made_up_for():
    now = 10.0
    bucket = BandwidthLimit(1000.0, lambda: now)
    for _ in range(100):
        # Every wait ends 30 ms late: without credit 100 pieces of 0.1 s would take 13 s.
        now += bucket.take(100)[0] + 0.03
    assert now - 10.0 == pytest.approx(100 * 0.1 - CREDIT_SECONDS, abs=0.2)


async def test_who_waits_goes_on_when_the_owner_lifts_the_limit():
    limit = BandwidthLimit(1.0)
    await limit.pass_(10**6)
    waiting = asyncio.create_task(limit.pass_(1))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done, "a million bytes at one a second are not paid for yet"
    limit.allow(None)
    async with asyncio.timeout(10.0):
        await waiting
        await limit.pass_(10**12)
    assert limit.total == 10**6 + 1 + 10**12


class Virtual(BandwidthLimit):
    """A throttle in virtual time: whoever waits moves the clock."""

    def __init__(self, rate: float | None) -> None:
        self.now = 100.0
        super().__init__(rate, clock=lambda: self.now)

    async def _wait(self, seconds: float) -> None:
        self.now += seconds


@given(st.integers(1, 10**6), st.integers(10**4, 10**6), st.sampled_from([1e4, 1e5, 1e6, 1e7]))
def test_what_comes_in_was_paid_for_before(size, message, rate):
    limit = Virtual(rate)
    arrival, came = Arrival(limit, size, 256 * 1024), 0

    async def read() -> None:
        nonlocal came
        while came < size:
            await arrival.make_room()
            count = min(message, size - came)
            arrival.took(count)
            came += count

    began = limit.now
    _drive(read)
    # The bucket has been asked for each byte once, however large messages are.
    paid = rate * (limit.now + limit.debt - began + CREDIT_SECONDS)
    assert paid == pytest.approx(max(size, 0), rel=1e-6, abs=rate * CREDIT_SECONDS + 1)
    assert limit.total == size


@given(st.floats(8e3, 1e9))
def test_windows_are_small_where_a_limit_is_and_wide_elsewhere(rate):
    assert LEAST_WINDOW <= window(rate) <= MOST_WINDOW
    assert window(rate) <= max(LEAST_WINDOW, rate / 16)
    assert dict(flow_options(rate)) == {
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": window(rate),
    }
    assert window(rate) < window(None) and flow_options(None) == FREE_FLOW


def _drive(work: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine that never really waits."""
    coroutine = work().__await__()
    with pytest.raises(StopIteration):
        next(coroutine)
