"""A node and its swarm in virtual time, on a DHT in memory: outages, splits, moves, and doors that
stay shut."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import time
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.hivemind import Knock
from lowcomm_node.swarm import rejoin
from lowcomm_node.swarm.rejoin import (
    AT_ONCE,
    HEARTBEAT,
    LONGEST_PAUSE,
    READ_BACK,
    RESTART_EVERY,
    Rejoin,
)
from lowcomm_node.swarm.remembered_peers import read_remembered
from lowcomm_node.swarm.standing import AddressesChanged, EntryPointStatus
from lowcomm_node.system.logs import Event
from lowcomm_protocol.identity import Identity

NODE, BOOT, OTHER, GONE, *PEERS = (Identity(bytes([seed]) * 32).peer_id for seed in range(1, 17))


def address(peer_id: str, number: int = 1) -> str:
    return f"/ip4/203.0.113.{number}/tcp/1/p2p/{peer_id}"


class World(MemoryDiscovery):
    """A node, its doors, and a clock that goes on by itself; ``open`` are the doors that answer."""

    ours: ClassVar[tuple[str, ...]]
    held: ClassVar[tuple[str, ...]]

    def __init__(self, *named: str) -> None:
        network = MemoryNetwork(time)
        super().__init__(NODE, network)
        World.ours = World.held = ("192.0.2.1",)
        self.now, self.open = 1000.0, network.peers
        self.has_record, self.isolated, self.ahead = True, False, 0.0
        self.knocks: list[tuple[float, str]] = []
        self.published: list[float] = []
        self.restarts: list[float] = []
        self.events: list[Event] = []
        self.clocks: list[str | None] = []
        self.moved = 0
        self.rejoin = Rejoin(
            self,  # type: ignore[arg-type]
            [address(peer) for peer in named],
            self.events.append,
            self.clocks.append,
            clock=lambda: self.now,
        )
        self.rejoin.publish, self.rejoin.record = self._publish, ("peers", NODE)
        self.rejoin.on_move = self._move

    async def knock(self, entry_points: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        assert all(entry_points.values())
        self.knocks += [(self.now, peer) for peer in entry_points]
        knocks = await super().knock(entry_points)
        return {peer: Knock(knock.reason, self.ahead) for peer, knock in knocks.items()}

    async def revive(self, restart: bool = False) -> bool:
        self.restarts += [self.now] * restart
        return True

    async def connected_peers(self) -> frozenset[str]:
        return frozenset() if self.isolated else frozenset({"a tunnel in a home network"})

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        return b"record" if self.has_record else None

    async def _publish(self) -> None:
        self.published.append(self.now)

    def _move(self) -> None:
        self.moved += 1

    async def run(self, seconds: float = 0.0) -> "World":
        """At least one step."""
        end = self.now + seconds
        while True:
            wait = await self.rejoin.step()
            assert 0 < wait <= HEARTBEAT
            self.now += wait
            if self.now >= end:
                return self

    def knocked(self, peer_id: str, since: float = 0.0) -> list[float]:
        return [at for at, entry in self.knocks if entry == peer_id and at >= since]

    def door(self, peer_id: str) -> EntryPointStatus:
        return next(it for it in self.rejoin.describe().doors if it.peer_id == peer_id)


@pytest.fixture(autouse=True, scope="module")
def machine() -> Iterator[None]:
    """The machine has the addresses of the last world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejoin, "own_addresses", lambda: World.ours)
        patch.setattr(rejoin, "held_addresses", lambda: World.held)
        yield


async def test_of_several_entry_points_one_that_answers_suffices_and_the_others_are_named() -> None:
    world = World(GONE, BOOT)
    world.open.add(BOOT)
    await world.run()
    assert world.rejoin.state == "connected" and world.rejoin.reason is None
    await world.run(120)
    assert world.door(BOOT).answers and world.door(BOOT).reason is None
    gone = world.door(GONE)
    assert not gone.answers and gone.reason == "connection refused"
    assert gone.next_attempt is not None and 0 <= gone.next_attempt <= LONGEST_PAUSE
    pauses = [after - before for before, after in pairwise(world.knocked(GONE))]
    assert pauses[0] < 5 and pauses == sorted(pauses), "later and later"
    assert max(pauses) <= LONGEST_PAUSE + HEARTBEAT
    world.open.add(GONE)
    await world.run(LONGEST_PAUSE + 10)
    assert world.door(GONE).answers
    named = [event.to_json() for event in world.events if event.name.startswith("door.")]
    assert [(it["event"], it["peer_id"]) for it in named] == [
        ("door.closed", GONE), ("door.open", BOOT), ("door.open", GONE)
    ]  # fmt: skip


async def test_when_all_named_entry_points_are_dead_others_are_tried_a_few_at_a_time() -> None:
    world = World(GONE)
    for peer in PEERS:
        world.rejoin.learned(peer, [address(peer)])
    world.open.add(PEERS[-1])
    assert world.rejoin.reason == "no peer answered"
    await world.run()
    assert len(world.knocks) == 1 + AT_ONCE
    reason = world.rejoin.reason or ""
    assert f"no peer answered: {address(GONE)} (connection refused)" in reason
    assert "next attempt in 0 s" in reason
    await world.run(60)
    assert world.rejoin.state == "connected"
    assert len(world.knocked(PEERS[-1])) >= 4, "it is watched from now on"


async def test_who_answered_is_an_entry_point_at_the_next_start(tmp_path: Path) -> None:
    first = World(BOOT, GONE)
    first.open.add(BOOT)
    await first.run()
    await first.rejoin.keep(tmp_path / "doors.json")  # the run is known; and it is killed
    second = World()
    second.open.add(BOOT)
    await second.rejoin.keep(tmp_path / "doors.json")
    await second.run()
    assert second.rejoin.connected
    assert {peer for _, peer in second.knocks} == {BOOT}
    third = World(PEERS[0])
    third.open.add(PEERS[0])
    await third.rejoin.keep(tmp_path / "doors.json")
    await third.run()
    remembered = read_remembered(tmp_path / "doors.json", time())
    assert {it.peer_id for it in remembered} == {BOOT, PEERS[0]}, "at once"


async def test_a_peer_that_the_dht_lost_is_knocked_at_and_one_that_said_goodbye_is_not() -> None:
    world = World(BOOT, PEERS[0])
    world.open.update({BOOT, PEERS[0], OTHER, GONE})
    await world.run()
    for peer in (OTHER, GONE):
        world.rejoin.learned(peer, [address(peer)])
    world.rejoin.listed({OTHER, GONE})
    await world.run(60)
    assert not world.knocked(OTHER), "two named doors answer: nobody else is bothered"
    published = len(world.published)
    world.rejoin.left(GONE)
    world.rejoin.listed(set())
    await world.run(30)
    assert world.knocked(OTHER) and not world.knocked(GONE)
    assert len(world.published) == published + 1, "it may have forgotten us"


async def test_others_that_answer_but_do_not_have_our_record_are_a_split() -> None:
    world = World(BOOT, PEERS[0])
    world.open.update({BOOT, PEERS[0], OTHER})
    await world.run()
    world.rejoin.learned(OTHER, [address(OTHER)])
    await world.run(60)
    assert not world.knocked(OTHER)
    world.has_record = False
    await world.run(4 * READ_BACK)
    assert world.rejoin.state == "unlisted"
    assert "do not list us" in (world.rejoin.reason or "")
    assert world.knocked(OTHER), "whoever we know may bring the halves together"
    assert len(world.published) > 1
    world.has_record = True
    await world.run(2 * READ_BACK)
    assert world.rejoin.state == "connected"


async def test_p2pd_is_started_again_only_where_nothing_is_connected() -> None:
    world = World(BOOT)
    world.open.add(BOOT)
    await world.run(60)
    world.open.clear()
    await world.run(10 * RESTART_EVERY)
    assert world.rejoin.state == "lost" and not world.restarts, "something is connected"
    world.isolated = True
    await world.run(10 * RESTART_EVERY)
    assert len(world.restarts) >= 2
    pauses = [after - before for before, after in pairwise(world.restarts)]
    assert min(pauses) >= RESTART_EVERY
    world.open.add(BOOT)
    await world.run(LONGEST_PAUSE + 5)
    assert world.rejoin.state == "connected"
    swarm = [event.name for event in world.events if event.name.startswith("swarm.")]
    assert swarm == ["swarm.connected", "swarm.lost", "swarm.connected"]


async def test_a_peer_can_not_replace_the_addresses_that_the_owner_gave() -> None:
    world = World(BOOT)
    world.rejoin.learned(BOOT, [address(BOOT, 9)])
    world.rejoin.left(BOOT)
    assert world.door(BOOT).address == address(BOOT)


async def test_a_change_of_address_is_told_and_restarts_p2pd() -> None:
    world = World(BOOT)
    world.open.add(BOOT)
    await world.run()
    World.ours = World.held = ("198.51.100.1",)
    await world.run()
    assert world.moved == 1 and len(world.restarts) == 1
    assert len(world.published) == 2
    assert AddressesChanged(addresses=("198.51.100.1",)) in world.events


async def test_an_address_of_ipv6_that_is_replaced_ends_no_connection_while_it_is_there() -> None:
    world = World(BOOT)
    world.open.add(BOOT)
    await world.run()
    World.ours, World.held = ("198.51.100.1",), ("192.0.2.1", "198.51.100.1")
    await world.run()
    assert world.moved == 1 and len(world.published) == 2
    assert not world.restarts


async def test_a_clock_that_is_off_is_warned_of_once_until_it_is_right_again() -> None:
    world = World(BOOT)
    world.open.add(BOOT)
    world.ahead = 20.0
    await world.run(3 * HEARTBEAT)
    assert len(world.clocks) == 1 and "20 s behind" in (world.clocks[0] or "")
    world.open.clear()
    world.ahead = 0.0
    await world.run(3 * HEARTBEAT)
    assert len(world.clocks) == 1, "nobody has answered"
    world.open.add(BOOT)
    await world.run(LONGEST_PAUSE + 5)
    assert world.clocks[1:] == [None]
    world.ahead = 20.0
    await world.run(2 * HEARTBEAT)
    assert len(world.clocks) == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "shut", "split", "heal", "isolate", "move", "left"]),
            st.integers(1, 200),
        ),
        max_size=25,
    )
)
def test_whatever_happens_it_rejoins_within_two_minutes_once_an_entry_point_answers(
    events: list[tuple[str, int]],
) -> None:
    async def live() -> None:
        world = World(BOOT)
        world.rejoin.learned(OTHER, [address(OTHER)])
        for number, (event, seconds) in enumerate(events):
            match event:
                case "open":
                    world.open.update({BOOT, OTHER})
                case "shut":
                    world.open.clear()
                case "split" | "heal":
                    world.has_record = event == "heal"
                case "isolate":
                    world.isolated = not world.isolated
                case "move":
                    World.ours = World.held = (f"192.0.2.{number}",)
                case _:
                    world.rejoin.left(OTHER)
            await world.run(seconds)
        world.open.clear()
        world.open.add(BOOT)
        world.has_record = True
        await world.run(120)
        assert world.rejoin.state == "connected" and world.rejoin.reason is None
        published = len(world.published)
        await world.run(300)
        assert len(world.published) == published, "and then it is quiet"

    asyncio.run(live())
