"""What must hold for many simulated peers without a trainer: they stay together, to the event."""

from itertools import combinations

import pytest

from helpers import quadratic
from helpers.quadratic import QuadraticPeer, Swarm, spec_of
from helpers.volunteers import CONNECT_SECONDS, HomeNetwork, way
from lowcomm_node.simulation import Conditions
from lowcomm_node.simulation.network import SimulatedStream
from lowcomm_protocol.exchange.events import Outcome

pytestmark = pytest.mark.slow

PEERS, SECONDS, INTERVAL = 30, 120.0, 10
METHODS = {"noloco": {}, "diloco": {"group": 4}}


def simulated(method: str, loss: float) -> Swarm:
    spec = spec_of(method, interval=INTERVAL, **METHODS[method])
    return Swarm(spec, PEERS, SECONDS, Conditions(loss=loss)).run()


class Plodder(QuadraticPeer):
    """Reports every step to its machine."""

    def start(self, like: QuadraticPeer | None = None) -> None:
        for step in range(1, int(SECONDS) + 1):
            self.network.at(self.began + step, self.report_steps)
        super().start(like)

    def _wait_for_due(self) -> None:
        pass


@pytest.mark.parametrize("method", METHODS)
def test_peers_exchange_and_stay_together(method: str):
    swarm = simulated(method, loss=0.0)
    due = PEERS * (SECONDS // INTERVAL - 1)
    assert swarm.outcomes[Outcome.APPLIED] > 0.8 * due
    assert swarm.effects["Penalty"] == 0, "an honest peer was accused"
    assert swarm.spread < 0.6 * swarm.spread_alone


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_has_one_story_even_if_every_step_is_reported(method, monkeypatch):
    first = simulated(method, loss=0.6)
    assert first.outcomes[Outcome.FAILED] > 0, "nothing went wrong"
    monkeypatch.setattr(quadratic, "QuadraticPeer", Plodder)
    again = simulated(method, loss=0.6)
    assert again.story == first.story
    assert again.spread == first.spread


@pytest.mark.parametrize("method", METHODS)
def test_peers_that_come_and_go_over_home_lines_stay_together(method: str):
    spec = spec_of(method, interval=INTERVAL, **METHODS[method])
    swarm = Swarm(spec, PEERS, 5 * SECONDS, churn=5.0, homes=True).run()
    come = {peer.name for peer in swarm.peers} - {f"peer-{number}" for number in range(PEERS)}
    assert len(come) > PEERS / 4, "few have come, so this shows nothing"
    assert swarm.spread < 0.6 * swarm.spread_alone


def test_a_relay_is_slower_and_some_pairs_do_not_meet():
    network, heard = (
        HomeNetwork(0, Conditions(latency=(0.05, 0.05))),
        dict[str, tuple[str, float]](),
    )

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def receive(self, stream: SimulatedStream, kind: str, payload: object) -> None:
            heard.setdefault(self.name, (kind, network.now))

    names = [f"peer-{number}" for number in range(60)]
    by_way = {way(one, other): (one, other) for one, other in combinations(sorted(names), 2)}
    assert by_way.keys() == {"direct", "relay", "none"}
    network.peers = {name: Listener(name) for name in names}
    for how, (caller, callee) in by_way.items():
        heard.clear()
        began = network.now
        network.send(network.open(caller, callee), caller, "hello", size=250_000)
        network.run()
        kind, took = heard[caller if how == "none" else callee]
        least = {"direct": 0.15, "relay": 0.73, "none": CONNECT_SECONDS}[how]
        assert kind == ("closed" if how == "none" else "hello")
        assert took - began >= least
        assert how != "direct" or took - began == pytest.approx(least)
