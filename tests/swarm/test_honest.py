"""Nothing is held against honest nodes, however slow, late or interrupted they are: real processes on a busy machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit import Node, Swarm

from waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def tree(pid: int) -> list[int]:
    """A process and all that it has started, itself first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in tree(int(child)))]


@contextmanager
def paused(node: Node) -> Iterator[None]:
    """The node stands still, its trainer included."""
    processes = tree(node.child.pid)
    try:
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Another job on each core."""
    jobs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def nothing_is_held(nodes: list[Node]) -> None:
    held = [f"{node.home.name}: {event}" for node in nodes for event in node.events("peer.held")]
    assert not held, "\n".join(held)


def pause_until_missed(node: Node, others: list[Node]) -> None:
    """Stop a node until each of the others has failed to exchange with it, or has gone on without it for long."""
    before = [other.until(lambda _: True, "status")["trainer"]["swarm_step"] for other in others]
    with paused(node):
        for other, step in zip(others, before, strict=True):
            other.until(lambda s, step=step: s["trainer"]["swarm_step"] >= step + 40, "training on")


def test_a_node_that_comes_late_and_stands_still_for_a_while_is_taken_for_no_liar(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec("lowcomm")))
    first = [swarm.node(name) for name in "ab"]
    for node in first:
        node.until_completed(2)
    late = swarm.node("c")
    late.until_completed(2)
    pause_until_missed(late, first)
    for node in (*first, late):
        node.until_completed(3)
    nothing_is_held([*first, late])


@pytest.mark.soak
@pytest.mark.parametrize("method", ["lowcomm", "streaming-diloco"])
def test_on_a_busy_machine_honest_nodes_stand_still_for_20_s_and_are_taken_for_no_liars(
    swarm: Swarm, method: str
) -> None:
    swarm.bootstrap("--run", str(swarm.spec(method)))
    with busy_machine():
        nodes = [swarm.node(name) for name in "abc"]
        for node in nodes:
            node.until_completed(2)
        times = len(nodes[0].events("peer.held"))
        with paused(nodes[2]):
            began = nodes[0].until(lambda _: True, "status")["uptime"]
            until(lambda: nodes[0].until(lambda _: True, "status")["uptime"] > began + 20, 200, "20 s over")
        for node in nodes:
            node.until_completed(3)
        assert times == 0
        nothing_is_held(nodes)
