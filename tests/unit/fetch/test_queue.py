"""The order in which peers are served goes by address, since identities are free."""

import asyncio

import pytest

from helpers.clock import Clock
from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.giving import (
    TURN_SECONDS,
    GivingTurn,
    TurnQueue,
)


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
    crowd = [turns.enter(f"a{number}", "state", "192.0.2.1") for number in range(4)]
    others = [
        turns.enter("b", "state", "198.51.100.1"),
        turns.enter("c", "state", "203.0.113.1"),
    ]
    positions = map(turns.position, (*others, *crowd))
    assert list(positions) == [1, 2, 0, 3, 4, 5]
    turns.leave(crowd[0])
    assert turns.position(crowd[1]) == 0, "where nobody is served, the first that came is"
    assert list(map(turns.position, (*others, *crowd[2:]))) == [1, 2, 3, 4]


async def test_an_address_never_holds_more_than_half_of_the_places():
    turns = TurnQueue(2, 10)
    for number in range(6):
        turns.enter(f"a{number}", "state", "192.0.2.1")
    with pytest.raises(RetryLater, match="6 peers are served or wait"):
        turns.enter("a6", "state", "192.0.2.1")
    late = turns.enter("b", "state", "198.51.100.1")
    assert turns.position(late) == 1
    turns.leave(late)
    for number in range(2, 100):
        try:
            turns.enter(f"n{number}", "state", f"192.0.2.{number}")
        except RetryLater:
            break
    assert turns.serving + turns.waiting == 8, "and its network no more than two thirds"
    assert turns.position(turns.enter("c", "state", "203.0.113.1")) == 1


async def test_a_turn_ends_while_others_wait_the_longest_first():
    clock = Clock(1000.0)
    turns = TurnQueue(2, 4, clock)
    first = turns.enter("first", "state", "192.0.2.1")
    turns.begin(first)
    clock.now += 1
    second = turns.enter("second", "state", "192.0.2.1")
    turns.begin(second)
    clock.now += TURN_SECONDS
    turns.press()
    assert not await lost(first), "nobody waits"
    waits = turns.enter("waits", "state", "192.0.2.1")
    turns.press()
    assert await lost(first) and not await lost(second) and turns.position(waits) == 0


async def test_the_time_in_which_we_prepare_a_content_is_nobodys_turn():
    clock = Clock(1000.0)
    turns = TurnQueue(1, 4, clock)
    first = turns.enter("first", "state", "192.0.2.1")
    turns.enter("waits", "state", "192.0.2.1")
    clock.now += 10 * TURN_SECONDS
    turns.begin(first)
    turns.press()
    assert not await lost(first)


async def test_who_comes_again_has_the_place_that_it_had_and_no_longer_turn():
    clock = Clock(1000.0)
    turns = TurnQueue(1, 4, clock)
    former = turns.enter("a", "state", "192.0.2.1")
    turns.begin(former)
    turns.enter("b", "state", "198.51.100.1")
    clock.now += TURN_SECONDS + 1
    again = turns.enter("a", "state", "203.0.113.1")
    assert await lost(former)
    turns.leave(former)
    assert (turns.serving, turns.waiting) == (1, 1), "the place is the new stream's"
    turns.begin(again)
    turns.press()
    assert await lost(again)


async def test_a_peer_has_a_place_for_each_kind_of_content():
    turns = TurnQueue(2, 4)
    state, text = (turns.enter("a", kind, "192.0.2.1") for kind in ("state", "file"))
    assert not await lost(state) and not await lost(text)
    assert (turns.serving, turns.waiting) == (2, 0)
