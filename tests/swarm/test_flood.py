"""A node under a flood: its memory stays, exchanges go on, and it leaves the client out."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from helpers.processes import Node, Swarm, environment
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
CLIENT = Path(__file__).parents[1] / "helpers" / "flooding.py"
MAX_GROWTH = 64 * 2**20


def private(node: Node) -> int:
    """Bytes of a daemon, its trainer and p2pd that nobody shares."""
    daemon = psutil.Process(node.child.pid)
    return sum(one.memory_full_info().uss for one in (daemon, *daemon.children(recursive=True)))


def flood(node: Node, seconds: float, calls: int, connections: int) -> dict[str, int]:
    """Flood a node; how calls and connections ended."""
    status = node.until(lambda s: s["phase"] == "training", "training")
    (run,) = (node.home / "runs").glob("*/run.json")
    dht = next(one.split("/")[4] for one in status["entry_points"] if "/tcp/" in one)
    command = [
        sys.executable, str(CLIENT), status["addresses"][0], status["peer_id"], str(run),
        "--seconds", str(seconds), "--calls",
        str(calls), "--connections", str(connections), "--dht-port", dht,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        input="\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["ends"]


def test_a_node_that_is_flooded_keeps_its_memory_and_goes_on(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec("noloco", start_peers=2)))
    node, other = swarm.node("a"), swarm.node("b")
    before = node.until_completed(2)
    memory = private(node)
    ends = flood(node, seconds=5.0, calls=500, connections=100)
    assert {
        "garbage: UNAUTHENTICATED",
        "no credential: UNAUTHENTICATED",
        "replayed: UNAUTHENTICATED",
    } <= set(ends)
    assert ends.get("half-open: OK", 0) == 0
    after = node.until_completed(2, 60)
    assert private(node) - memory < MAX_GROWTH
    assert after["trainer"]["steps"] > before["trainer"]["steps"]
    assert after["refusals"]["call.missing"] > 0
    (peer,) = [one for one in node.peers() if one["peer_id"] == other.status()["peer_id"]]  # type: ignore[index]
    assert (peer["score"], peer["left_out"]) == (1.0, False), (
        "what others do is not held against it"
    )
    until(
        lambda: [one for one in node.peers() if one["left_out"]] or None,
        30,
        "the client is left out",
    )
