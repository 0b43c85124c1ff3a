"""What must hold for the lines of a simulated network: peers may have unlike ones."""

from lowcomm_node.simulation.network import Conditions, Network


class Hearing:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.heard: list[float] = []

    def receive(self, stream: object, kind: str, payload: object) -> None:
        self.heard.append(round(self.network.now, 6))


def seconds(sender: str, receiver: str, conditions: Conditions) -> float:
    network = Network(0, conditions)
    network.peers |= {name: Hearing(network) for name in ("a", "b", "far", "slow")}
    network.send(network.open(sender, receiver), sender, "content", None, size=100)
    network.run()
    return network.peers[receiver].heard[0]


def test_contents_pass_at_the_slower_rate_of_both_ends():
    conditions = Conditions(latency=(0.0, 0.0), bandwidth=100.0, rates={"slow": 10.0})
    assert seconds("a", "b", conditions) == 1.0
    assert seconds("a", "slow", conditions) == seconds("slow", "a", conditions) == 10.0


def test_messages_of_a_peer_that_is_far_away_take_longer_both_ways():
    conditions = Conditions(latency=(0.0, 0.0), bandwidth=100.0, distances={"far": 0.5})
    assert seconds("a", "b", conditions) == 1.0
    assert seconds("a", "far", conditions) == seconds("far", "a", conditions) == 1.5
