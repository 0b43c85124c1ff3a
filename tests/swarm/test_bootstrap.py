"""``lowcomm-bootstrap serve`` as a real process: the door stays where it is, and runs stay
published."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.dht_peers import Dht
from helpers.processes import (
    Notified,
    Process,
    Swarm,
    assert_one_clear_line,
    descendants,
    environments,
    free_port,
    run,
)
from helpers.waiting import until
from lowcomm_bootstrap.registry import Registry
from lowcomm_node.dht.keys import RUNS_KEY, peers_key
from lowcomm_node.system.command import ending_signals
from lowcomm_protocol.identity import Identity, identity_from_libp2p
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
CREATOR = Identity(b"c" * 32)


def make_run(name: str) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "{name}"\n'), CREATOR)


async def start(swarm: Swarm, *arguments: str) -> Process:
    """Start the server while the event loop of the test goes on."""
    return await asyncio.to_thread(swarm.bootstrap, *arguments)


async def test_a_closed_server_keeps_only_its_own_runs(swarm: Swarm, dht: Dht) -> None:
    door = await start(swarm, "--closed", "--run", str(swarm.spec()))
    ada = await dht.peer([swarm.address])
    (data,) = (await ada.lookup(RUNS_KEY)).values()
    assert json.loads(data)["creator"] == swarm.address.rpartition("/")[2], "its own name"
    stranger = make_run("stranger")
    assert await ada.publish(RUNS_KEY, stranger.run_id, stranger.to_bytes(), 600)
    own = peers_key(next(iter(set(await ada.lookup(RUNS_KEY)) - {stranger.run_id})))
    assert await ada.lookup(own) == {}
    assert door.end() == 0
    assert [run.spec.run.name for run in Registry(door.home / "runs").runs()] == ["test"]


@pytest.mark.timeout(500)
def test_a_twin_of_the_operators_run_misleads_nobody_and_a_run_that_is_over_is_not_begun_again(
    swarm: Swarm,
) -> None:
    spec = swarm.spec(steps=20)
    door = swarm.bootstrap("--run", str(spec))
    home = str(swarm.folder / "stranger")
    done = run("lowcomm_node", "create", str(spec), "--peers", swarm.address, "--home", home)
    assert done.returncode == 0, done.stderr
    first = swarm.node("first", "--stay")
    (chosen,) = until(lambda: codes(first, "run-chosen"), 60, "it tells which run it takes")
    assert "the operator of the bootstrap server serves" in chosen
    assert "for another, --run NAME@FINGERPRINT" in chosen
    first.until(lambda s: s["phase"] == "finished", "it has trained the run to its end")

    # The last state can be had while a peer serves it.
    late = swarm.node("late", "--run", "test")
    assert late.child.wait(90) == 0, late.output[-2000:]
    (told,) = codes(late, "run-ended")
    assert "swarm step 20" in told and "join --stay" in told and "1 of them serve" in told
    assert not list(late.home.glob("runs/*/checkpoints/step-*")), "it has trained nothing"
    copy = swarm.node("copy", "--stay")
    copy.until(lambda s: s["phase"] == "finished", "it serves the last state, too")
    assert copy.events("state.adopted") and copy.end() == 0

    # When all have gone, the server still knows it.
    assert first.end() == 0
    until(lambda: door.events("run.over"), 60, "the server says that the run is over")
    listed = run("lowcomm_bootstrap", "runs", "--json", "--home", str(door.home))
    assert 20 in [json.loads(line)["ended"] for line in listed.stdout.splitlines()], listed.stdout
    last = swarm.node("last", "--stay")
    assert last.child.wait(90) == 0, last.output[-2000:]
    (told,) = codes(last, "run-ended")
    assert "nobody serves its last state any more" in told


def codes(node: Process, code: str) -> list[str]:
    """The warnings of one kind that a node has printed."""
    return [one["text"] for one in node.events("warning") if one.get("code") == code]


def test_it_stops_cleanly_at_the_first_signal_and_keeps_its_service_manager_informed(
    swarm: Swarm, notified: Notified, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (signal.SIGINT, ending_signals()[-1]):
        with notified.manages(monkeypatch):
            door = swarm.bootstrap()
        children = descendants(door.child.pid)
        assert children
        assert not any(
            "NOTIFY_SOCKET" in one or "WATCHDOG_USEC" in one for one in environments(children)
        )
        notified.until("READY=1")
        fed = notified.count("WATCHDOG=1")
        notified.until("WATCHDOG=1", fed + 1)
        assert door.end(number) == 0
        assert notified.count("STOPPING=1") == notified.count("READY=1") == 1
        assert [told.partition("=")[0] for told in notified.told[:2]] == [
            "EXTEND_TIMEOUT_USEC",
            "STATUS",
        ]
        notified.told.clear()
        assert door.events("stopping")
        assert not any(psutil.pid_exists(pid) for pid in children)
    assert "Traceback" not in door.output
    assert list((Path(os.environ["XDG_RUNTIME_DIR"]) / "lowcomm").iterdir()) == []


def test_it_is_healthy_while_it_looks_around(swarm: Swarm) -> None:
    door = swarm.bootstrap("--announce", "/dns4/boot.example.org/tcp/31337")
    ask = ("lowcomm_bootstrap", "healthy", "--home", str(door.home))
    well = run(*ask)
    assert well.returncode == 0 and well.stdout.endswith("p2pd answers\n"), well.stdout
    sign = door.home / "serving.json"
    begun = sign.stat().st_mtime
    until(lambda: sign.stat().st_mtime > begun, 30, "it has looked around, and said so")
    door.end(signal.SIGKILL)
    ill = run(*ask)
    assert ill.returncode == 4 and "ended without a goodbye" in ill.stdout, ill.stdout


def test_it_stops_at_once_at_the_second_signal(swarm: Swarm) -> None:
    door = swarm.bootstrap()
    children = descendants(door.child.pid)
    for pid in children:
        os.kill(pid, signal.SIGSTOP)  # so that a clean end takes its time
    door.child.send_signal(signal.SIGTERM)
    until(lambda: door.events("stopping"), 10, "it says that it stops")
    assert door.end(signal.SIGINT, timeout=2.5) == 128 + signal.SIGINT
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not any(psutil.pid_exists(pid) for pid in children), 15, "its p2pd ends")
    assert "Traceback" not in door.output


def test_it_prints_what_volunteers_type(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{CREATOR.peer_id}"
    named = {"LOWCOMM_BOOTSTRAP_PEERS": other}

    def launch(command: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env | named, **options)

    monkeypatch.setattr(Process, "launch", staticmethod(launch))
    door = Process(
        *(swarm.folder / "b", "lowcomm_bootstrap", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--home", str(swarm.folder / "b"), "--announce", "/dns4/boot.example.org/tcp/31337"),
    )
    swarm.processes.append(door)
    until(lambda: "join --peers" in door.output, 90, "ready")
    peer_id = run("lowcomm_bootstrap", "id", "--home", str(door.home)).stdout.strip()
    command = (
        f"lowcomm-node join --peers /dns4/boot.example.org/tcp/31337/p2p/{peer_id} --peers {other}"
    )
    assert command in door.output.splitlines(), (
        "its own address, and those of the servers that it was told of"
    )


def test_id_and_runs_need_no_server(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    shown = run("lowcomm_bootstrap", "id", "--json", *home)
    assert shown.returncode == 0, shown.stderr
    key = identity_from_libp2p((tmp_path / "home" / "identity.key").read_bytes())
    assert json.loads(shown.stdout) == {"peer_id": key.peer_id}
    assert run("lowcomm_bootstrap", "id", *home).stdout.strip() == key.peer_id
    Registry(tmp_path / "home" / "runs").add(make_run("a"))
    (tmp_path / "home" / "runs" / "x.json").write_text("rubbish")
    listed = run("lowcomm_bootstrap", "runs", "--json", *home)
    assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == ["a"]
    assert "x.json" in listed.stderr
    assert f"a@{make_run('a').fingerprint}" in run("lowcomm_bootstrap", "runs", *home).stdout


def test_mistakes_end_with_one_clear_line(tmp_path: Path) -> None:
    home = tmp_path / "home"
    serve = ("lowcomm_bootstrap", "serve", "--home", str(home), "--port", "0")
    bad = tmp_path / "bad.toml"
    bad.write_text('[run]\nname = "a"\nstps = 1\n')
    assert_one_clear_line(run(*serve, "--run", str(bad)), 78, str(bad), "steps")
    assert_one_clear_line(
        run(*serve, "--run", str(tmp_path / "none")), 78, str(tmp_path / "none"), "run.toml"
    )
    assert_one_clear_line(run(*serve, "--host", "203.0.113.7"), 78, "203.0.113.7", "0.0.0.0")
    assert_one_clear_line(
        run(*serve, "--announce", "boot.example.org:31337"), 78, "boot.example.org", "/dns4/"
    )
    assert_one_clear_line(
        run("lowcomm_bootstrap", "id", "--home", "/proc/none"), 78, "/proc/none", "--home"
    )
    (home / "identity.key").write_bytes(b"rubbish")
    assert_one_clear_line(run(*serve), 78, "identity.key", "Restore it")
    assert run(*serve, "--prot", "3").returncode == 2
