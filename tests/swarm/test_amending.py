"""What must hold when a creator changes a run that trains: real nodes follow, exchanges go on, and
late ones get there too."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import Node, Swarm, run
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
RATE = 0.000625


def amend(swarm: Swarm, *arguments: str) -> Any:
    return run("lowcomm_node", "amend", "--home", str(swarm.folder / "creator"), *arguments)


def follows(amendments: int) -> Any:
    """Whether a status shows so many amendments in force, and the rate of the first one."""

    def holds(status: dict[str, Any]) -> bool:
        known = (status["run"] or {}).get("amendments", [])
        in_force = [one for one in known if one["in_force"]]
        return len(in_force) == amendments and status["trainer"]["learning_rate"] == pytest.approx(
            RATE
        )

    return holds


def ended(*nodes: Node) -> bool:
    return all(node.child.poll() is not None for node in nodes)


def test_all_follow_an_amendment_while_they_train_and_a_late_one_does_too(swarm: Swarm) -> None:
    swarm.bootstrap()
    home, spec = str(swarm.folder / "creator"), swarm.spec()
    assert (
        run(
            "lowcomm_node", "create", str(spec), "--peers", swarm.address, "--home", home
        ).returncode
        == 0
    )
    creator, other = swarm.node("creator"), swarm.node("other")
    creator.until_completed(1)

    # A constant rate from a step on that is behind them by now.
    changes = (f"train.learning_rate={RATE}", "train.final_learning_rate=1", "train.warmup=0")
    done = amend(
        swarm, "--json", "--at", "1", *(word for change in changes for word in ("--set", change))
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["number"] == 1
    for node in (creator, other):
        node.until(follows(1), "the first amendment in force")
        assert (
            "so it holds at once"
            in until(lambda node=node: node.events("amended"), 10, "told")[0]["text"]
        )
    other.until_completed(1)
    shown = run("lowcomm_node", "status", "--home", home).stdout
    assert "amendment 1" in shown and "(in force)" in shown

    late = swarm.node("late")
    late.until(follows(1), "the late node follows")

    # From a step on that is ahead of them, who may join: the late one leaves there.
    members = ",".join(str((node.status() or {})["peer_id"]) for node in (creator, other))
    step = (late.status() or {})["trainer"]["swarm_step"] + 50
    listed = ("--set", "run.admission=list", "--set", f"run.members={members}", "--at", str(step))
    done = amend(swarm, *listed)
    assert done.returncode == 0, done.stderr
    until(lambda: ended(late), 150, "the late one has left")
    assert late.child.returncode == 77 and late.events("saved")[-1]["swarm_step"] >= step
    assert not ended(creator) and not ended(other)

    end = (other.status() or {})["trainer"]["swarm_step"] + 80
    done = amend(
        swarm, "--set", f"run.steps={end}", "--set", "run.description=shorter", "--at", str(step)
    )
    assert done.returncode == 0, done.stderr
    nodes = (creator, other)
    until(lambda: ended(*nodes), 150, "the run ends where the third amendment says")
    assert [node.child.returncode for node in nodes] == [0, 0]
    for node in nodes:
        assert node.events("amended")[-1]["settings"]["run.steps"] == end

    # Who comes when all have gone knows it from its home, and the creator can make the run longer
    # again.
    kept = Path(home, "runs").glob("*/amendments")
    assert len(json.loads(next(kept).read_bytes())) == 3
