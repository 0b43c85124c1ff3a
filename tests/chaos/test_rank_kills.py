"""A node that trains on two devices, of which processes are killed at random instants: its daemon
and its exchanges go on, and its checkpoints are those of one device."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import psutil
import pytest

from helpers.processes import Node, Swarm, alive, descendants, run, until_exchanged
from helpers.waiting import until
from lowcomm_node.cli import app

pytestmark = [pytest.mark.chaos, pytest.mark.swarm]

EVERY = 5
"""Inner steps between two checkpoints."""
WITHIN = 1.0
"""Seconds of training after which a process is dead."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instants", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_a_node_goes_on_whichever_of_its_processes_is_killed(
    swarm: Swarm, instants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    random = Random(f"ranks:{instants}")
    swarm.bootstrap()
    home, several = str(swarm.folder / "creator"), swarm.folder / "several"
    made = run(
        "lowcomm_node", "create", str(swarm.spec()), "--peers", swarm.address, "--home", home
    )
    assert made.returncode == 0, made.stderr
    creator = swarm.node("creator")
    node, family = start(swarm, "cpu,cpu"), list[int]()
    for instant in range(instants):
        # Each has its turn, that of rank 1 first, and then in any order.
        rank = 1 - instant if instant < 2 else random.randrange(2)
        until_exchanged([creator, node], 1, what=f"before kill {instant}: exchanges of both")
        first, *others = ranks_of(trained(node))
        assert len(others) == 1, "it trains on both devices"
        family += descendants(node.child.pid)
        seen = train_for(node, random.uniform(0.0, WITHIN))
        os.kill((first, *others)[rank], signal.SIGKILL)
        until(lambda old=(first, *others): not alive([*old]), 20, "both are gone")
        back = node.until(further_than(seen, instant + 1), f"kill {instant}: further than before")
        assert not {first, *others} & set(ranks_of(back))
        reason = back["trainer"]["last_failure"]["reason"]
        assert ("(rank 1) failed" if rank else "SIGKILL") in reason, reason
        assert not [warning for warning in back["warnings"] if "skipped" in warning]
    until_exchanged([creator, node], 1)
    family += descendants(node.child.pid)
    now = max(trained(one)["trainer"]["swarm_step"] for one in (creator, node))
    sooner = ("--set", f"run.steps={now + 20}", "--at", str(now))
    done = run("lowcomm_node", "amend", "--home", home, *sooner)
    assert done.returncode == 0, done.stderr
    assert [one.child.wait(150) for one in (creator, node)] == [0, 0], "the run ends for both"
    until(lambda: not alive(family), 20, "no process is left behind")
    if instants > 1:  # CI sees in test_ranks.py that one process resumes what several have saved
        of_two = exported(several, swarm.folder / "two")
        assert start(swarm, "cpu").child.wait(150) == 0
        assert exported(several, swarm.folder / "one") == of_two


def start(swarm: Swarm, devices: str) -> Node:
    """The node on these devices; started again it is the same."""
    return swarm.node("several", "--devices", devices, "--checkpoint-every", str(EVERY))


def trained(node: Node) -> dict[str, Any]:
    """Its status once it trains."""
    return node.until(lambda s: s["phase"] == "training" and s["trainer"]["steps"], "training")


def further_than(steps: int, failures: int) -> Callable[[dict[str, Any]], bool]:
    """Whether it has failed so often, and has trained on far enough to be forgiven."""

    def holds(status: dict[str, Any]) -> bool:
        trainer = status["trainer"]
        goes_on = status["phase"] == "training" and trainer["failures"] == failures
        return goes_on and (trainer["steps"] or 0) >= steps + EVERY

    return holds


def train_for(node: Node, seconds: float) -> int:
    """Let it train for so long; steps that it was seen to have done."""
    end = monotonic() + seconds
    status = node.until(lambda _: monotonic() >= end, "the instant to die")
    return int(status["trainer"]["steps"])


def ranks_of(status: dict[str, Any]) -> list[int]:
    """Process ids of its trainer, that of rank 0 first."""
    trainer = psutil.Process(status["trainer"]["pid"])
    children = trainer.children()
    return [
        trainer.pid,
        *(one.pid for one in children if "lowcomm_node.trainer.ranks" in one.cmdline()),
    ]


def exported(home: Path, folder: Path) -> dict[str, bytes]:
    """The files of an export of its newest checkpoint."""
    app(["checkpoint", "export", str(folder), "--home", str(home)], standalone_mode=False)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
