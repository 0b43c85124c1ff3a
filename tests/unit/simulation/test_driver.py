"""The driver of simulated peers: streams that have ended have no say any more."""

import pytest

from helpers import quadratic
from helpers.quadratic import QuadraticPeer, Swarm, spec_of
from lowcomm_node.simulation import Conditions
from lowcomm_node.simulation.network import SimulatedStream
from lowcomm_protocol.exchange import base, events
from lowcomm_protocol.exchange.events import Outcome

METHODS = {"noloco": {}, "diloco": {"group": 4}}


@pytest.mark.parametrize("method", METHODS)
def test_streams_that_have_ended_are_forgotten(method):
    swarm = Swarm(spec_of(method, interval=10, **METHODS[method]), 20, 120.0, Conditions(loss=0.3))
    swarm.run()
    assert swarm.outcomes[Outcome.APPLIED] and swarm.outcomes[Outcome.FAILED]
    assert [stream for peer in swarm.peers for stream in peer.by_stream] == []


class Crossing(QuadraticPeer):
    """Its network breaks every call that crossed another, in the moment in which that ends."""

    broken = 0

    def _carry_out(self, effect: base.Effect) -> None:
        if isinstance(effect, events.CancelCall):
            self._break(self.exchanges[effect.exchange].calls[effect.peer])
        super()._carry_out(effect)

    def receive(self, stream: SimulatedStream, kind: str, payload: object) -> None:
        super().receive(stream, kind, payload)
        if kind == "refuse":
            self._break(stream)

    def _break(self, stream: SimulatedStream) -> None:
        Crossing.broken += 1
        self.network.break_(stream)


def test_a_late_break_of_a_call_that_crossed_costs_no_exchange(monkeypatch):
    monkeypatch.setattr(quadratic, "QuadraticPeer", Crossing)
    monkeypatch.setattr(quadratic, "STEP", 0.001)
    Crossing.broken = 0
    swarm = Swarm(spec_of("noloco", interval=2000), 2, 200.0).run()
    assert Crossing.broken > 20, "no calls crossed"
    assert set(swarm.outcomes) == {Outcome.APPLIED}
