"""What must hold for the choice of a route: times are arguments, nothing is opened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.net.routes import (
    ALONE_PAUSE,
    FIRST_PAUSE,
    FLAP,
    HEAD_START,
    LONGEST_PAUSE,
    CallPlan,
    Route,
    RouteChoice,
)

DIRECT, TUNNEL = Route.DIRECT, Route.TUNNEL


@pytest.fixture
def choice() -> RouteChoice:
    return RouteChoice()


def routes_of(plan: CallPlan) -> list[Route]:
    return list(plan.attempts)


def with_dead_direct(choice: RouteChoice, now: float = 0.0) -> None:
    """The direct address is dead, the tunnel is open."""
    choice.plan(now)
    choice.failed(DIRECT, now, "did not answer")
    choice.opened(TUNNEL, now)


def test_what_is_not_known_is_tried_direct_first_and_the_tunnel_after_a_head_start(choice):
    plan = choice.plan(0.0)
    assert plan == CallPlan(use=None, attempts={DIRECT: 0.0, TUNNEL: HEAD_START})
    assert routes_of(plan) == [DIRECT, TUNNEL]


def test_else_the_tunnel_and_no_call_waits_for_direct_any_more(choice):
    choice.plan(0.0)
    choice.opened(TUNNEL, 1.0)
    assert choice.plan(1.1) == CallPlan(use=TUNNEL), "while direct is still being tried"
    choice.failed(DIRECT, 5.0, "did not answer")
    assert choice.plan(5.1) == CallPlan(use=TUNNEL)
    assert choice.reason(DIRECT) == "did not answer"


def test_a_dead_direct_address_is_tried_again_beside_the_tunnel_and_less_often_each_time(choice):
    with_dead_direct(choice)
    now, pauses = 0.0, []
    for _ in range(12):
        began = now
        while not routes_of(plan := choice.plan(now)):
            assert plan.use is TUNNEL
            now += 0.5
        assert plan == CallPlan(use=TUNNEL, attempts={DIRECT: 0.0})
        pauses.append(now - began)
        choice.failed(DIRECT, now, "did not answer")
    assert pauses[0] == FIRST_PAUSE
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == LONGEST_PAUSE


def test_a_route_that_breaks_is_verified_before_it_is_used_again(choice):
    choice.plan(0.0)
    choice.opened(DIRECT, 0.1)
    choice.dropped(TUNNEL)
    choice.lost(DIRECT, 100.0, "broke")
    plan = choice.plan(100.0)
    assert plan.use is None and routes_of(plan) == [DIRECT, TUNNEL]


def test_a_route_that_opens_but_does_not_hold_gives_way_to_the_other(choice):
    with_dead_direct(choice)
    now = FIRST_PAUSE
    for round_ in range(4):
        assert routes_of(choice.plan(now)) == [DIRECT]
        choice.opened(DIRECT, now)
        choice.lost(DIRECT, now + FLAP / 2, "reset")
        assert choice.plan(now + FLAP / 2) == CallPlan(use=TUNNEL)
        now += FLAP / 2 + FIRST_PAUSE * 2 ** (round_ + 1)


def test_when_nothing_works_each_route_is_tried_again_soon_and_the_reasons_are_told(choice):
    choice.plan(0.0)
    choice.failed(DIRECT, 5.0, "did not answer within 5 s")
    choice.failed(TUNNEL, 6.0, "has no place left")
    assert choice.plan(6.5) == CallPlan(
        use=None,
        reason="can't be reached (direct: did not answer within 5 s; tunnel: has no place left)",
    )
    assert routes_of(choice.plan(5.0 + ALONE_PAUSE)) == [DIRECT]
    assert routes_of(choice.plan(6.0 + ALONE_PAUSE)) == [TUNNEL]
    for failures in range(20):
        choice.failed(DIRECT, 100.0 * failures, "dead")
        choice.failed(TUNNEL, 100.0 * failures, "dead")
        assert routes_of(choice.plan(100.0 * failures + ALONE_PAUSE)) == [DIRECT, TUNNEL]


INPUTS = st.one_of(
    st.tuples(st.just("plan"), st.none()),
    st.tuples(
        st.sampled_from(["opened", "failed", "dropped", "lost", "moved"]),
        st.sampled_from(Route),
    ),
)


@given(st.lists(st.tuples(st.floats(0, 1000), INPUTS), max_size=60))
def test_whatever_happens_a_call_gets_a_route_or_something_to_wait_for_or_a_reason(steps):
    choice, now, under_way, opened = RouteChoice(), 0.0, set[Route](), set[Route]()
    for pause, (what, route) in steps:
        now += pause
        match what:
            case "opened" if route in under_way | opened:  # where it is open, it was renewed
                choice.opened(route, now)
                under_way.discard(route)
                opened.add(route)
            case "failed" if route in under_way:
                choice.failed(route, now, "dead")
                under_way.remove(route)
            case "dropped" if route in under_way:
                choice.dropped(route)
                under_way.remove(route)
            case "lost" if route in opened:
                choice.lost(route, now, "broke")
                opened.remove(route)
            case "moved":
                choice.moved(route)
                under_way.discard(route)
                opened.discard(route)
            case "plan":
                plan = choice.plan(now)
                assert not plan.attempts.keys() & (under_way | opened)
                under_way |= plan.attempts.keys()
                assert plan.use in opened if plan.use else not opened
                assert plan.use is not TUNNEL or DIRECT not in opened, "direct where it is open"
                assert plan.use or under_way or "can't be reached" in plan.reason
        assert choice.route in opened if choice.route else not opened
