"""What must hold for the counts and rates of peers."""

import pytest

from helpers.clock import Clock
from lowcomm_node.net import traffic
from lowcomm_node.net.traffic import Rate, Traffic


def contents(rate: Rate, clock: Clock, pieces: int, size: int, every: float) -> None:
    """A header, and pieces that take so many seconds each."""
    rate.add(100)
    for _ in range(pieces):
        clock.now += every
        rate.add(size)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(traffic, "monotonic", clock)
    return clock


def test_a_rate_is_that_of_the_last_contents_and_waiting_does_not_count(clock):
    rate = Rate()
    contents(rate, clock, 100, 2**20, 0.1)
    assert rate.last == pytest.approx(10 * 2**20)
    clock.now += 1000
    rate.add(50)
    assert rate.last == pytest.approx(10 * 2**20), "still, long after it"
    clock.now += 1000
    contents(rate, clock, 50, 2**20, 20.0)
    assert rate.last == pytest.approx(2**20 / 20), "however slow"


def test_directions_and_peers_are_apart_and_the_oldest_are_forgotten(monkeypatch, clock):
    monkeypatch.setattr(traffic, "MAX_PEERS", 2)
    every = Traffic()
    contents(every.of("a").up, clock, 1, 2**20, 1.0)
    contents(every.of("b").down, clock, 1, 2**20, 1.0)
    assert every.of("a").up.last and every.of("a").down.last is None and every.of("b").down.last
    every.of("a")
    every.of("c")
    assert every.of("a").up.last
    assert every.of("b").down.last is None, "not used for longest"
