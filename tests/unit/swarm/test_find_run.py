"""Which run a home means, and where it looks for it."""

import json
from pathlib import Path
from time import time

import pytest

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.keys import RUNS_KEY, peers_key
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import load_settings
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.swarm import find_run as find_run_module
from lowcomm_node.swarm.find_run import find_run, remembered_run
from lowcomm_node.swarm.probes import FOR_A_BOOTSTRAP, Prober
from lowcomm_node.swarm.remembered_peers import RememberedPeer, remember
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.spec.document import encode
from lowcomm_protocol.spec.run import SignedRun, parse_toml, run_id_of, sign_run

CREATOR, BOOT, OTHER = (Identity(seed * 32) for seed in (b"c", b"b", b"o"))


def run_of(name: str, creator: Identity = CREATOR) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "{name}"\n'), creator)


def address(peer: Identity) -> str:
    return f"/ip4/203.0.113.7/tcp/1/p2p/{peer.peer_id}"


def keep(home: Path, run: SignedRun, *doors: Identity) -> SignedRun:
    """Have a home know a run from before, and the doors by which it was entered."""
    paths = Paths(home)
    write_atomic(paths.signed_run(run.fingerprint), run.to_bytes())
    known = [
        RememberedPeer(peer_id=door.peer_id, addresses=(address(door),), answered=time())
        for door in doors
    ]
    remember(paths.remembered_peers(run.fingerprint), known, time())
    return run


def settings(home: Path, **given: object) -> NodeSettings:
    return load_settings({"home": home, **given}, {}).settings


def test_without_an_address_it_is_the_only_run_that_the_home_knows(tmp_path: Path) -> None:
    assert remembered_run(settings(tmp_path)) is None
    first = keep(tmp_path, run_of("first"))
    assert remembered_run(settings(tmp_path)) == first
    second = keep(tmp_path, run_of("second"))
    with pytest.raises(ConfigError, match="choose one with --run"):
        remembered_run(settings(tmp_path))
    assert remembered_run(settings(tmp_path, run="second")) == second


async def test_a_run_that_the_home_knows_is_taken_if_the_swarm_has_several_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keep(tmp_path, run_of("first")), run_of("second")
    discovery = MemoryDiscovery("x", MemoryNetwork(time))
    monkeypatch.setattr(find_run_module, "KEPT_AFTER", 0.0)
    assert await find_run(discovery, settings(tmp_path), first) == first, "we publish it then"
    await discovery.publish(RUNS_KEY, second.run_id, second.to_bytes(), 60)
    assert await find_run(discovery, settings(tmp_path), first) == second, (
        "the only one that is published"
    )
    await discovery.publish(RUNS_KEY, first.run_id, first.to_bytes(), 60)
    assert await find_run(discovery, settings(tmp_path), first) == first


class Published:
    """A swarm with several runs of one name; what a newcomer is told."""

    def __init__(self, home: Path) -> None:
        self.network = MemoryNetwork(time)
        self.newcomer = MemoryDiscovery(Identity(b"n" * 32).peer_id, self.network)
        self.home = home
        self.told: list[str] = []

    async def publish(self, *runs: SignedRun) -> None:
        for run in runs:
            data = run.to_bytes()
            assert await self.newcomer.publish(RUNS_KEY, run.run_id, data, 60)

    async def train(self, run: SignedRun, *peers: Identity, there: bool = True) -> None:
        for peer in peers:
            now, key = time(), peers_key(run.run_id)
            info = PeerInfo(
                peer_id=peer.peer_id, run_id=run.run_id, phase=Phase.TRAINING, issued=now,
                expires=now + 60,
            )  # fmt: skip
            discovery = MemoryDiscovery(peer.peer_id, self.network)
            assert await discovery.publish(key, peer.peer_id, write_record(info, peer), 60)
            if there:
                await discovery.start()

    async def find(self, **given: object) -> SignedRun:
        options = {"peers": [address(BOOT)]} | given
        return await find_run(
            self.newcomer, settings(self.home, **options), tell_choice=self.told.append
        )


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setattr(find_run_module, "OTHERS_DEADLINE", 0.1)
    return Published(tmp_path)


@pytest.mark.parametrize("named", [{}, {"run": "tea"}])
async def test_of_several_runs_the_one_whose_peers_answer_is_taken_and_told(
    published: Published, named: dict[str, str]
) -> None:
    ours, twin = run_of("tea"), run_of("tea", OTHER)
    await published.publish(ours, twin)
    await published.train(ours, CREATOR)
    await published.train(
        twin, *(Identity(bytes([number]) * 32) for number in range(9)), there=False
    )
    assert await published.find(**named) == ours
    (told,) = published.told
    assert f"taking tea@{ours.fingerprint}, as 1 peer of it answers" in told
    assert f"tea@{twin.fingerprint}" in told and "for another, --run NAME@FINGERPRINT" in told
    assert await published.find(run=f"tea@{twin.fingerprint}") == twin


async def test_of_several_runs_that_of_the_operator_is_taken_whoever_trains_others(
    published: Published,
) -> None:
    signed, served = run_of("tea", BOOT), run_of("coffee")
    stranger, own = run_of("tea", OTHER), list[str]()
    await published.publish(signed, served, stranger)
    await published.train(stranger, OTHER, Identity(b"p" * 32))
    assert await published.find() == signed, "the server itself has signed it"

    async def keep(run_id: str, place: str | None) -> Keeping:
        assert place is None, "it is another's run"
        return Keeping(kept=True, seconds=100.0, own=tuple(own))

    server = MemoryDiscovery(BOOT.peer_id, published.network)
    prober = Prober(server, server.addresses, FOR_A_BOOTSTRAP, keep=keep)
    await prober.serve()
    published.network.records.pop((RUNS_KEY, signed.run_id))
    assert await published.find() == stranger
    own.append(served.run_id)
    assert await published.find() == served, "`serve --run`"
    await prober.close()


async def test_several_runs_that_nothing_tells_apart_are_listed(published: Published) -> None:
    ours, twin = run_of("tea"), run_of("tea", OTHER)
    await published.publish(ours, twin)
    await published.train(twin, OTHER, there=False)
    with pytest.raises(ConfigError, match="several runs: choose one with --run: tea@"):
        await published.find()
    assert published.told == []


def test_of_twins_that_a_home_knows_the_swarm_decides(tmp_path: Path) -> None:
    ours, twin = keep(tmp_path, run_of("tea"), BOOT), keep(tmp_path, run_of("tea", OTHER), BOOT)
    given = {"run": "tea", "peers": [address(BOOT)]}
    assert remembered_run(settings(tmp_path, **given)) is None
    elsewhere = {"run": "tea", "peers": [address(OTHER)]}
    keep(tmp_path, twin, OTHER)
    assert remembered_run(settings(tmp_path, **elsewhere)) == twin
    with pytest.raises(ConfigError, match="choose one with --run"):
        remembered_run(settings(tmp_path, run="tea"))
    assert remembered_run(settings(tmp_path, run=f"tea@{ours.fingerprint}")) == ours


async def test_a_run_of_a_newer_release_is_stored_for_others_and_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_run_module, "FIND_DEADLINE", 0.01)
    content = json.loads(run_of("new").document)
    content["sync"]["later"] = 1
    document = encode(content)
    signature = CREATOR.sign("run specification", document).hex()
    data = json.dumps(
        {"creator": CREATOR.peer_id, "signature": signature, "spec": document.decode()}
    ).encode()
    discovery = MemoryDiscovery("x", MemoryNetwork(time))
    assert await discovery.publish(RUNS_KEY, run_id_of(document), data, 100)
    with pytest.raises(
        NoPeers,
        match=r"1 cannot be read here: run .*does not know the setting 'sync\.later': install the",
    ):
        await find_run(discovery, settings(tmp_path, peers=[address(BOOT)]))
    forged = json.dumps(
        {
            "creator": OTHER.peer_id,
            "spec": document.decode(),
            "signature": OTHER.sign("run specification", document).hex(),
        }
    ).encode()
    assert not await discovery.publish(RUNS_KEY, run_id_of(document), forged, 100), (
        "its creator is another"
    )
