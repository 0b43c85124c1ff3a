"""Faults by plan at the boundaries of a real node, in a swarm of real processes."""

import json
from itertools import pairwise

import pytest
from broken import FaultyNode, faulty_node
from faults import Boundary, Fault, Kind, Plan
from invariants import Events, violations
from soak import INTERVAL

from helpers.processes import START, Node, Swarm, until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.swarm, pytest.mark.timeout(900)]

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
        Fault(Boundary.PIPE, Kind.KILL, "merge", 9),
    )
)
TO_ITS_TRAINER = Plan(
    (
        Fault(Boundary.PIPE, Kind.OUT_OF_MEMORY, "step", 150),
        Fault(Boundary.PIPE, Kind.KILL, "step", 400),
        Fault(Boundary.PIPE, Kind.KILL, "capture", 4),
        Fault(Boundary.PIPE, Kind.EXIT, "receive", 6),
        Fault(Boundary.PIPE, Kind.STOP, "step", 700, 5.0),
        Fault(Boundary.PIPE, Kind.STALL, "step", 900),
    )
)
TO_ITS_DAEMON = Plan(
    (
        Fault(Boundary.FRAME, Kind.KILL, "content", 2),
        Fault(Boundary.FRAME, Kind.KILL, "confirm", 4),
        Fault(Boundary.FRAME, Kind.EXIT, "hello", 5),
        Fault(Boundary.FRAME, Kind.STOP, "content", 6, 4.0),
        Fault(Boundary.DIAL, Kind.KILL, "", 6),
        Fault(Boundary.DHT, Kind.KILL, "lookup", 9),
        Fault(Boundary.DISK, Kind.KILL, "", 12),
        Fault(Boundary.DHT, Kind.CLOCK_STEP, "lookup", 14, 3.0),
    )
)
TO_ITS_SNAPSHOTS = Plan(
    (
        Fault(Boundary.FETCH, Kind.CORRUPT, "chunk", 0),  # of the manifest
        Fault(Boundary.FETCH, Kind.TRUNCATE, "chunk", 2),
        Fault(Boundary.FETCH, Kind.CORRUPT, "chunk", 5),
        Fault(Boundary.FETCH, Kind.DROP, "opened", 4),
        Fault(Boundary.FETCH, Kind.DUPLICATE, "chunk", 8),
        Fault(Boundary.FETCH, Kind.REORDER, "chunk", 11),
        Fault(Boundary.FETCH, Kind.DELAY, "chunk", 13, 2.0),
        Fault(Boundary.FETCH, Kind.STOP, "chunk", 15, 4.0),
        Fault(Boundary.FETCH, Kind.STALL, "chunk", 18),
        Fault(Boundary.FETCH, Kind.KILL, "chunk", 20),
    )
)
PATIENT = 2 * START
"""Seconds to start, and to wait for a donor that falls silent in between."""
FAR = 100
"""Swarm steps after which nobody can join without a copy of the others' state."""


def told_by(nodes: list[Node]) -> dict[str, Events]:
    """What nodes have printed, by peer id."""
    peers = [node.until(bool, "answering")["peer_id"] for node in nodes]
    outputs = [node.output for node in nodes]  # one right after the other: they go on exchanging
    return {
        peer: [json.loads(line) for line in output.splitlines() if line.startswith('{"time"')]
        for peer, output in zip(peers, outputs, strict=True)
    }


def until_all_has_happened(node: FaultyNode, deadline: float) -> None:
    """Wait until the plan of a node is through."""
    until(lambda: not node.left(), deadline, f"all of the plan; left: {node.left()}")


def check_all_is_well(nodes: list[Node], disturbed: list[str]) -> None:
    """All exchange and learn, and have applied the same."""
    for node in nodes:
        node.until_completed(2)
        status = node.until(lambda s: s["phase"] == "training", "training")
        assert status["trainer"]["val_loss_last"] < status["trainer"]["val_loss_first"]
    assert violations(told_by(nodes), disturbed) == []


@pytest.mark.soak  # minutes; every fault of a frame is in test_chaos_exchanges.py
def test_what_goes_wrong_on_the_way_of_one_node_costs_single_exchanges(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    nodes = [
        swarm.node("a"),
        swarm.node("b"),
        faulty_node(swarm, "c", ON_THE_WAY, "--checkpoint-every", "50"),
    ]
    until_exchanged(nodes, 1)
    victim = nodes[2].until(bool, "answering")["peer_id"]
    until_all_has_happened(nodes[2], 200)
    check_all_is_well(nodes, [victim])


@pytest.mark.soak  # minutes; copies that are damaged or cut off are in test_state.py
@pytest.mark.parametrize("faults", [2, len(TO_ITS_SNAPSHOTS.faults)])
def test_what_goes_wrong_at_a_donor_keeps_nobody_from_joining(swarm: Swarm, faults: int) -> None:
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    # Both at once: whichever begins later copies from the other, and may be the first to meet the
    # faults.
    donors = swarm.node("a"), faulty_node(swarm, "c", Plan(TO_ITS_SNAPSHOTS.faults[:faults]))
    for donor in donors:
        donor.until(
            lambda s: s["phase"] == "training" and s["trainer"]["swarm_step"] >= FAR,
            "far ahead",
            PATIENT,
        )
    for number in range(3 * faults):  # each takes some chunks from either donor
        joiner = swarm.node(f"joiner{number}")
        joiner.until_completed(1, PATIENT)
        # Where a fault made a copy take long, the swarm went on meanwhile: only that is a reason to
        # copy again.
        copies = [event["swarm_step"] for event in joiner.events("state.adopted")]
        assert copies[0] >= FAR
        assert all(later - earlier > INTERVAL for earlier, later in pairwise(copies))
        if not donors[1].left():
            break
        assert joiner.end() == 0
    assert not donors[1].left()
    assert joiner.until(bool, "answering")["trainer"]["swarm_step"] > copies[-1]
    for donor in donors:  # neither has been left behind
        donor.until_completed(1, PATIENT)


@pytest.mark.soak  # minutes; a trainer that is killed while it merges is in the test above
def test_whatever_happens_to_a_trainer_it_is_started_again(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    nodes = [
        swarm.node("a"),
        swarm.node("b"),
        faulty_node(swarm, "c", TO_ITS_TRAINER, "--checkpoint-every", "50"),
    ]
    victim = nodes[2].until(lambda s: s["phase"] == "training", "training")["peer_id"]
    until_all_has_happened(nodes[2], 600)
    check_all_is_well(nodes, [victim] * len(TO_ITS_TRAINER.faults))


@pytest.mark.soak  # minutes; nodes that are killed are in test_soak.py
def test_whatever_happens_to_a_node_it_comes_back(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=100)))
    a, b = swarm.node("a"), swarm.node("b")
    for _ in TO_ITS_DAEMON.faults:
        node = faulty_node(swarm, "c", TO_ITS_DAEMON, "--checkpoint-every", "50")
        until(
            lambda node=node: node.child.poll() is not None or not node.left(),
            200,
            "its end, or that of the plan",
        )
        if not node.left():
            break
    if node.child.poll() is not None:
        node = faulty_node(swarm, "c", TO_ITS_DAEMON)
    victim = node.until(bool, "answering")["peer_id"]
    check_all_is_well([a, b, node], [victim] * len(TO_ITS_DAEMON.faults))
