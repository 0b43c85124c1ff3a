"""The swarm of compose.yaml: it exchanges, learns, and survives what is done to it; likewise on the
text of compose.text.yaml."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from engine import Engine
from house import House, house

from helpers.processes import command, environment

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


def test_nodes_train_on_text_of_one_container_and_go_on_without_it(
    engine: Engine, tmp_path: Path
) -> None:
    packs = packed_run(tmp_path)
    with house(engine, "lc-text", "compose.yaml", "compose.text.yaml", PACKS=str(packs)) as swarm:
        [text], nodes = swarm.containers("text"), swarm.containers("node")
        assert len(nodes) == 4
        for name in nodes:
            status = swarm.until(name, lambda s: trains(s) and has_exchanged(1)(s), "training")
            assert status["text"][0]["bytes_fetched"] > 0, "it had no text"
        status = swarm.until(text, lambda s: s["peers"] == 4, "all are peers of what serves text")
        assert status["phase"] == "serving" and is_healthy(swarm, text)
        assert status["text"][0]["bytes_given"] > 0 == status["text"][0]["bytes_fetched"]

        engine.podman("stop", "--time", "60", text)
        assert engine.podman("inspect", "--format", "{{.State.ExitCode}}", text).strip() == "0"
        steps = {name: swarm.until(name, trains, "training")["trainer"]["steps"] for name in nodes}
        for name, count in steps.items():
            swarm.until(name, lambda s, n=count: s["trainer"]["steps"] > n + 20, "training on")


def packed_run(folder: Path) -> Path:
    """A folder as compose.text.yaml wants it: a pack, and the run that names it."""
    texts, packs = folder / "texts", folder / "packs"
    texts.mkdir()
    packs.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"Tea number {number}. " * 200)
    for line in ("data pack ../texts tea.pack", "init --data tea.pack --steps 20000 run.toml"):
        subprocess.run(
            command("lowcomm_node", *line.split(), "--home", str(folder / "creator")),
            cwd=packs, env=environment(), check=True, timeout=60,
        )  # fmt: skip
    return packs
