"""What must hold for the machine of a peer: timers, and decisions that depend on nothing but what
it was told."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.stimuli import FreeView, Log, RecordedPeer
from lowcomm_node.data import Dataset, open_data
from lowcomm_node.simulation import Conditions, Member
from lowcomm_node.simulation import peer as simulated
from lowcomm_node.simulation.swarm import Swarm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange import events, kinds
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.kinds import HELLO_DEADLINE
from lowcomm_protocol.exchange.peer import MANY, Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import Refusal
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.run import RunSpec

pytestmark = pytest.mark.slow

MODEL = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "context": 16}


def spec(method: str, seed: int = 0, steps: int = 40) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"name": "test", "seed": seed, "steps": steps},
            "model": MODEL,
            "train": {"batch": 2, "warmup": 5},
            "sync": {"method": method, "interval": 8},
        }
    )


class Alone(FreeView):
    """View of one peer that knows others, one if not told otherwise."""

    def __init__(self, *others: str) -> None:
        self.others = others or ("b",)

    def partners(self) -> list[str]:
        return list(self.others)

    def training(self) -> list[tuple[str, int]]:
        return [(other, 8) for other in self.others]

    def furthest(self, but: str) -> int:
        return 8


def begun(
    deadlines: Deadlines, method: str = "noloco", me: str = "a", others: tuple[str, ...] = ("b",)
) -> tuple[Peer, Underway]:
    """A peer that has begun an exchange at second 100."""
    settings = spec(method)
    peer = Peer(me, settings, settings.run_id, Alone(*others), deadlines)
    ready = events.TrainerReady(
        plan="00",
        sizes=((10, 10),),
        realign_sizes=(10,),
        exchanges=1,
        swarm_step=0,
        steps=0,
        tokens=0,
        progress=(FragmentProgress(),),
        slow_digests=(b"",),
        momentum_digests=(b"",),
    )
    peer.handle(0.0, ready)
    peer.handle(0.0, events.Opened())
    peer.handle(100.0, events.Stepped(swarm_step=8, steps=8, tokens=80))
    return peer, peer.running[0]


def test_a_peer_whose_refusal_was_overtaken_by_its_own_call_is_met_all_the_same():
    """b had no room when a called. It has some now, and its call comes before its refusal does."""
    (a, of_a), (b, of_b) = begun(Deadlines()), begun(Deadlines(), me="b", others=("a",))
    called = events.Called(call=1, peer="b", offer=of_b.offer, place="")
    assert a.handle(100.1, called) == [events.Refuse(call=1, peer="b", reason=Refusal.CROSSED)]

    crossed = events.Refused(exchange=of_b.number, peer="a", reason=Refusal.CROSSED)
    assert b.handle(100.2, crossed) == [], "it waits for the call of a"
    full = events.Refused(exchange=of_a.number, peer="b", reason=Refusal.FULL)
    again = events.Dial(exchange=of_a.number, peer="b")
    assert a.handle(100.2, full) == [again]

    called = events.Called(call=2, peer="a", offer=of_a.offer, place="")
    accept, capture = b.handle(100.3, called)
    assert accept == events.Accept(exchange=of_b.number, call=2, peer="a", offer=of_b.offer)
    assert capture == events.Capture(exchange=of_b.number, members=("a", "b"))


def called(one: Underway, peer: str, call: int = 1, **changes: object) -> events.Called:
    return events.Called(call=call, peer=peer, offer=replace(one.offer, **changes))  # type: ignore[arg-type]


def stepped(peer: Peer, now: float, step: int) -> list[events.Effect]:
    told = events.Stepped(swarm_step=step, steps=step, tokens=10 * step, seconds=1.0)
    return peer.handle(now, told)


def exchanged(peer: Peer, now: float, took: float, other: str = "b") -> None:
    """Apply the exchange that is under way, to which the other brought its part after so long."""
    one = peer.running[0]
    answered = events.Accepted(exchange=one.number, peer=other, offer=one.offer)
    peer.handle(now, answered)
    peer.handle(one.began + took, events.ContentCame(exchange=one.number, peer=other))
    merged = events.Merged(
        exchange=one.number, swarm_step=8, steps=8, tokens=80, slow_digest=b"", momentum_digest=b""
    )
    peer.handle(one.began + took, merged)
    peer.handle(one.began + took, events.Released(exchange=one.number))


def held_by_a_caller(seconds: int = 299) -> tuple[Peer, Underway]:
    """A peer that is called by c, which asks for so long, after an exchange of one second."""
    peer, one = begun(Deadlines(), others=("b", "c"))
    exchanged(peer, 100.1, 1.0, one.machine.candidates[0])
    stepped(peer, 109.0, 14)
    peer.handle(110.0, called(one, "c", steps=16, swarm_step=8, seconds=seconds))
    (held,) = peer.running.values()
    assert held.call is not None and held.machine.stage is events.Stage.CAPTURING
    return peer, held


def test_the_exchange_of_a_caller_gives_way_when_one_of_our_own_is_due_and_it_takes_too_long():
    peer, held = held_by_a_caller()
    assert held.deadline > 250, "nobody else waits for it"
    assert stepped(peer, 111.0, 16) == [], "it may still end in time"
    effects = stepped(peer, 120.0, 17)
    assert held.machine.cause is events.Cause.GAVE_WAY
    assert events.End(exchange=held.number, reason=held.machine.reason) in effects
    assert peer.trust.lost("c") == 9.0, "since one of our own was due"
    peer.handle(120.0, events.Dropped(exchange=held.number, reason=""))
    peer.handle(120.0, events.Released(exchange=held.number))
    stepped(peer, 121.0, 18)
    assert peer.running[0].call is None


def test_a_caller_that_made_nothing_of_ours_wait_is_not_blamed_for_giving_way():
    peer, held = held_by_a_caller()
    stepped(peer, 150.0, 16)
    assert held.machine.over and peer.trust.lost("c") == 0.0


@pytest.mark.parametrize(("took", "longest"), [(1.0, 30.0), (60.0, 400.0)])
def test_a_peer_that_asks_for_long_gets_what_it_was_seen_to_need(took: float, longest: float):
    peer, _ = begun(Deadlines(longest=1000.0))
    exchanged(peer, 100.1, took)
    usual = peer.budget.deadline
    stepped(peer, 200.0, 16)
    one = peer.running[0]
    offer = replace(one.offer, seconds=299)
    peer.handle(200.1, events.Accepted(exchange=one.number, peer="b", offer=offer))
    assert one.deadline == usual + max(5.0, 2 * took) < longest


def test_a_contribution_that_comes_slowly_but_evenly_has_as_long_as_its_sender_asked_for():
    peer, _ = begun(Deadlines())
    exchanged(peer, 100.1, 1.0)
    stepped(peer, 200.0, 16)
    one = peer.running[0]
    offer = replace(one.offer, seconds=80)
    peer.handle(200.1, events.Accepted(exchange=one.number, peer="b", offer=offer))
    before = one.deadline
    for needs, deadline in ((before - 1, before), (40.0, 40.0), (1e6, peer.budget.deadline + 80)):
        peer.handle(203.0, events.Coming(exchange=one.number, peer="b", seconds=needs))
        assert one.deadline == deadline


def test_who_keeps_us_waiting_again_and_again_is_left_out_for_longer_than_that_took():
    peer, _ = begun(Deadlines())
    exchanged(peer, 100.1, 1.0)
    now, step, lost = 200.0, 16, 0.0
    while peer.trusts("b"):
        stepped(peer, now, step)
        one = peer.running[0]
        peer.handle(now, events.Accepted(exchange=one.number, peer="b", offer=one.offer))
        peer.handle(now + 10, events.Lost(exchange=one.number, peer="b", reason="-", broke=True))
        peer.handle(now + 10, events.Dropped(exchange=one.number, reason=""))
        peer.handle(now + 10, events.Released(exchange=one.number))
        lost, now, step = lost + 10.0, now + 20, step + 8
        assert lost < 100, "it is never left out"
    assert "have cost" in peer.trust.reason("b")
    back = step
    while not peer.trusts("b"):
        back += 1
        peer.position.steps = back
    assert back - step >= lost, "steps of a second each"


def test_a_partner_that_brings_its_part_and_then_confirms_nothing_is_blamed_once_time_is_over():
    peer, one = begun(Deadlines())
    number = one.number
    peer.handle(100.1, events.Accepted(exchange=number, peer="b", offer=one.offer))
    peer.handle(101.0, events.Captured(exchange=number))
    peer.handle(101.0, events.ContentCame(exchange=number, peer="b"))
    peer.handle(101.0, events.WholeContribution(exchange=number, peer="b"))
    assert one.machine.stage is events.Stage.CONFIRMING
    peer.handle(100.0 + one.deadline, events.Tick())
    assert peer.trust.lost("b") == 0.0, "its word may be on its way"
    peer.handle(100.0 + one.deadline + HELLO_DEADLINE, events.Tick())
    assert peer.trust.lost("b") == one.deadline + HELLO_DEADLINE


class Busy:
    """A peer that its first candidate has refused, and that calls the second one now."""

    def __init__(self) -> None:
        self.peer, self.one = begun(Deadlines(), others=("b", "c", "d"))
        self.first, self.second, self.third = self.one.machine.candidates
        assert self.refused_by(self.first) == [self.dials(self.second)]

    def refused_by(self, peer: str) -> list[events.Effect]:
        refused = events.Refused(exchange=self.one.number, peer=peer, reason=Refusal.FULL)
        return self.peer.handle(100.1, refused)

    def called_by(self, peer: str, call: int) -> list[events.Effect]:
        called = events.Called(call=call, peer=peer, offer=self.one.offer)
        return self.peer.handle(100.2, called)

    def dials(self, peer: str) -> events.Effect:
        return events.Dial(exchange=self.one.number, peer=peer)

    def captures_with(self, peer: str) -> events.Effect:
        members = tuple(sorted(["a", peer]))
        return events.Capture(exchange=self.one.number, members=members)


def test_the_call_of_whom_we_would_meet_first_waits_for_the_answer_to_our_own():
    busy = Busy()
    assert busy.called_by(busy.first, 1) == [], "it waits"
    accept, capture = busy.refused_by(busy.second)
    offer = busy.one.offer
    assert accept == events.Accept(exchange=busy.one.number, call=1, peer=busy.first, offer=offer)
    assert capture == busy.captures_with(busy.first)


def test_a_call_that_waits_is_refused_where_ours_is_accepted():
    busy = Busy()
    busy.called_by(busy.first, 1)
    offer = busy.one.offer
    answered = events.Accepted(exchange=busy.one.number, peer=busy.second, offer=offer)
    assert busy.peer.handle(100.3, answered) == [
        busy.captures_with(busy.second),
        events.Refuse(call=1, peer=busy.first, reason=Refusal.BUSY),
    ]


def test_nobody_else_waits_so_that_no_ring_of_peers_waits_for_each_other():
    busy = Busy()
    refuse = events.Refuse(call=1, peer=busy.third, reason=Refusal.BUSY)
    assert busy.called_by(busy.third, 1) == [refuse]
    busy.called_by(busy.first, 2)
    again = events.Refuse(call=3, peer=busy.first, reason=Refusal.BUSY)
    assert busy.called_by(busy.first, 3) == [again]


@pytest.mark.parametrize(("count", "again"), [(MANY - 1, 16), (MANY, 10)])
def test_who_finds_all_of_many_peers_taken_tries_again_before_the_next_sync(count, again):
    others = tuple(f"peer-{number}" for number in range(count))
    peer, one = begun(Deadlines(), others=others)
    effects = list[events.Effect]()
    for other in one.machine.candidates:
        refused = events.Refused(exchange=one.number, peer=other, reason=Refusal.BUSY)
        effects = peer.handle(100.1, refused)
    assert isinstance(effects[-1], events.End)
    peer.handle(100.2, events.Dropped(exchange=one.number, reason="no partner"))
    assert peer.position.schedule.due_from(0) == again


def told(one: Underway) -> list[str]:
    return [type(event).__name__ for _, event in one.story.events]


@pytest.mark.parametrize("deadline", [1.0, 10.0, 12.5, 60.0, 3600.0])
def test_the_hours_of_a_group_strike_in_their_order(deadline: float):
    hours = sorted(kinds.GROUP.timetable(10.0, deadline), key=lambda hour: hour[0])
    struck = [type(event) for _, event in hours]
    looks = struck.index(events.ReduceClosed) - 1
    assert struck[0] is events.GatheringClosed
    assert looks >= 3, "a peer that waits for the leader can give it up before"
    assert struck[1 : looks + 1] == [events.AgreeingClosed] * looks
    rest = [kind for kind in struck[looks + 1 :] if kind is not events.AgreeingClosed]
    assert rest == [
        events.ReduceClosed,
        events.DeadlinePassed,
        events.ConfirmingClosed,
        events.DeadlinePassed,
    ]
    assert hours[0][0] <= 10.0
    assert hours[-1][0] == deadline + 10.0
    assert len(hours) < 1300


# The same stimuli give the same effects, whoever drives


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder: Path = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(
            f"The {number}th of twenty short texts, all much alike. " * 12
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield open_data(f"text:{folder}", "bytes", folder / "cache")
    torch.set_num_threads(threads)


def decides_the_same(log: Log) -> None:
    for one, effects in zip(log.stimuli, log.replay(), strict=True):
        assert effects == one.effects, f"after {one.event} at {one.now}"


@pytest.mark.parametrize("method", ["lowcomm", "streaming-diloco"])
@pytest.mark.parametrize("seed", range(3))
def test_what_the_simulator_tells_a_machine_gives_the_same_effects_elsewhere(
    monkeypatch, dataset, method, seed
):
    monkeypatch.setattr(simulated, "Peer", RecordedPeer)
    members = [Member(), Member(speed=0.8), Member(attack="huge"), Member(dies=20.0)]
    conditions = Conditions(loss=0.1)
    world = Swarm(
        spec(method, seed), dataset, members, conditions, Replica, compiled=False, evaluations=0
    )
    world.network.run()
    logs = [one.machine.log for one in world.peers if isinstance(one.machine, RecordedPeer)]
    assert (
        sum(isinstance(e, events.Over) for log in logs for one in log.stimuli for e in one.effects)
        > 5
    )
    for log in logs:
        decides_the_same(log)
