"""Two nodes of one swarm: findings of ``doctor`` and ``ping``, a killed trainer, a pause, and how
each leaves."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.processes import START, Node, Swarm, alive, lonely_swarm, run, until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with lonely_swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.bootstrap("--run", str(swarm.spec()))
        yield swarm


@pytest.fixture(scope="module")
def nodes(swarm: Swarm) -> tuple[Node, Node]:
    """Both train, save often and have exchanged."""
    options = ("--checkpoint-every", "20", "--record-life", "600")
    both = swarm.node("a", *options), swarm.node("b", *options)
    until_exchanged(both, 1)
    return both


def examine(*arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings of ``doctor``, by their names."""
    done = run("lowcomm_node", "doctor", "--json", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == code, (done.stdout, done.stderr)
    return {finding["name"]: finding for finding in told["findings"]}


def assert_seen_from_loopback(found: dict[str, dict[str, Any]]) -> None:
    """What must be found where all are on this machine."""
    assert found["dht"]["state"] == found["clock"]["state"] == found["udp"]["state"] == "ok", found
    assert abs(found["clock"]["figures"]["offset"]) < 1.0
    assert found["outside"]["state"] == "ok", found["outside"]
    assert found["outside"]["figures"] == {"direct": True, "tcp": True, "quic": True, "relays": []}
    assert "from within this network only" in found["outside"]["value"]
    assert found["nat"]["figures"]["kind"] == "unknown", "loopback says nothing of the internet"
    assert found["udp"]["figures"] == {"gets_out": True, "gets_in": True}


def test_doctor_and_ping_find_what_is_there(swarm: Swarm, nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    home = swarm.folder / "none"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(examine, "--home", str(a.home))
        alone = pool.submit(examine, "--home", str(home), "--peers", swarm.address)

    # A node that runs is asked: it has the ports, and knows the peers.
    found = running.result()
    assert_seen_from_loopback(found)
    assert found["node"]["figures"]["phase"] == "training"
    assert found["routes"]["figures"]["lost"] == []
    for name in ("disk", "memory", "gpu"):
        assert found[name]["value"], found

    # Without one, a passing identity is examined for the time of the check, and nothing is left in
    # the home.
    found = alone.result()
    assert_seen_from_loopback(found)
    assert found["node"]["state"] == "unknown" and found["dht"]["figures"]["runs"] == 1
    assert not home.exists()

    other = (b.status() or {})["peer_id"]
    for name in (other, other[-6:]):
        done = run("lowcomm_node", "ping", name, "--json", "--home", str(a.home))
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["peer_id"] == other
        routes = {route["route"].split()[0]: route for route in told["routes"]}
        assert set(routes) == {"direct", "punched"}, routes
        for route in routes.values():
            assert (
                route["up"] > 0
                and route["down"] > 0
                and route["round_trip"] > 0
                and not route["reason"]
            )
    unknown = run("lowcomm_node", "ping", "nobody", "--home", str(a.home))
    assert unknown.returncode == 6 and "peers` lists them" in unknown.stderr
    assert "Traceback" not in a.output + b.output + swarm.processes[0].output


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
    swarm: Swarm, nodes: tuple[Node, Node]
) -> None:
    a, b = nodes

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
    assert paused.returncode == 0 and "paused by you until" in paused.stdout, paused.stderr
    now = a.status() or {}
    assert (now["phase"], now["trainer"]["pid"], now["exchanges_running"]) == ("paused", None, [])
    assert len(psutil.Process(a.child.pid).children()) == 1, "p2pd alone is left"
    assert phase_seen_by(b, a) == "paused"
    well = run("lowcomm_node", "status", "--check", "--home", str(a.home))
    assert (well.returncode, well.stdout) == (0, f"{now['waiting']}\n"), (
        "what its owner wants is health"
    )
    well = run("lowcomm_node", "status", "--check", "--home", str(b.home))
    assert well.returncode == 0 and well.stdout.startswith("training"), well.stdout
    steps = now["trainer"]["steps"]
    assert now["checkpoint"]["step"] == now["trainer"]["swarm_step"], "nothing is lost"
    before = (b.status() or {})["trainer"]["steps"]
    b.until(lambda s: s["trainer"]["steps"] > before + 20, "the other trains on")
    (last,) = b.ask(lambda client: client.exchanges(1))
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
