"""What must hold on lines that carry less than comes due: what is begun fits, and is applied.

In virtual time, with the machine of a peer: see ``helpers/slow_lines.py``."""

import pytest

from helpers.slow_lines import Swarm
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.budget import FIRST_DEADLINE, Budget, Deadlines
from lowcomm_protocol.exchange.events import Measured

SIZES = (1_060_000,) * 4
"""Coded bytes of a quarter of 10.8 million values in 3 bits."""
IN_BF16 = 5.1
"""Times as many bytes the first time, when no ranges are known."""


@pytest.mark.slow
@pytest.mark.parametrize(("line", "share"), [((20e6, 20e6), 0.9), ((2e6, 10e6), 0.85)])
def test_exchanges_that_fit_on_the_line_are_applied(line: tuple[float, float], share: float):
    swarm = Swarm(line, SIZES, first=IN_BF16).train(240)
    assert swarm.applied >= share * swarm.fit, swarm.reasons
    assert not [reason for reason in swarm.reasons if reason.startswith("held")], "nobody to blame"


class Idle:
    """An exchange that nobody carries out."""

    def carry_out(self, effect: object) -> None:
        pass


def test_until_the_line_is_known_a_peer_begins_one_exchange_at_a_time():
    swarm = Swarm((2e6, 10e6), SIZES, first=IN_BF16)
    began: dict[str, list[int]] = {}
    for name, peer in swarm.peers.items():
        begin = peer.new_exchange

        def new_exchange(one, name=name, begin=begin, peer=peer):
            own = [each for each in peer.machine.running.values() if each.call is None]
            began.setdefault(name, []).append(len(own))
            return begin(one)

        peer.new_exchange = new_exchange
    swarm.train(20)
    assert {count for counts in began.values() for count in counts} <= {0, 1}


@pytest.mark.parametrize(
    ("method", "answer"), [("lowcomm", events.Refuse), ("diloco", events.Accept)]
)
def test_who_fills_its_line_refuses_a_pair_and_joins_a_group(method: str, answer: type):
    peer = Swarm((2e6, 10e6), SIZES, method=method).peers["peer0"]
    peer.on_effect = lambda effect: None
    peer.new_exchange = lambda one: Idle()
    peer.start()
    machine = peer.machine
    peer.stimulate(events.Stepped(swarm_step=1, steps=1, tokens=32))
    machine.handle(0.0, events.Stepped(swarm_step=20, steps=20, tokens=640))
    (first,) = [one.fragment for one in machine.running.values() if one.call is None]
    other = (first + 1) % len(SIZES)
    offer = machine.position.offer(other, 0, 0)
    effects = machine.handle(0.0, events.Called(call=1, peer="peer1", offer=offer))
    assert answer in {type(effect) for effect in effects}


def test_as_many_are_under_way_as_fill_the_line():
    budget = Budget(Deadlines())
    assert budget.at_once(0.0) == 1, "nothing is known of the line"
    budget.measured(Measured(work=1.0, line=4.0), 0.0)
    assert budget.at_once(0.0) == 3, "one is coded, one waits for its partner's line"
    for _ in range(20):
        budget.measured(Measured(work=1.0, line=0.2), 1.0)
    assert budget.at_once(1.0) > 4, "a fast line limits nothing"


def test_a_contribution_that_has_come_tells_how_fast_the_line_is():
    swarm = Swarm((20e6, 20e6), SIZES)
    peer = swarm.peers["peer0"]
    peer.on_effect = lambda effect: None
    peer.new_exchange = lambda one: Idle()
    peer.start()
    machine = peer.machine

    def step(number: int) -> None:
        stepped = events.Stepped(swarm_step=number, steps=number, tokens=32 * number, seconds=1.0)
        machine.handle(float(number), stepped)

    step(20)
    (first,) = machine.running.values()
    step(21)
    assert list(machine.running.values()) == [first], "nothing is known of the line"
    machine.handle(21.5, events.ContentCame(exchange=first.number, peer="peer1", line=0.5))
    step(22)
    assert len(machine.running) == len(SIZES), "the others need not wait for its end"


def test_only_the_first_contribution_that_comes_tells_it_before_its_exchange_is_over():
    budget = Budget(Deadlines())
    budget.came(None, 0.0)
    assert budget.at_once(0.0) == 1
    budget.came(4.0, 0.0)
    budget.came(0.1, 0.0)
    assert budget.lines.usual(0.0) == 4.0


def test_a_line_that_nobody_measures_limits_nothing_once_an_exchange_went_well():
    budget = Budget(Deadlines())
    budget.durations.append(3.0)
    assert budget.at_once(0.0) == float("inf")
    assert Budget(Deadlines(alone_first=False)).at_once(0.0) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("line", [(5e6, 20e6), (2e6, 10e6)])
def test_first_exchanges_of_a_whole_model_in_fp32_end_in_time(line: tuple[float, float]):
    """43 MB take 69 and 172 s, while nobody knows yet how fast the line is."""
    swarm = Swarm(line, (43_000_000,), first=1.0, method="noloco").train(250)
    assert swarm.applied > 0
    assert not [reason for reason in swarm.reasons if "deadline" in reason], swarm.reasons


def test_a_line_is_trusted_with_a_rate_until_one_is_measured():
    budget = Budget(Deadlines())
    assert budget.deadline_for(5, 10_000_000, 0.0) == FIRST_DEADLINE + 40.0
    assert budget.deadline_for(50, 10_000_000, 0.0) == FIRST_DEADLINE + 50.0, "a member needs more"
    assert budget.deadline_for(5, 1 << 40, 0.0) == 300.0, "what the owner allows"
    budget.rates.add(1e6, 0.0)
    assert budget.deadline_for(5, 10_000_000, 0.0) == FIRST_DEADLINE + 5.0


def test_the_deadline_provides_for_others_on_the_line():
    budget = Budget(Deadlines())
    budget.rates.add(250_000.0, 0.0)
    alone, shared = (budget.needs(1_000_000, 0.0, streams, 0.0) for streams in (1, 3))
    assert (alone.line, shared.line) == (4.0, 12.0)


def test_offers_reckon_with_what_exchanges_carry_not_with_the_most_that_they_might():
    swarm = Swarm((2e6, 10e6), SIZES, first=1.9, most=IN_BF16)
    told: list[int] = []
    peer = swarm.peers["peer0"]
    begin = peer.new_exchange
    peer.new_exchange = lambda one: told.append(one.offer.seconds) or begin(one)
    swarm.train(60)
    budget = peer.machine.budget
    carried = budget.shares.usual(60.0) * IN_BF16 * SIZES[0]
    assert 0.99 * SIZES[0] <= carried <= 1.9 * SIZES[0]
    assert budget.bytes_of(int(IN_BF16 * SIZES[0]), 60.0) == pytest.approx(carried, rel=0.01)
    seconds = carried / budget.rates.usual(60.0)
    # Offers tell whole seconds, rounded up.
    assert told[-1] < 4 * seconds + 1, "four may share it; in bf16 each takes five times that"
