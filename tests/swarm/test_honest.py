"""Nothing is held against honest nodes, however slow, late or interrupted they are: real processes
on a busy machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from helpers.processes import Node, Swarm, until_exchanged

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
BUSY = 300.0
"""Seconds that anything may take on a busy machine."""
MOMENT = 0.05
"""Seconds for which a trainer of a tenth of the speed runs at once."""


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
    jobs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


@contextmanager
def a_tenth_of_the_speed(node: Node) -> Iterator[None]:
    """The node's trainer runs for one of ten moments."""
    trainer = node.until(lambda s: s["trainer"]["pid"], "a trainer")["trainer"]["pid"]
    over = threading.Event()

    def hold_back() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(trainer, signal.SIGSTOP)
                over.wait(9 * MOMENT)
                os.kill(trainer, signal.SIGCONT)
                over.wait(MOMENT)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def copies(node: Node) -> int:
    """How often a node has copied the state of others."""
    return len(node.events("state.adopted"))


def nothing_is_held(nodes: list[Node]) -> None:
    held = [f"{node.home.name}: {event}" for node in nodes for event in node.events("peer.held")]
    assert not held, "\n".join(held)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["lowcomm", "noloco", "streaming-diloco"])
def test_on_a_busy_machine_honest_nodes_that_are_slow_late_or_stand_still_are_taken_for_no_liars(
    swarm: Swarm, method: str
) -> None:
    swarm.bootstrap("--run", str(swarm.spec(method)))
    with busy_machine():
        usual, slow = (swarm.node(name) for name in ("usual", "slow"))
        until_exchanged((usual, slow), 2, BUSY)
        with a_tenth_of_the_speed(slow):
            slow.until_completed(2, BUSY)
            late = swarm.node("late")
            nodes = [usual, slow, late]
            late.until_completed(3, BUSY)
            with paused(late):
                began = usual.until(bool, "an answer")["uptime"]
                usual.until(lambda s: s["uptime"] > began + 20, "20 s over", BUSY)
            until_exchanged(nodes, 5, BUSY)
            told = {node.home.name: (node.status() or {}).get("exchanges") for node in nodes}
            print(f"{method}: {told}; states copied: {[copies(node) for node in nodes]}")
        nothing_is_held(nodes)
        assert all(copies(node) <= 2 for node in nodes), "states are copied again and again"
