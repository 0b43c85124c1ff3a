"""What must hold for many simulated peers without a trainer: they stay together, to the event."""

import pytest

from helpers import quadratic
from helpers.quadratic import QuadraticPeer, Swarm, spec_of
from lowcomm_node.simulation import Conditions
from lowcomm_protocol.exchange.events import Outcome

pytestmark = pytest.mark.slow

PEERS, SECONDS, INTERVAL = 30, 120.0, 10
METHODS = {"noloco": {}, "diloco": {"group": 4}}


def simulated(method: str, loss: float) -> Swarm:
    spec = spec_of(method, interval=INTERVAL, **METHODS[method])
    return Swarm(spec, PEERS, SECONDS, Conditions(loss=loss)).run()


class Plodder(QuadraticPeer):
    """Reports every step to its machine."""

    def start(self) -> None:
        for step in range(1, int(SECONDS) + 1):
            self.network.at(self.began + step, self.report_steps)
        super().start()

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
