"""What must hold for the counts and rates of peers."""

import pytest

from lowcomm_node.net import traffic
from lowcomm_node.net.traffic import Meter, Rate, Traffic


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def contents(rate: Rate, clock: Clock, pieces: int, size: int, every: float) -> None:
    """A header, and pieces that take so many seconds each."""
    rate.add(100)
    for _ in range(pieces):
        clock.now += every
        rate.add(size)


def test_a_rate_is_that_of_the_last_contents_and_waiting_does_not_count():
    clock = Clock()
    rate = Rate(clock)
    contents(rate, clock, 100, 2**20, 0.1)
    assert rate.last == pytest.approx(10 * 2**20)
    clock.now += 1000
    rate.add(50)
    assert rate.last == pytest.approx(10 * 2**20), "still, long after it"
    clock.now += 1000
    contents(rate, clock, 50, 2**20, 20.0)
    assert rate.last == pytest.approx(2**20 / 20), "however slow"
    assert rate.total == 150 * 2**20 + 250


def test_directions_and_peers_are_apart_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(traffic, "MAX_PEERS", 2)
    every = Traffic(Clock())
    every.of("a").sent(5)
    every.of("b").received(7)
    assert (every.of("a").up.total, every.of("a").down.total, every.of("b").down.total) == (5, 0, 7)
    every.of("a")
    every.of("c")
    assert every.of("a").up.total == 5
    assert every.of("b").down.total == 0, "not used for longest"
    assert isinstance(every.of("d"), Meter)
