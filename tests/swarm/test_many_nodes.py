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
AT_ONCE = 4
"""Nodes that start together: each imports torch twice, which fills a core for seconds."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with lonely_swarm(tmp_path) as swarm:
        swarm.bootstrap("--run", str(swarm.spec("lowcomm", interval=20)))
        yield swarm


def started(
    swarm: Swarm, names: list[str], deadline: float, *options: str, **more: str
) -> list[Node]:
    """Nodes that train."""
    nodes = list[Node]()
    for first in range(0, len(names), AT_ONCE):
        some = [swarm.node(name, *options, **more) for name in names[first : first + AT_ONCE]]
        for node in some:
            node.until(lambda s: s["phase"] == "training", "training", deadline)
        nodes += some
    return nodes


def sees(node: Node) -> set[str]:
    return {peer["peer_id"] for peer in node.peers()}


@pytest.mark.parametrize(
    ("count", "deadline", "step"),
    [
        (4, 120.0, 0.1),
        # A step takes so long that the nodes leave room for each other.
        (24, 600.0, 2.0),
    ],
)
@pytest.mark.soak  # tests/chaos/test_soak.py is the slice of CI
@pytest.mark.timeout(1800)
def test_half_of_a_swarm_and_its_server_may_die_at_once(
    swarm: Swarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    deadline: float,
    step: float,
) -> None:
    monkeypatch.setenv("STEP_SECONDS", str(step))
    options = ("--record-life", "600", "--checkpoint-every", "10", "--stay")
    names = [f"node-{number}" for number in range(count)]
    nodes = started(swarm, names, deadline, *options)
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
    nodes[::2] = started(swarm, names[::2], deadline, *options, address=other.address)
    for node in nodes[::2]:
        status = node.until(lambda s: s["phase"] == "training", "training", deadline)
        assert status["trainer"]["swarm_step"] >= 10, "they go on from their checkpoints"
    for node in nodes:
        until(lambda node=node: len(sees(node)) == count - 1, deadline, "all know each other again")
    until_exchanged(nodes, 1, deadline)
