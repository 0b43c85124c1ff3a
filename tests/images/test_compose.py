"""The swarm of compose.yaml, and behind routers that of compose.wan.yaml: it exchanges, learns, and
survives what is done to it."""

import time
from typing import Any

import pytest
from engine import Engine
from house import House, house

pytestmark = [pytest.mark.images, pytest.mark.soak, pytest.mark.timeout(3600)]
LEAVING = 45.0


def trains(status: dict[str, Any]) -> bool:
    return status["phase"] == "training"


def has_exchanged(count: int) -> Any:
    return lambda status: status["exchanges"]["completed"] >= count


def has_learned(status: dict[str, Any]) -> bool:
    first, last = status["trainer"]["val_loss_first"], status["trainer"]["val_loss_last"]
    return last is not None and last < 0.9 * first


def is_healthy(swarm: House, name: str) -> bool:
    """As the engine sees it by the image's own check."""
    swarm.engine.podman("healthcheck", "run", name)
    return True


def test_four_nodes_learn_and_survive_what_is_done_to_their_containers(engine: Engine) -> None:
    with house(engine, "lc-four", "compose.yaml") as swarm:
        nodes = swarm.containers("node")
        assert len(nodes) == 4
        for name in nodes:
            swarm.until(
                name, lambda s: trains(s) and has_exchanged(2)(s), "training and exchanging"
            )
        now = {
            name: swarm.until(name, has_learned, "its loss on held-out text falls")
            for name in nodes
        }
        assert len({status["peer_id"] for status in now.values()}) == 4, (
            "each has an identity of its own"
        )
        assert {engine.podman("exec", name, "readlink", "/tmp/home").strip() for name in nodes} == {
            f"/state/{number}" for number in range(4)
        }
        assert all(is_healthy(swarm, name) for name in [*nodes, "lc-four_bootstrap_1"])
        told = swarm.logs(nodes[0])
        assert " held-out loss " in told and " tokens/s, " in told and "Traceback" not in told
        check_control_is_local(swarm, nodes[0], nodes[1])
        stopped_in_order(swarm, nodes[0])
        killed(swarm, nodes[1])
        created_anew(swarm, nodes[2])
        scaled(swarm)


def check_control_is_local(swarm: House, name: str, other: str) -> None:
    """Nobody reaches a node's control API but from inside its container."""
    engine, read = (
        swarm.engine,
        "import json; print(json.load(open('/tmp/home/control.json'))['port'])",
    )
    port = engine.podman("exec", name, "python3", "-c", read).strip()
    host = engine.podman(
        "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name
    ).strip()
    dial = f"import socket; socket.create_connection(('{{}}', {port}), 5)"
    engine.podman("exec", name, "python3", "-c", dial.format("127.0.0.1"))
    with pytest.raises(RuntimeError, match="Connection refused"):
        engine.podman("exec", other, "python3", "-c", dial.format(host))
    assert engine.podman("port", name) == "", "no port is published"


def stopped_in_order(swarm: House, name: str) -> None:
    """SIGTERM: it saves and leaves in time; started again it is the same peer, and no step is
    lost."""
    engine = swarm.engine
    before = swarm.until(name, trains, "training")
    began = time.monotonic()
    engine.podman("stop", "--time", "60", name)
    took = time.monotonic() - began
    print(f"{name} left in {took:.1f} s")
    assert took < LEAVING
    assert engine.podman("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "0", (
        swarm.logs(name)[-2000:]
    )
    engine.podman("start", name)
    after = swarm.until(name, lambda s: trains(s) and s["trainer"]["steps"], "training again")
    assert after["peer_id"] == before["peer_id"]
    assert after["trainer"]["steps"] >= before["trainer"]["steps"], "all steps were saved"
    swarm.until(name, has_exchanged(1), "exchanging again")


def killed(swarm: House, name: str) -> None:
    """SIGKILL: it resumes from its newest checkpoint, in the same home."""
    engine = swarm.engine
    before = swarm.until(name, lambda s: trains(s) and s["checkpoint"], "a checkpoint")
    saved, began = before["checkpoint"]["step"], before["trainer"]["swarm_step"]
    engine.podman("kill", "--signal", "KILL", name)
    engine.podman("start", name)  # where the engine has not done so by itself
    after = swarm.until(
        name, lambda s: trains(s) and s["uptime"] < before["uptime"], "training again"
    )
    assert after["peer_id"] == before["peer_id"]
    assert saved <= began and after["trainer"]["swarm_step"] >= saved
    swarm.until(name, has_exchanged(1), "exchanging again")


def created_anew(swarm: House, name: str) -> None:
    """A container that is removed and made again is the same peer: its home waits for it."""
    before = swarm.until(name, lambda s: trains(s) and s["checkpoint"], "a checkpoint")
    swarm.engine.podman("rm", "--force", "--time", "60", name)
    swarm.compose("up", "-d", "--no-build")
    after = swarm.until(name, trains, "training again")
    assert after["peer_id"] == before["peer_id"]
    assert after["trainer"]["swarm_step"] >= before["checkpoint"]["step"]


def scaled(swarm: House) -> None:
    """More nodes join, and copy where the others are."""
    swarm.compose("up", "-d", "--no-build", NODES="6")
    nodes = swarm.containers("node")
    assert len(nodes) == 6
    peers = {swarm.until(name, trains, "training")["peer_id"] for name in nodes}
    assert len(peers) == 6
    newest = swarm.until(nodes[-1], has_exchanged(1), "the newest exchanges")
    assert newest["peers"] == 5
