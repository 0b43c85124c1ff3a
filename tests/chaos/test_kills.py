"""A node that is killed at random instants under load: it resumes each time, and loses no more than
it must."""

import signal
from random import Random
from time import monotonic
from typing import Any

import pytest

from helpers.processes import Node, Swarm, alive, descendants
from helpers.waiting import until
from lowcomm_node.storage.checkpoint import CheckpointStore

pytestmark = [pytest.mark.chaos, pytest.mark.swarm]

EVERY = 10
"""Inner steps that a kill may cost, a fifth of a second: at most instants a checkpoint is being
written."""
WITHIN = 4.0
"""Seconds of training after which it is dead."""


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("instants", [1, pytest.param(200, marks=pytest.mark.soak)])
def test_a_node_killed_at_any_instant_resumes_and_loses_one_interval_at_most(
    swarm: Swarm, instants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.02")
    random = Random(f"kills:{instants}")
    swarm.bootstrap("--run", str(swarm.spec(evaluate_every=50)))
    other, node = swarm.node("other"), start(swarm)
    other.until_completed(1)
    identity = trained(node)["peer_id"]
    for instant in range(instants):
        before = trained(node)["trainer"]["steps"]
        seen = max(before, die(node, random.uniform(0.0, WITHIN)))
        left = steps_left(node)
        assert left >= seen - EVERY, (
            f"instant {instant}: {seen} steps were done, and {left} are left"
        )
        node = start(swarm)
        status = trained(node)
        assert status["peer_id"] == identity
        assert status["trainer"]["steps"] >= left
        assert not [warning for warning in status["warnings"] if "skipped" in warning]
    node.until_completed(1)


def start(swarm: Swarm) -> Node:
    """The node that is killed; started again it is the same."""
    return swarm.node("killed", "--checkpoint-every", str(EVERY))


def trained(node: Node) -> dict[str, Any]:
    """Its status once it trains."""
    return node.until(lambda s: s["phase"] == "training" and s["trainer"]["steps"], "training")


def die(node: Node, seconds: float) -> int:
    """Kill it after so long; steps that it was seen to have done before."""
    seen, end = 0, monotonic() + seconds

    def over() -> bool:
        nonlocal seen
        status = node.status()
        seen = max(seen, status["trainer"]["steps"] or 0) if status else seen
        return monotonic() >= end

    until(over, seconds + 60, "the instant to die")
    family = descendants(node.child.pid)
    node.end(signal.SIGKILL)
    until(lambda: not alive(family), 20, "its trainer and p2pd gone")
    return seen


def steps_left(node: Node) -> int:
    """Own steps in its newest checkpoint; every bit of each that there is has been read."""
    (folder,) = (node.home / "runs").glob("*/checkpoints")
    store = CheckpointStore(folder, keep=3)
    steps = store.steps()
    problems = [problem for step in steps for problem in store.verify(step)]
    assert not problems, problems
    return int(store.info(steps[-1]).meta["steps"]) if steps else 0
