"""A trainer that dies is started again, one that dies for good takes its node along, and a pause is
a pause."""

import os
import signal
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from helpers.processes import START, Node, Swarm, alive, run, until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
OFTEN = ("--checkpoint-every", "20")


def trainer_of(node: Node) -> int:
    """The process that trains now."""
    pid = node.until(lambda s: s["trainer"]["pid"], "a trainer")["trainer"]["pid"]
    assert psutil.pid_exists(pid)
    return pid


def phase_seen_by(watcher: Node, node: Node) -> str | None:
    """What a node is doing, as another one sees it; None if it does not see it."""
    status = node.status()
    me = status["peer_id"] if status else None
    return next((peer["phase"] for peer in watcher.peers() if peer["peer_id"] == me), None)


def test_a_trainer_that_is_killed_is_started_again_and_a_pause_frees_its_memory(
    swarm: Swarm,
) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    a, b = (swarm.node(name, *OFTEN, "--record-life", "600") for name in "ab")
    until_exchanged((a, b), 1)

    # Killed in the midst of training: the node stays, and goes on from its checkpoint.
    saved = a.until(lambda s: s["checkpoint"], "a checkpoint")["checkpoint"]["step"]
    first = trainer_of(a)
    badness = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (first, a.child.pid)]
    assert badness[0] > badness[1], "where memory runs out the kernel takes the trainer"
    os.kill(first, signal.SIGKILL)
    told = a.until(lambda s: s["phase"] == "restarting", "the failure", 60)
    assert "was killed (SIGKILL)" in told["waiting"] and "journalctl -k" in told["waiting"]
    again = a.until(lambda s: s["phase"] == "training", "training again")
    assert again["pid"] == told["pid"], "the daemon lived on"
    assert again["trainer"]["pid"] != first and not alive([first])
    assert again["trainer"]["swarm_step"] >= saved, "it began at a checkpoint"
    assert (again["trainer"]["failures"], again["trainer"]["last_failure"]["kind"]) == (1, "died")
    a.until_completed(1)

    # Paused: no trainer, seen as paused by the other, which trains on; the daemon answers.
    paused = run("lowcomm_node", "pause", "2h", "--home", str(a.home))
    assert paused.returncode == 0 and "paused by its owner until" in paused.stdout, paused.stderr
    now = a.status() or {}
    assert (now["phase"], now["trainer"]["pid"], now["exchanges_running"]) == ("paused", None, [])
    assert len(psutil.Process(a.child.pid).children()) == 1, "p2pd alone is left"
    assert phase_seen_by(b, a) == "paused"
    well = run("lowcomm_node", "healthy", "--home", str(a.home))
    assert (well.returncode, well.stdout) == (0, f"{now['waiting']}\n"), (
        "what its owner wants is health"
    )
    well = run("lowcomm_node", "healthy", "--home", str(b.home))
    assert well.returncode == 0 and well.stdout.startswith("training at swarm step "), well.stdout
    steps = now["trainer"]["steps"]
    assert now["checkpoint"]["step"] == now["trainer"]["swarm_step"], "nothing is lost"
    before = (b.status() or {})["trainer"]["steps"]
    b.until(lambda s: s["trainer"]["steps"] > before + 50, "the other trains on")
    (last,) = b.ask(lambda client: client.rounds(1))
    assert (last.reason, last.left_out) == ("no partner: nobody else is training", {}), (
        "nobody asks who is paused"
    )

    # One that starts outside its hours is in the swarm, paused, and takes nothing.
    hour = (datetime.now().astimezone().hour + 12) % 24
    c = swarm.node("c", "--schedule", f"{hour:02}:00-{hour:02}:01")
    until(lambda: phase_seen_by(b, c) == "paused", START, "it is seen as paused")
    sleeping = c.until(lambda s: s["phase"] == "paused", "paused")
    assert sleeping["trainer"]["pid"] is None and "outside its schedule" in sleeping["waiting"]
    assert c.end() == 0

    # Resumed: it goes on where it was.
    assert run("lowcomm_node", "resume", "--home", str(a.home)).returncode == 0
    status = a.until(lambda s: s["phase"] == "training", "training again")
    assert status["trainer"]["steps"] >= steps
    until(lambda: phase_seen_by(b, a) == "training", 60, "the other sees it train")
    a.until_completed(1)

    # stop saves and does not wait; finish evaluates first.
    leaver = (b.status() or {})["peer_id"]
    for node, how in ((b, "stop"), (a, "finish")):
        evaluated = len(node.events("evaluated"))
        assert run("lowcomm_node", how, "--home", str(node.home)).returncode == 0
        assert node.child.wait(60) == 0
        assert len(node.events("evaluated")) == evaluated + (how == "finish"), how
        last = node.events("saved")[-1]["swarm_step"]
        reached = node.events("exchange.applied")[-1]["swarm_step"]
        assert last >= reached, "it saved what it had reached"
        if node is b:
            until(
                lambda: leaver not in [peer["peer_id"] for peer in a.peers()], 20, "it said goodbye"
            )
