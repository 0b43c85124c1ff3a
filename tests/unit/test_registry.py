"""The bootstrap server keeps runs: bounded, verified, through restarts and damage; and publishes what it keeps."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import lowcomm_bootstrap.registry as registry_module
import lowcomm_protocol.run as run_module
from lowcomm_bootstrap.registry import Registry
from lowcomm_bootstrap.server import BootstrapServer
from lowcomm_bootstrap.serving import read_run
from lowcomm_node.discovery.keys import RUNS_KEY, peers_key
from lowcomm_node.discovery.lifeline import Lifeline
from lowcomm_node.discovery.memory import MemoryDiscovery, MemoryNetwork
from lowcomm_node.errors import ConfigError, DiskFull
from lowcomm_protocol.errors import SignatureError, SpecError, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.records import PeerInfo, Phase, write_record
from lowcomm_protocol.run import SignedRun, parse_toml, sign_run
from waiting import until_async

CREATOR, SERVER = Identity(b"c" * 32), Identity(b"s" * 32)
NOW = 1_800_000_000.0


def make_run(name: str) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "{name}"\n'), CREATOR)


def test_runs_survive_a_restart(tmp_path: Path) -> None:
    assert Registry(tmp_path).runs() == []
    runs = [make_run("a"), make_run("b")]
    registry = Registry(tmp_path)
    assert all(registry.add(run) for run in reversed(runs))
    assert Registry(tmp_path).runs() == registry.runs() == runs
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(run.run_id for run in runs)


def test_a_known_run_is_not_added_again(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert registry.add(make_run("a"))
    assert not registry.add(make_run("a"))


@pytest.mark.parametrize("damage", [b"", b"{", b"x" * 200_000, b"[" * 50_000])
def test_a_damaged_run_is_set_aside_and_the_others_are_kept(tmp_path: Path, damage: bytes) -> None:
    good, bad = make_run("a"), make_run("b")
    registry = Registry(tmp_path)
    registry.add(good)
    registry.add(bad)
    (tmp_path / f"{bad.run_id}.json").write_bytes(damage)
    again = Registry(tmp_path)
    assert again.runs() == [good]
    assert [path.name for path in again.damaged] == [f"{bad.run_id}.json.damaged"]
    assert again.damaged[0].read_bytes() == damage
    assert Registry(tmp_path).damaged == [], "told once"


async def test_a_run_of_another_version_is_left_to_the_release_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path).add(make_run("a"))
    monkeypatch.setattr(run_module, "SPEC_VERSION", run_module.SPEC_VERSION + 1)
    door = Door(tmp_path)
    await door.server.start()
    assert len(door.told("run.other_version")) == 1 and door.registry.runs() == door.registry.damaged == []
    monkeypatch.undo()
    assert Registry(tmp_path).runs() == [make_run("a")], "an upgrade that is taken back loses nothing"


def test_a_flipped_byte_or_a_wrong_name_is_damage(tmp_path: Path) -> None:
    run = make_run("a")
    (tmp_path / f"{run.run_id}.json").write_bytes(run.to_bytes().replace(b'\\"steps\\":400', b'\\"steps\\":401'))
    (tmp_path / f"{'ab' * 32}.json").write_bytes(run.to_bytes())
    registry = Registry(tmp_path)
    assert registry.runs() == []
    assert len(registry.damaged) == 2


def test_it_keeps_no_more_runs_than_allowed(tmp_path: Path) -> None:
    registry = Registry(tmp_path, max_runs=1)
    registry.add(make_run("a"))
    with pytest.raises(ConfigError, match="--max-runs"):
        registry.add(make_run("b"))
    assert Registry(tmp_path, max_runs=1).runs() == registry.runs() == [make_run("a")]


def test_it_keeps_no_more_bytes_than_the_dht_can_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_BYTES", int(1.5 * len(make_run("a").to_bytes())))
    registry = Registry(tmp_path)
    registry.add(make_run("a"))
    with pytest.raises(ConfigError, match="bytes"):
        registry.add(make_run("b"))
    shutil.copy(next(tmp_path.iterdir()), tmp_path / "x")
    (tmp_path / f"{make_run('b').run_id}.json").write_bytes(make_run("b").to_bytes())
    assert len(Registry(tmp_path).runs()) == 1, "also when more files are there"


def test_a_file_may_be_a_specification_or_a_signed_run(tmp_path: Path) -> None:
    plain, signed = tmp_path / "run.toml", tmp_path / "run.json"
    plain.write_text('[run]\nname = "a"\n')
    signed.write_bytes(make_run("a").to_bytes())
    assert read_run(signed, SERVER) == make_run("a")
    made = read_run(plain, SERVER)
    assert (made.spec.run.name, made.creator, made.spec.run.creator) == ("a", SERVER.peer_id, SERVER.peer_id)


@pytest.mark.parametrize(
    ("content", "error", "word"),
    [
        (b'[run]\nname = "a"\nstps = 3\n', SpecError, "did you mean 'steps'"),
        (b"[run\n", SpecError, "TOML"),
        (b"version = 9\n", VersionError, "version 9"),
        (b"{}", SpecError, "not a signed run"),
        (b"\xff\xfe", ConfigError, "UTF-8"),
        (
            make_run("a").to_bytes().replace(CREATOR.peer_id.encode(), SERVER.peer_id.encode()),
            SignatureError,
            "signature",
        ),
    ],
)
def test_a_bad_run_file_is_named(tmp_path: Path, content: bytes, error: type[Exception], word: str) -> None:
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(error, match=word) as caught:
        read_run(path, SERVER)
    assert str(caught.value).count(str(path)) == 1


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        read_run(tmp_path / "missing.toml", SERVER)


class Door:
    """A bootstrap server on a network without a network."""

    def __init__(self, folder: Path, closed: bool = False, max_runs: int = 64) -> None:
        self.network = MemoryNetwork(lambda: NOW)
        self.registry = Registry(folder, max_runs)
        self.events: list[dict[str, Any]] = []
        self.creator = MemoryDiscovery(CREATOR.peer_id, self.network)
        discovery = MemoryDiscovery(SERVER.peer_id, self.network)
        lifeline = Lifeline(discovery, (), None, self.events.append, restarts=False)
        self.server = BootstrapServer(discovery, self.registry, closed, self.events.append, lifeline, look_every=0.001)

    async def publish(self, run: SignedRun) -> None:
        assert await self.creator.publish(RUNS_KEY, run.run_id, run.to_bytes(), 60)

    def told(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]


async def test_kept_runs_are_published_at_the_start(tmp_path: Path) -> None:
    Registry(tmp_path).add(make_run("a"))
    door = Door(tmp_path)
    await door.server.start()
    assert await door.creator.lookup(RUNS_KEY) == {make_run("a").run_id: make_run("a").to_bytes()}


async def test_a_run_that_its_creator_publishes_is_adopted_for_good(tmp_path: Path) -> None:
    door = Door(tmp_path)
    await door.server.start()
    await door.publish(make_run("a"))
    await door.server.look()
    await door.server.look()
    assert [event["name"] for event in door.told("run.adopted")] == ["a"]
    assert Registry(tmp_path).runs() == [make_run("a")]


async def test_a_defect_does_not_end_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, failures = Door(tmp_path), 0

    async def look() -> None:
        nonlocal failures
        failures += 1
        raise RuntimeError("a defect")

    async def looked_again() -> bool:
        return failures > 1

    monkeypatch.setattr(door.server, "look", look)
    running = asyncio.create_task(door.server.run())
    try:
        await until_async(looked_again, 10, "it looks again")
        assert not running.done()
    finally:
        running.cancel()


async def test_a_closed_server_adopts_nothing(tmp_path: Path) -> None:
    door = Door(tmp_path, closed=True)
    await door.server.start()
    await door.publish(make_run("a"))
    await door.server.look()
    assert door.registry.runs() == []


async def test_a_full_server_keeps_what_it_has_and_says_so_once(tmp_path: Path) -> None:
    door = Door(tmp_path, max_runs=1)
    door.registry.add(make_run("a"))
    await door.server.start()
    await door.publish(make_run("b"))
    await door.server.look()
    await door.server.look()
    assert door.registry.runs() == [make_run("a")]
    assert [(event["name"], "--max-runs" in event["reason"]) for event in door.told("run.not_kept")] == [("b", True)]


async def test_a_full_disk_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise DiskFull("No room")

    monkeypatch.setattr(registry_module, "write_atomic", full)
    door = Door(tmp_path)
    await door.server.start()
    await door.publish(make_run("a"))
    await door.server.look()
    assert [event["reason"] for event in door.told("run.not_kept")] == ["No room"]


async def test_peers_of_each_run_are_counted(tmp_path: Path) -> None:
    run = make_run("a")
    door = Door(tmp_path)
    door.registry.add(run)
    await door.server.start()
    info = PeerInfo(peer_id=CREATOR.peer_id, run_id=run.run_id, phase=Phase.TRAINING, issued=NOW, expires=NOW + 30)
    await door.creator.publish(peers_key(run.run_id), CREATOR.peer_id, write_record(info, CREATOR), 30)
    await door.server.look()
    await door.server.look()
    assert [event["peers"] for event in door.told("run.peers")] == [1], "told when it changes"
    assert await door.server.count_peers() == {run.run_id: 1}
