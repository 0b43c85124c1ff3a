"""The watchdog in virtual time: outages, splits, moves, and doors that stay shut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.swarm.watchdog import (
    AT_ONCE,
    HEARTBEAT,
    LONGEST_PAUSE,
    MISSING_AFTER,
    READ_BACK,
    RESTART_AFTER,
    SwarmState,
    Watch,
    Watchdog,
)

ADDRESS = "/ip4/203.0.113.7/tcp/1/p2p/"


class World:
    """A node, its doors, and a clock that goes on by itself; ``open`` are the doors that answer."""

    def __init__(
        self, named: tuple[str, ...] = ("boot",), remembered: tuple[str, ...] = (), **options: bool
    ) -> None:
        self.now, self.open = 1000.0, set[str]()
        self.listed: set[str] | None = None
        self.held = True
        self.isolated = False
        self.knocks: list[tuple[float, str]] = []
        self.published: list[float] = []
        self.restarts: list[float] = []
        self.dog = Watchdog(
            _entries(named), _entries(remembered), clock=lambda: self.now, **options
        )

    def step(self) -> Watch:
        """One round of what a lifeline does."""
        plan = self.dog.plan(self.isolated)
        if plan.restart:
            self.restarts.append(self.now)
            self.dog.restarted()
            self.now += 0.1
            return plan
        for peer_id in plan.knock:
            self.knocks.append((self.now, peer_id))
            if peer_id in self.open:
                self.dog.answered(peer_id)
            else:
                self.dog.silent(peer_id, "connection refused")
        if self.dog.must_publish and self.dog.connected:
            self.published.append(self.now)
            self.dog.must_publish = False
        if plan.read_back:
            self.dog.read_back(self.held)
        if self.listed is not None:
            self.dog.listed(self.listed)
        assert 0 < plan.wait <= HEARTBEAT
        self.now += plan.wait
        return plan

    def run(self, seconds: float) -> "World":
        end = self.now + seconds
        while self.now < end:
            self.step()
        return self

    @property
    def state(self) -> SwarmState:
        return self.dog.state

    def knocked(self, peer_id: str, since: float = 0.0) -> list[float]:
        return [at for at, entry in self.knocks if entry == peer_id and at >= since]


def _entries(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {name: (ADDRESS + name,) for name in names}


def test_of_several_entry_points_one_that_answers_suffices_and_the_others_are_named() -> None:
    world = World(("dead", "alive"))
    world.open = {"alive"}
    world.step()
    assert world.state is SwarmState.CONNECTED
    assert world.dog.reason is None
    world.run(120)
    told = {entry.peer_id: entry for entry in world.dog.describe().doors}
    assert told["alive"].answers and told["alive"].reason is None
    assert not told["dead"].answers and told["dead"].reason == "connection refused"
    assert 0 <= told["dead"].next_attempt <= LONGEST_PAUSE
    times = world.knocked("dead")
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] < 5 and pauses == sorted(pauses), "later and later"
    assert max(pauses) <= LONGEST_PAUSE + HEARTBEAT
    world.open = {"alive", "dead"}
    world.run(LONGEST_PAUSE + 10)
    assert next(entry for entry in world.dog.describe().doors if entry.peer_id == "dead").answers


def test_when_all_named_entry_points_are_dead_remembered_ones_are_tried_a_few_at_a_time() -> None:
    world = World(("dead",), tuple(f"peer{number}" for number in range(12)))
    world.open = {"peer11"}
    plan = world.step()
    assert len(plan.knock) == 1 + AT_ONCE
    world.run(60)
    assert world.state is SwarmState.CONNECTED
    assert len(world.knocked("peer11")) >= 4, "it is watched from now on"


def test_a_peer_that_the_dht_lost_is_knocked_at_and_one_that_said_goodbye_is_not() -> None:
    world = World(("a", "b"))
    world.open = {"a", "b", "other", "gone"}
    world.step()
    for peer in ("other", "gone"):
        world.dog.learned(peer, (ADDRESS + peer,))
    world.listed = {"other", "gone"}
    world.run(60)
    assert not world.knocked("other"), "two named doors answer: nobody else is bothered"
    world.listed = set()
    world.dog.left("gone")
    split = world.now
    world.run(MISSING_AFTER + 10)
    assert len(world.knocked("other", split)) == 1
    assert not world.knocked("gone")


def test_others_that_answer_but_do_not_have_our_record_are_a_split() -> None:
    world = World(("a", "b"), ("other",))
    world.open = {"a", "b", "other"}
    world.run(60)
    assert len(world.knocked("other")) == 1, "at the start, when nobody had answered yet"
    world.held = False
    world.run(3 * READ_BACK)
    assert world.state is SwarmState.UNLISTED
    assert "do not list us" in (world.dog.reason or "")
    assert len(world.knocked("other")) > 1, "whoever we know may bring the halves together"
    assert len(world.published) > 1
    world.held = True
    world.run(2 * READ_BACK)
    assert world.state is SwarmState.CONNECTED


def test_p2pd_is_started_again_only_where_nothing_is_connected_and_ever_more_rarely() -> None:
    world = World()
    world.open = {"boot"}
    world.run(60)
    world.open = set()
    world.run(10 * RESTART_AFTER)
    assert not world.restarts, "something is connected, such as a tunnel in a home network"
    world.isolated = True
    world.run(20 * RESTART_AFTER)
    assert len(world.restarts) >= 2
    pauses = [after - before for before, after in pairwise(world.restarts)]
    assert pauses == sorted(pauses) and pauses[-1] > 1.5 * pauses[0]
    world.open = {"boot"}
    world.run(LONGEST_PAUSE + 5)
    assert world.state is SwarmState.CONNECTED


def test_a_peer_can_not_replace_the_addresses_that_the_owner_gave() -> None:
    world = World(("boot",))
    for number in range(9):
        newest = f"/ip4/192.0.2.{number}/tcp/9/p2p/boot"
        world.dog.learned("boot", (newest,))
    assert world.dog.entries["boot"].addresses == (ADDRESS + "boot", newest), (
        "the newest beside them"
    )


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
    world = World(("boot",), ("peer",))
    for number, (event, seconds) in enumerate(events):
        match event:
            case "open":
                world.open = {"boot", "peer"}
            case "shut":
                world.open = set()
            case "split" | "heal":
                world.held = event == "heal"
            case "isolate":
                world.isolated = not world.isolated
            case "move":
                world.dog.own_addresses({f"192.0.2.{number}"})
            case _:
                world.dog.left("peer")
        world.run(seconds)
    world.open, world.held = {"boot"}, True
    world.run(120)
    assert world.state is SwarmState.CONNECTED
    quiet = world.now
    world.run(300)
    assert len(world.published) == len([at for at in world.published if at < quiet]), (
        "and then it is quiet"
    )
    assert world.dog.reason is None
