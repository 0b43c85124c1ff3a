"""Faults by plan at the boundaries of a real node, in a swarm of real processes."""

import json

import pytest
from broken import FaultyNode, faulty_node
from faults import Boundary, Fault, Kind, Plan
from invariants import Events, violations
from kit import Node, Swarm

from waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.swarm, pytest.mark.timeout(400)]

ON_THE_WAY = Plan(
    (
        Fault(Boundary.DHT, Kind.DROP, "publish", 1),
        Fault(Boundary.DHT, Kind.CORRUPT, "publish", 2),
        Fault(Boundary.DHT, Kind.TRUNCATE, "lookup", 2),
        Fault(Boundary.DHT, Kind.DROP, "lookup", 4),
        Fault(Boundary.DHT, Kind.DELAY, "lookup", 6, 2.0),
        Fault(Boundary.DIAL, Kind.DROP, "", 3),
        Fault(Boundary.DIAL, Kind.DELAY, "", 5, 2.0),
        Fault(Boundary.FRAME, Kind.CORRUPT, "chunk", 2),
        Fault(Boundary.FRAME, Kind.TRUNCATE, "chunk", 5),
        Fault(Boundary.FRAME, Kind.DUPLICATE, "chunk", 8),
        Fault(Boundary.FRAME, Kind.REORDER, "content", 11),
        Fault(Boundary.FRAME, Kind.DELAY, "chunk", 14, 2.0),
        Fault(Boundary.FRAME, Kind.DROP, "confirm", 6),
        Fault(Boundary.FRAME, Kind.CORRUPT, "confirm", 9),
        Fault(Boundary.FRAME, Kind.STALL, "content", 17),
        Fault(Boundary.PIPE, Kind.OUT_OF_MEMORY, "capture", 12),
        Fault(Boundary.PIPE, Kind.DELAY, "capture", 15, 1.0),
        Fault(Boundary.DISK, Kind.NO_SPACE, "", 30),
    )
)


def told_by(nodes: list[Node]) -> dict[str, Events]:
    """What nodes have printed, by peer id."""
    told: dict[str, Events] = {}
    for node in nodes:
        peer_id = node.until(bool, "answering")["peer_id"]
        told[peer_id] = [json.loads(line) for line in node.output.splitlines() if line.startswith('{"time"')]
    return told


def until_all_has_happened(node: FaultyNode, deadline: float) -> None:
    """Wait until the plan of a node is through."""
    until(lambda: not node.left(), deadline, f"all of the plan; left: {node.left()}")


def test_what_goes_wrong_on_the_way_of_one_node_costs_single_exchanges(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    nodes = [swarm.node("a"), swarm.node("b"), faulty_node(swarm, "c", ON_THE_WAY, "--checkpoint-every", "50")]
    for node in nodes:
        node.until_completed(1)
    until_all_has_happened(nodes[2], 120)
    for node in nodes:
        node.until_completed(2)
        status = node.until(lambda s: s["phase"] == "training", "training")
        assert status["trainer"]["val_loss_last"] < status["trainer"]["val_loss_first"]
    assert violations(told_by(nodes)) == []
