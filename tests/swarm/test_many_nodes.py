"""A swarm of many real nodes: its bootstrap server is killed and replaced, half of the nodes are
killed, and nothing is lost."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import Node, Swarm, lonely_swarm, until_exchanged
from helpers.waiting import until

pytestmark = pytest.mark.swarm
HEAL = 60.0
"""Seconds in which views are whole again."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with lonely_swarm(tmp_path) as swarm:
        swarm.bootstrap("--run", str(swarm.spec("lowcomm", interval=20)))
        yield swarm


def sees(node: Node) -> set[str]:
    return {peer["peer_id"] for peer in node.peers()}


@pytest.mark.parametrize(
    ("count", "deadline"),
    [
        pytest.param(4, 120.0, marks=pytest.mark.timeout(400)),
        pytest.param(24, 600.0, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_half_of_a_swarm_and_its_server_may_die_at_once(
    swarm: Swarm, tmp_path: Path, count: int, deadline: float
) -> None:
    options = ("--record-life", "600", "--checkpoint-every", "10", "--stay")
    nodes = [swarm.node(f"node-{number}", *options) for number in range(count)]
    until_exchanged(nodes, 1, deadline)
    ids = [node.until(bool, "an answer")["peer_id"] for node in nodes]
    for node in nodes:
        until(lambda node=node: len(sees(node)) == count - 1, deadline, "all know each other")
        node.until(lambda s: s["checkpoint"], "a checkpoint", deadline)
    server = swarm.processes[0]
    dead, rest = nodes[::2], nodes[1::2]
    for process in (server, *dead):
        process.end(signal.SIGKILL)
    alive = {one for node, one in zip(nodes, ids, strict=True) if node in rest}
    for node, one in zip(rest, ids[1::2], strict=True):
        until(lambda node=node, one=one: sees(node) == alive - {one}, HEAL, "who is left is known")
    until_exchanged(rest, 1, deadline)

    entry = rest[0].until(bool, "an answer")["entry_points"][0]
    other = Swarm(tmp_path / "other")
    swarm.processes.append(other.bootstrap("--peers", entry))
    steps = {}
    for number, node in enumerate(nodes):
        if node in dead:
            again = swarm.node(f"node-{number}", *options, address=other.address)
            status = again.until(lambda s: s["phase"] == "training", "training", deadline)
            steps[number] = status["trainer"]["swarm_step"]
            nodes[number] = again
    assert min(steps.values()) >= 10, "they go on from their checkpoints"
    for node in nodes:
        until(lambda node=node: len(sees(node)) == count - 1, deadline, "all know each other again")
    until_exchanged(nodes, 1, deadline)
