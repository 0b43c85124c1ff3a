"""The bootstrap server keeps runs: bounded, verified, through restarts and damage; and publishes
what it keeps."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from helpers.clock import Clock
from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_bootstrap.registry import KEPT_EMPTY, Registry
from lowcomm_bootstrap.server import BootstrapServer
from lowcomm_bootstrap.serving import read_run
from lowcomm_node.dht.keys import RUNS_KEY, amendments_key, peers_key
from lowcomm_node.errors import ConfigError
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_protocol.errors import SignatureError, SpecError, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.spec.amendments import Chain, write_amendment
from lowcomm_protocol.spec.run import SPEC_VERSION, SignedRun, parse_toml, sign_run

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


@pytest.mark.parametrize("damage", [b"", b"{", b"x" * 200_000, b"[" * 50_000])
def test_a_damaged_run_is_set_aside_and_the_others_are_kept(tmp_path: Path, damage: bytes) -> None:
    good, bad = make_run("a"), make_run("b")
    registry = Registry(tmp_path)
    registry.add(good)
    registry.add(bad)
    (tmp_path / f"{bad.run_id}.json").write_bytes(damage)
    again = Registry(tmp_path)
    assert again.runs() == [good]
    aside = tmp_path / f"{bad.run_id}.json.damaged"
    assert again.unread == {aside: "run.damaged"} and aside.read_bytes() == damage
    assert not Registry(tmp_path).unread, "reported once"


async def test_a_run_of_another_version_is_left_to_the_release_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path).add(make_run("a"))
    monkeypatch.setattr("lowcomm_protocol.spec.run.SPEC_VERSION", SPEC_VERSION + 1)
    door = Door(tmp_path)
    await door.server.start()
    assert len(door.told("run.other_version")) == 1 and not door.registry.runs()
    monkeypatch.undo()
    assert Registry(tmp_path).runs() == [make_run("a")], (
        "an upgrade that is taken back loses nothing"
    )


def test_it_keeps_no_more_bytes_than_the_dht_can_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = int(1.5 * len(make_run("a").to_bytes()))
    monkeypatch.setattr("lowcomm_bootstrap.registry.MAX_BYTES", most)
    registry = Registry(tmp_path)
    registry.add(make_run("a"))
    with pytest.raises(ConfigError, match="bytes"):
        registry.add(make_run("b"))
    shutil.copy(next(tmp_path.iterdir()), tmp_path / "x")
    (tmp_path / f"{make_run('b').run_id}.json").write_bytes(make_run("b").to_bytes())
    assert len(Registry(tmp_path).runs()) == 1, "also when more files are there"


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
def test_a_bad_run_file_is_named(
    tmp_path: Path, content: bytes, error: type[Exception], word: str
) -> None:
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(error, match=word) as caught:
        read_run(path, SERVER)
    assert str(caught.value).count(str(path)) == 1


class Door:
    """A bootstrap server on a network without a network."""

    def __init__(self, folder: Path, closed: bool = False, max_runs: int = 64) -> None:
        self.network = MemoryNetwork(lambda: NOW)
        self.registry = Registry(folder, max_runs)
        self.events: list[dict[str, Any]] = []
        self.creator = MemoryDiscovery(CREATOR.peer_id, self.network)
        discovery = MemoryDiscovery(SERVER.peer_id, self.network)
        rejoin = Rejoin(discovery, (), self.events.append, restarts=False)
        self.server = BootstrapServer(
            discovery, self.registry, closed, self.events.append, rejoin,
            sign=folder / "sign",
        )  # fmt: skip

    async def publish(self, run: SignedRun) -> None:
        assert await self.creator.publish(RUNS_KEY, run.run_id, run.to_bytes(), 60)

    def told(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]


async def test_a_run_that_its_creator_publishes_is_adopted_for_good(tmp_path: Path) -> None:
    door = Door(tmp_path)
    await door.server.start()
    await door.publish(make_run("a"))
    await door.server.look()
    await door.server.look()
    assert [event["name"] for event in door.told("run.adopted")] == ["a"]
    assert Registry(tmp_path).runs() == [make_run("a")]


async def test_runs_that_a_clock_ahead_has_made_expire_are_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path).add(make_run("a"))
    door = Door(tmp_path)
    await door.server.start()
    door.network.records.clear()
    await door.server.look()
    assert not door.network.records, "not at each look"
    monkeypatch.setattr("lowcomm_bootstrap.server.LOST_AFTER", 0.0)
    await door.server.look()
    assert set(await door.creator.lookup(RUNS_KEY)) == {make_run("a").run_id}


async def test_a_look_for_which_p2pd_does_not_answer_is_no_sign_of_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, sign = Door(tmp_path), tmp_path / "sign"
    sign.touch()
    os.utime(sign, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryDiscovery, "revive", AsyncMock(return_value=False))
        await door.server.look()
    assert sign.stat().st_mtime == 0
    await door.server.look()
    assert sign.stat().st_mtime > 0


# Who leaves


DAY = KEPT_EMPTY


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


def signed(name: str, creator: Identity = CREATOR) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "{name}"\n'), creator)


def names(registry: Registry) -> set[str]:
    return {run.spec.run.name for run in registry.runs()}


def test_a_run_leaves_a_day_after_its_last_peer_has_answered(tmp_path: Path, clock: Clock) -> None:
    registry = Registry(tmp_path, clock=clock)
    for name in ("empty", "trained"):
        registry.add(signed(name))
    registry.add(signed("operator"), own=True)
    clock.now += DAY - 1
    registry.saw(signed("trained").run_id, peers=2)
    assert registry.expire() == []
    clock.now += 1
    assert [run.spec.run.name for run in registry.expire()] == ["empty"]
    assert registry.stays(signed("trained").run_id) == DAY - 1
    assert registry.stays(signed("operator").run_id) == float("inf")
    assert registry.stays(signed("empty").run_id) is None and (
        signed("empty").run_id in registry.left
    )
    assert names(Registry(tmp_path, clock=clock)) == {"trained", "operator"}
    clock.now += 10 * DAY
    registry.expire()
    assert names(registry) == {"operator"}


def test_one_network_gets_a_quarter_of_the_places(tmp_path: Path, clock: Clock) -> None:
    registry = Registry(tmp_path, clock=clock)
    for number in range(16):
        registry.add(signed(f"junk-{number}"), "198.51.100.0/24")
    with pytest.raises(ConfigError, match="a quarter"):
        registry.add(signed("junk"), "198.51.100.0/24")
    assert registry.add(signed("other"), "203.0.113.0/24")
    assert registry.add(signed("operator"), "198.51.100.0/24", own=True)


async def test_a_run_that_its_peers_have_finished_is_over_until_one_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowcomm_bootstrap.server.time", lambda: NOW)
    door, run, now = Door(tmp_path), make_run("a"), NOW
    door.registry.add(run)
    await door.server.start()

    async def look(peer: Identity, phase: Phase, swarm_step: int) -> int:
        nonlocal now
        now += 0.01
        info = PeerInfo(
            peer_id=peer.peer_id, run_id=run.run_id, phase=phase, issued=now, expires=NOW + 30,
            swarm_step=swarm_step,
        )  # fmt: skip
        discovery, key = MemoryDiscovery(peer.peer_id, door.network), peers_key(run.run_id)
        await discovery.start()
        assert await discovery.publish(key, peer.peer_id, write_record(info, peer), 30)
        await door.server.look()
        return (await door.server.keep(run.run_id, None)).swarm_step

    ada, bob, steps = CREATOR, Identity(b"b" * 32), run.spec.run.steps
    assert await look(ada, Phase.LEFT, steps - 1) == 0, "it has left before the end"
    assert await look(bob, Phase.TRAINING, steps - 1) == 0
    assert await look(ada, Phase.FINISHED, steps) == 0, "another trains yet"
    assert await look(bob, Phase.LEFT, steps) == steps
    assert [event["swarm_step"] for event in door.told("run.over")] == [steps]
    again = Registry(tmp_path)
    assert again.kept[run.run_id].ended == steps and again.runs() == [run]
    assert await look(bob, Phase.TRAINING, 7) == 0
    assert Registry(tmp_path).kept[run.run_id].ended == 0
    chain = write_amendment(CREATOR, run, Chain(run.run_id), 0, {"run.steps": 2 * steps})
    key = amendments_key(run.run_id, CREATOR.peer_id)
    assert await door.creator.publish(key, CREATOR.peer_id, chain.data, 30)
    assert await look(bob, Phase.FINISHED, steps) == 0, "its creator has made it longer"
    assert await look(bob, Phase.FINISHED, 2 * steps) == 2 * steps


async def test_a_peer_that_answers_keeps_its_run(tmp_path: Path) -> None:
    door, clock, run = Door(tmp_path), Clock(NOW), make_run("a")
    door.registry._clock = clock
    door.registry.add(run)
    await door.server.start()
    info = PeerInfo(
        peer_id=CREATOR.peer_id,
        run_id=run.run_id,
        phase=Phase.TRAINING,
        issued=NOW,
        expires=NOW + 30,
    )
    await door.creator.publish(
        peers_key(run.run_id), CREATOR.peer_id, write_record(info, CREATOR), 30
    )
    clock.now += DAY - 1
    await door.server.look()
    assert door.registry.stays(run.run_id) == 1, "a record alone proves nothing"
    await door.creator.start()
    await door.server.look()
    assert door.registry.stays(run.run_id) == DAY


async def test_a_server_says_why_it_does_not_keep_a_run(tmp_path: Path) -> None:
    open_, closed, full = (
        Door(tmp_path / "o"),
        Door(tmp_path / "c", closed=True),
        Door(tmp_path / "f", max_runs=1),
    )
    full.registry.add(make_run("a"), own=True)
    said: list[str] = []
    for door in (open_, closed, full):
        await door.server.start()
        said.append((await door.server.keep(make_run("b").run_id, "203.0.113.1")).reason)
        await door.publish(make_run("b"))
        said.append((await door.server.keep(make_run("b").run_id, "203.0.113.1")).reason)
    not_here, closed_to, no_room = (f"this server {text}" for text in (
        "has not received it", "is closed to runs of others", "has no room for it"
    ))  # fmt: skip
    assert said == [not_here, "", closed_to, closed_to, not_here, no_room]
