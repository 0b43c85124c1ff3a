"""The order in which peers are served goes by address, since identities are free."""

import asyncio

import pytest

from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.queue import (
    SLOW_SECONDS,
    TURN_SECONDS,
    GivingTurn,
    TurnQueue,
)


class Clock:
    """Time that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def lost(turn: GivingTurn) -> bool:
    """Whether a turn is over."""
    try:
        async with asyncio.timeout(0.01):
            await turn.wait_over()
    except RetryLater:
        return True
    except TimeoutError:
        pass
    return False


async def test_each_address_has_its_first_served_before_any_has_its_second():
    turns = TurnQueue(1, 10)
    crowd = [turns.enter(f"a{number}", "192.0.2.1") for number in range(4)]
    others = [turns.enter("b", "198.51.100.1"), turns.enter("c", "203.0.113.1")]
    positions = map(turns.position, (*others, *crowd))
    assert list(positions) == [1, 2, 0, 3, 4, 5]
    crowd[0].leave()
    assert turns.position(crowd[1]) == 0, "where nobody is served, the first that came is"
    assert list(map(turns.position, (*others, *crowd[2:]))) == [1, 2, 3, 4]


async def test_an_address_never_holds_more_than_half_of_the_places():
    turns = TurnQueue(2, 10)
    for number in range(6):
        turns.enter(f"a{number}", "192.0.2.1")
    with pytest.raises(RetryLater, match="6 peers are served or wait"):
        turns.enter("a6", "192.0.2.1")
    late = turns.enter("b", "198.51.100.1")
    assert turns.position(late) == 1
    late.leave()
    for number in range(2, 100):
        try:
            turns.enter(f"n{number}", f"192.0.2.{number}")
        except RetryLater:
            break
    assert turns.serving + turns.waiting == 8, "and its network no more than two thirds"
    assert turns.position(turns.enter("c", "203.0.113.1")) == 1


async def test_who_keeps_us_waiting_loses_its_turn_only_while_others_wait():
    clock = Clock()
    turns = TurnQueue(1, 4, clock)
    slow = turns.enter("slow", "192.0.2.1")
    with slow.waiting():
        clock.now += 10 * SLOW_SECONDS
        turns.press()
        assert not await lost(slow)
        honest = turns.enter("honest", "198.51.100.1")
        turns.press()
    assert await lost(slow) and turns.position(honest) == 0
    again, other = turns.enter("again", "192.0.2.1"), turns.enter("other", "198.51.100.1")
    assert (turns.position(again), turns.position(other)) == (1, 2)


async def test_a_turn_ends_while_others_wait_the_longest_first():
    clock = Clock()
    turns = TurnQueue(2, 4, clock)
    first = turns.enter("first", "192.0.2.1")
    clock.now += 1
    second, waits = turns.enter("second", "192.0.2.1"), turns.enter("waits", "192.0.2.1")
    clock.now += TURN_SECONDS
    turns.press()
    assert await lost(first) and not await lost(second) and turns.position(waits) == 0


async def test_who_comes_again_has_the_place_that_it_had_and_no_longer_turn():
    clock = Clock()
    turns = TurnQueue(1, 4, clock)
    former = turns.enter("a", "192.0.2.1")
    turns.enter("b", "198.51.100.1")
    clock.now += TURN_SECONDS + 1
    again = turns.enter("a", "203.0.113.1")
    assert await lost(former)
    former.leave()
    assert (turns.serving, turns.waiting) == (1, 1), "the place is the new stream's"
    turns.press()
    assert await lost(again)
