"""What must hold for the order in which joiners are served: it goes by address, for identities are
free."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.queue import BAD_NAME, LEAST, WINDOW, Turn, TurnQueue
from lowcomm_node.system.quota import prefixes_of


class Clock:
    """Time that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def enter() -> Callable[..., Turn]:
    """Lets a joiner enter, in a task of its own that giving way may cancel."""
    tasks: list[asyncio.Task[None]] = []

    def enter(turns: TurnQueue, peer: str, place: str) -> Turn:
        turn = turns.enter(peer, place)
        turn._task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
        tasks.append(turn._task)  # type: ignore[arg-type]
        return turn

    return enter


async def test_each_address_has_its_first_served_before_any_has_its_second(enter):
    turns = TurnQueue(served=1, waiting=10)
    crowd = [enter(turns, f"a{number}", "192.0.2.1") for number in range(4)]
    others = [enter(turns, "b", "198.51.100.1"), enter(turns, "c", "203.0.113.1")]
    assert [one.position for one in (*others, *crowd)] == [1, 2, 0, 3, 4, 5]
    crowd[0].leave()
    assert crowd[1].position == 0, "where nobody is served, the first that came is"
    assert [one.position for one in (*others, *crowd[2:])] == [1, 2, 3, 4]


async def test_in_a_full_queue_the_last_of_the_address_that_holds_most_is_evicted(enter):
    turns = TurnQueue(served=1, waiting=3)
    crowd = [enter(turns, f"a{number}", "192.0.2.1") for number in range(4)]
    with pytest.raises(RetryLater, match="4 joiners are served or wait"):
        turns.enter("a4", "192.0.2.1")
    late = [enter(turns, f"b{number}", "198.51.100.1") for number in range(2)]
    assert (
        [one.position for one in (*late, crowd[1])] == [1, 3, 2] and crowd[2].lost and crowd[3].lost
    )
    with pytest.raises(RetryLater):
        turns.enter("b2", "198.51.100.1")
    assert len(turns) == 4, "both have two: nobody gives way to the third"


async def test_many_addresses_of_one_network_are_no_better_than_a_few(enter):
    turns = TurnQueue(served=2, waiting=16)
    for number in range(18):
        enter(turns, f"a{number}", f"192.0.2.{number}")
    late = enter(turns, "b", "198.51.100.1")
    assert late.position == 1
    assert prefixes_of("192.0.2.7") == ("192.0.2.7", "192.0.2.0/24")
    assert prefixes_of("2001:db8:1:2::3") == ("2001:db8:1:2::/64", "2001:db8:1::/48")
    assert prefixes_of("relay 12D3") == ("relay 12D3",)


async def test_a_joiner_below_the_floor_gives_way_only_while_others_wait_and_its_address_comes_last(
    enter,
):
    clock = Clock()
    turns = TurnQueue(served=1, waiting=4, clock=clock)
    idle = enter(turns, "idle", "192.0.2.1")
    clock.now += 10 * WINDOW
    turns.press()
    assert not idle.lost
    honest = enter(turns, "honest", "198.51.100.1")
    turns.press()
    assert idle.lost and honest.position == 0
    again, other = enter(turns, "again", "192.0.2.1"), enter(turns, "other", "198.51.100.1")
    assert (other.position, again.position) == (1, 2), "though its address is served already"
    clock.now += BAD_NAME
    assert (again.position, other.position) == (1, 2)


async def test_time_that_we_need_ourselves_is_not_held_against_a_joiner(enter):
    clock = Clock()
    turns = TurnQueue(served=1, waiting=4, clock=clock)
    slow = enter(turns, "slow", "192.0.2.1")
    enter(turns, "waits", "198.51.100.1")
    for _ in range(10):
        with slow.ours():
            clock.now += WINDOW
            turns.press()
        clock.now += WINDOW
        slow.took(LEAST)
        turns.press()
    assert not slow.lost
    clock.now += WINDOW
    slow.took(LEAST - 1)
    turns.press()
    assert slow.lost


async def test_a_turn_ends_while_others_wait_and_the_slowest_gives_way_first(enter):
    clock = Clock()
    turns = TurnQueue(served=2, waiting=4, turn_seconds=60.0, clock=clock)
    fast, slow = (enter(turns, name, "192.0.2.1") for name in ("fast", "slow"))
    waits = enter(turns, "waits", "192.0.2.1")
    for _ in range(7):
        clock.now += WINDOW
        fast.took(3 * LEAST)
        slow.took(2 * LEAST)
        turns.press()
    assert slow.lost and not fast.lost and waits.position == 0


async def test_who_comes_again_has_the_place_that_it_had_and_no_longer_turn(enter):
    clock = Clock()
    turns = TurnQueue(served=1, waiting=4, clock=clock)
    enter(turns, "a", "192.0.2.1")
    enter(turns, "b", "198.51.100.1")
    for _ in range(2):
        clock.now += 0.9 * WINDOW
        again = enter(turns, "a", "192.0.2.1")
        turns.press()
    assert again.lost and len(turns) == 1


async def test_a_position_that_is_told_never_grows(enter):
    turns = TurnQueue(served=1, waiting=10)
    for number in range(3):
        last = enter(turns, f"a{number}", "192.0.2.1")
    told: list[int] = []

    async def listen() -> None:
        async for position in last.wait_served():
            told.append(position)  # noqa: PERF401 - as they come

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    enter(turns, "b", "198.51.100.1")
    assert last.position == 3
    for peer in ("a0", "a1", "b"):
        next(one for one in (*turns._serving, *turns._queued) if one.peer == peer).leave()
        await asyncio.sleep(0)
    await asyncio.wait_for(task, 5)
    assert told[0] == 2 and all(later < former for former, later in pairwise(told))
