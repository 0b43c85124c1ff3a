"""``doctor`` and ``ping`` with real processes: what they find is what is there."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.processes import Swarm, run, until_exchanged

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


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
    assert all(found["bandwidth"]["figures"][key] > 0 for key in ("up", "down", "round_trip"))


def test_doctor_and_ping_find_what_is_there(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec("noloco")))
    a, b = swarm.node("a"), swarm.node("b")
    until_exchanged((a, b), 1)

    home = swarm.folder / "none"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(examine, "--home", str(a.home))
        alone = pool.submit(examine, "--home", str(home), "--peers", swarm.address)

    # A node that runs is asked: it has the ports, and knows the peers.
    found = running.result()
    assert_seen_from_loopback(found)
    assert found["node"]["figures"]["phase"] == "training"
    assert found["routes"]["figures"]["lost"] == []
    for name in ("disk", "memory", "gpu", "congestion"):
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
