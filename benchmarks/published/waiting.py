"""How long peers wait for each other with the production engine, where steps vary: never. The
price is told, too: rounds in which a peer found no partner."""

from random import Random

from published.hollow import World
from published.latency import MU, STEPS, VARIANCE

from lowcomm_node.simulation.network import Conditions
from lowcomm_protocol.spec.run import RunSpec

PEERS = (16, 64)
INTERVAL = 20
ROUNDS = 20
"""Of `STEPS` inner steps in the paper's count: so many are one of ours."""
VALUES = 10**6


def measure() -> dict[str, dict[str, float]]:
    """For pairs that are drawn anew, by peers."""
    return {str(peers): _count(peers) for peers in PEERS}


def _count(peers: int) -> dict[str, float]:
    spec = RunSpec.model_validate(
        {
            "run": {"name": "papers", "steps": ROUNDS * INTERVAL},
            "sync": {"method": "noloco", "interval": INTERVAL},
        }
    )

    def step(random: Random) -> float:
        """Several of the paper's steps, so that a round takes as many of them."""
        return sum(random.lognormvariate(MU, VARIANCE**0.5) for _ in range(STEPS // INTERVAL))

    world = World(spec, VALUES, peers, Conditions(), step)
    count = world.run()
    waited = sum(peer.finished - peer.stepped for peer in world.all)
    return {
        "waited": waited / count.stepped,
        "alone": count.failed / (count.failed + count.applied),
        "steps": count.steps / peers,
    }
