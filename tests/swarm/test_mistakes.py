"""Whatever a person does wrong gives one clear line, the documented exit code, no traceback, and
loses nothing."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import Swarm, assert_one_clear_line, free_port, run
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
PEER = Identity(b"x" * 32).peer_id


def test_an_address_that_is_none(tmp_path: Path) -> None:
    for address in (
        "203.0.113.7:31337",
        "/ip4/203.0.113.7/tcp/31337/p2p/Qm123",
        "/ip4/1.2.3.4/tcp/99999/p2p/" + PEER,
    ):
        done = run("lowcomm_node", "join", "--peers", address, "--home", str(tmp_path))
        assert_one_clear_line(done, 78, address[:20], "/p2p/12D3KooW")


def test_a_bootstrap_that_is_dead(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    done = run(
        "lowcomm_node", "join", "--peers", address, "--home", str(tmp_path), "--join-deadline", "3"
    )
    assert_one_clear_line(done, 6, address, "connection refused", "check the address")


def test_a_wrong_peer_id_at_a_right_address(swarm: Swarm) -> None:
    swarm.bootstrap()
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


@pytest.mark.soak  # each mistake is made in tests/unit/spec/test_run.py
def test_mistakes_in_a_specification(swarm: Swarm) -> None:
    swarm.bootstrap()
    path = swarm.folder / "bad.toml"
    cases = [
        ('[run]\nname = "a"\nstps = 3\n', 78, "run.stps", "did you mean 'steps'?"),
        ('version = 7\n[run]\nname = "a"\n', 5, "version 7", "install the release"),
        ('[run]\nname = "a"\n[sync]\nmethod = "noloco"\nmomentum = 0.9\n', 78, "consensus"),
        ("[run\n", 78, "not valid TOML"),
    ]
    for text, code, *words in cases:
        path.write_text(text)
        done = run(
            "lowcomm_node",
            "create",
            str(path),
            "--peers",
            swarm.address,
            "--home",
            str(swarm.folder / "c"),
        )
        assert_one_clear_line(done, code, str(path), *words)


def test_a_signed_run_with_a_bad_signature_or_of_another_version(tmp_path: Path) -> None:
    run_ = sign_run(parse_toml('[run]\nname = "a"\n'), Identity(b"y" * 32))
    path = tmp_path / "run.json"
    serve = (
        "lowcomm_bootstrap",
        "serve",
        "--home",
        str(tmp_path / "b"),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--run",
    )
    path.write_bytes(run_.to_bytes().replace(b'\\"steps\\":400', b'\\"steps\\":401'))
    assert_one_clear_line(run(*serve, str(path)), 78, "signature")
    content = run_.spec.canonical().replace(b'"version":2', b'"version":3')
    signer = Identity(b"y" * 32)
    from json import dumps

    signature = signer.sign("run specification", content).hex()
    path.write_text(
        dumps({"creator": signer.peer_id, "signature": signature, "spec": content.decode()})
    )
    assert_one_clear_line(run(*serve, str(path)), 5, "version 3", "install the release")


def test_a_port_of_a_server_that_is_in_use(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    home = str(swarm.folder / "other")
    again = run(
        "lowcomm_bootstrap", "serve", "--home", home, "--host", "127.0.0.1", "--port", swarm.port
    )
    assert_one_clear_line(again, 75, swarm.port, "choose another port")


@pytest.mark.parametrize(
    "flag",
    [
        "--port",
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("--dht-port", "--control-port")),
    ],
)
def test_a_port_of_a_node_that_is_in_use(swarm: Swarm, flag: str) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    home = str(swarm.folder / "other")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(
            "lowcomm_node",
            "join",
            "--peers",
            swarm.address,
            "--home",
            home,
            flag,
            port,
            "--threads",
            "1",
        )
        assert_one_clear_line(done, 75, port, "choose another")


@pytest.mark.soak  # a minute; the lock is in tests/unit/storage/test_identity_files.py
def test_a_home_that_is_in_use(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    node = swarm.node("a")
    node.until(lambda s: True, "up")
    done = run("lowcomm_node", "join", "--peers", swarm.address, "--home", str(node.home))
    assert_one_clear_line(done, 75, str(node.home), str(node.child.pid))
    assert node.status() is not None


def test_commands_without_a_daemon(tmp_path: Path) -> None:
    for command in ("status", "peers", "rounds", "finish", "stop"):
        assert_one_clear_line(run("lowcomm_node", command, "--home", str(tmp_path)), 3, "join")


@pytest.mark.soak  # each byte is flipped in tests/unit/storage/test_checkpoint.py
def test_a_flipped_byte_costs_only_the_newest_checkpoint(swarm: Swarm) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    node = swarm.node("a", "--checkpoint-every", "50")
    first = node.until(
        lambda s: s["checkpoint"] and s["checkpoint"]["step"] >= 100, "two checkpoints"
    )
    assert node.end() == 0
    newest = max((node.home / "runs").glob("*/checkpoints/step-*"))
    path = newest / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    verified = run("lowcomm_node", "checkpoint", "verify", "--home", str(node.home))
    assert_one_clear_line(
        verified, 1, str(int(newest.name[5:])), "resumes from the newest sound one"
    )
    again = swarm.node("a")
    now = again.until(lambda s: s["phase"] == "training", "training again")
    assert now["peer_id"] == first["peer_id"]
    assert any("does not match" in warning for warning in now["warnings"])
    assert now["trainer"]["steps"] >= 50, "resumed from the one before"


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
    node.until(lambda s: s["trainer"]["steps"] > step + 50, "training goes on")
    assert "Traceback" not in node.output
    (home / "ballast").unlink()
    assert len(node.events("not-saved")) == 1, "it is told once"
    node.until(lambda s: s["checkpoint"], "a checkpoint, once there is room")
    node.until(lambda s: not any("No room" in w for w in s["warnings"]), "no warning any more")
    assert node.events("saving-again")
    assert node.end() == 0


def test_a_full_disk_at_the_start(swarm: Swarm, small_disk: Path) -> None:
    swarm.bootstrap("--run", str(swarm.spec()))
    done = run(
        "lowcomm_node",
        "join",
        "--peers",
        swarm.address,
        "--home",
        str(small_disk / "n"),
        "--threads",
        "1",
    )
    assert_one_clear_line(done, 75, "No room", "Free some space")
