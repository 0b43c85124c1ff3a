"""Whatever a person does wrong gives one clear line, the documented exit code, no traceback, and
loses nothing."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import Swarm, assert_one_clear_line, free_port, run
from lowcomm_protocol.identity import Identity

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
PEER = Identity(b"x" * 32).peer_id


def test_a_bootstrap_that_is_dead(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    done = run(
        "lowcomm_node", "join", "--peers", address, "--home", str(tmp_path), "--join-deadline", "3"
    )
    assert_one_clear_line(done, 6, address, "connection refused", "check the address")


def test_a_wrong_peer_id_at_a_right_address_and_the_port_of_a_server_that_runs(
    swarm: Swarm,
) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    wrong = swarm.address.rpartition("/")[0] + "/" + PEER
    done = run(
        "lowcomm_node",
        "join",
        "--peers",
        wrong,
        "--home",
        str(swarm.folder / "a"),
        "--join-deadline",
        "3",
    )
    assert_one_clear_line(done, 6, wrong, "check the peer id")
    home = str(swarm.folder / "other")
    again = run(
        "lowcomm_bootstrap", "serve", "--home", home, "--host", "127.0.0.1", "--port", swarm.port
    )
    assert_one_clear_line(again, 75, swarm.port, "choose another port")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; only root can make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)],
            check=False,
            capture_output=True,
        ).returncode
        == 0
    )
    if not made:
        pytest.skip("making a small file system needs root and mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_never_ends_training(swarm: Swarm, small_disk: Path) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    home = small_disk / "n"
    # The text is cached first, on a disk that has room; checkpoints go to the small one.
    (swarm.folder / "data").mkdir()
    home.mkdir()
    (home / "data").symlink_to(swarm.folder / "data")
    (home / "ballast").write_bytes(b"x" * 2_600_000)
    swarm.folder = small_disk
    node = swarm.node("n", "--checkpoint-every", "20")
    status = node.until(lambda s: any("No room" in w for w in s["warnings"]), "the warning")
    step = status["trainer"]["steps"]
    node.until(lambda s: s["trainer"]["steps"] > step + 20, "training goes on")
    assert "Traceback" not in node.output
    (home / "ballast").unlink()
    assert len(node.events("not-saved")) == 1, "it is told once"
    node.until(lambda s: s["checkpoint"], "a checkpoint, once there is room")
    node.until(lambda s: not any("No room" in w for w in s["warnings"]), "no warning any more")
    assert node.events("saving-again")
    assert node.end() == 0
