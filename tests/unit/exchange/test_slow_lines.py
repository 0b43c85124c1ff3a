"""What must hold on lines that carry less than comes due: what is begun fits, and is applied.

In virtual time, with the machine of a peer: see ``helpers/slow_lines.py``."""

import pytest

from helpers.slow_lines import Swarm
from lowcomm_protocol.exchange import events

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


@pytest.mark.slow
@pytest.mark.parametrize("line", [(5e6, 20e6), (2e6, 10e6)])
def test_first_exchanges_of_a_whole_model_in_fp32_end_in_time(line: tuple[float, float]):
    """43 MB take 69 and 172 s, while nobody knows yet how fast the line is."""
    swarm = Swarm(line, (43_000_000,), first=1.0, method="noloco").train(250)
    assert swarm.applied > 0
    assert not [reason for reason in swarm.reasons if "deadline" in reason], swarm.reasons


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
    assert budget.bytes_in(int(IN_BF16 * SIZES[0]), 60.0) == pytest.approx(carried, rel=0.01)
    seconds = carried / budget.rates.usual(60.0)
    # Offers tell whole seconds, rounded up.
    assert told[-1] < 4 * seconds + 1, "four may share it; in bf16 each takes five times that"
