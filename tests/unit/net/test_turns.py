"""What must hold for contents that share our line: one at a time while it is full, and nobody waits
for one that does not move."""

import asyncio

from helpers.waiting import until_async
from lowcomm_node.net.bandwidth import (
    BUFFERED,
    FIRST_PIECE,
    LEAST_PIECE,
    MEASURED,
    SMALL,
    STALLED,
    Turn,
    Turns,
)


class Going:
    """Contents that go out over a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(lambda: self.now)
        self.begun: list[str] = []
        self.turn: dict[str, Turn] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.given_up = asyncio.Event()

    async def send(self, name: str, size: int) -> None:
        self.ends[name] = asyncio.Event()
        async with self.turns.take(size, self.given_up) as self.turn[name]:
            self.begun.append(name)
            await self.ends[name].wait()

    def pass_(self, name: str, count: int, seconds: float) -> None:
        self.now += seconds
        self.turn[name].sent(count)

    async def whole(self, name: str, seconds: float) -> None:
        """A content that goes out alone, and takes so long once buffers are full."""
        (task,) = await begun(self, name)
        self.pass_(name, BUFFERED, 0.0)
        self.pass_(name, MEASURED, seconds)
        self.ends[name].set()
        await task


async def begun(going: Going, *names: str, size: int = 1 << 20) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(going.send(name, size)) for name in names]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def until(going: Going, names: list[str]) -> None:
    await until_async(lambda: going.begun == names, 20, f"{names} have begun")


async def test_contents_go_in_the_order_of_asking():
    going = Going()
    tasks = await begun(going, "a", "b", "c")
    assert going.begun == ["a"]
    going.ends["a"].set()
    await until(going, ["a", "b"])
    going.ends["b"].set()
    await until(going, ["a", "b", "c"])
    going.ends["c"].set()
    await asyncio.gather(*tasks)


async def test_one_that_stalls_holds_up_nobody():
    going = Going()
    tasks = await begun(going, "a", "b")
    going.now += STALLED
    await until(going, ["a", "b"])
    for end in going.ends.values():
        end.set()
    await asyncio.gather(*tasks)


async def test_a_small_one_waits_for_no_turn():
    going = Going()
    tasks = await begun(going, "a", "b")
    tasks += await begun(going, "c", size=SMALL)
    tasks += await begun(going, "d", size=SMALL + 1)
    assert going.begun == ["a", "c"]
    for end in going.ends.values():
        end.set()
    await asyncio.gather(*tasks)
    assert going.begun == ["a", "c", "b", "d"]


async def test_one_that_is_given_up_no_longer_waits():
    going = Going()
    tasks = await begun(going, "a", "b")
    going.given_up.set()
    await until(going, ["a", "b"])
    for end in going.ends.values():
        end.set()
    await asyncio.gather(*tasks)


async def test_pieces_grow_on_a_fast_line_and_shrink_on_a_slow_one():
    going = Going()
    (task,) = await begun(going, "a")
    assert going.turns.piece == FIRST_PIECE
    going.pass_("a", BUFFERED, 5.0)
    assert going.turns.piece == FIRST_PIECE, "what buffers take tells nothing"
    going.pass_("a", FIRST_PIECE, 0.01)
    assert going.turns.piece == 2 * FIRST_PIECE
    for _ in range(10):
        going.pass_("a", FIRST_PIECE, 1.0)
    assert going.turns.piece == LEAST_PIECE
    going.ends["a"].set()
    await task
