"""What our peer of hivemind's DHT does around it: what it tells of itself, where it knocks. Nothing
is started."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowcomm_node.dht import hivemind
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.errors import LinkLost, Unhealthy
from lowcomm_node.net import hivemind_client, relays
from lowcomm_node.net.addresses import EntryPoint
from lowcomm_node.net.control import Connection
from lowcomm_protocol.identity import Identity

ADA, BOOT, RELAY = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
NOW = 1_800_000_000.0


class Control:
    """p2pd as far as it is asked here."""

    def __init__(self) -> None:
        self.dialed: list[list[str]] = []
        self.connected: list[str] = []
        self.told: list[str] = []
        self.broken = False

    async def handle_streams(self, protocol: str, address: bytes) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise LinkLost("did not answer in time")
        self.told.append(protocol)

    async def connections(self) -> list[Connection]:
        return [Connection(peer_id, "") for peer_id in self.connected]

    async def connect(self, peer_id: str, entries: Sequence[EntryPoint], seconds: float) -> None:
        self.dialed.append([entry.dial for entry in entries])


class Peer(Discovery):
    """With a p2pd that only pretends."""

    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__(
            ADA, home / "identity.key", DhtSettings(listen=["/ip4/0.0.0.0/tcp/0"], **options)
        )
        self.control = Control()

    def _control(self) -> Any:
        return self.control


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(tmp_path)


# Where it knocks


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What peers answer to a ping: seconds that their clock is ahead."""
    answers: dict[str, float | None] = {}

    async def ping(_: Any, peer_id: str) -> float | None:
        return answers.get(peer_id, 0.0)

    monkeypatch.setattr(hivemind_client, "ping", ping)
    return answers


# Whom it believes


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What connected peers tell of where they see us."""
    told: dict[str, str | None] = {}

    async def observed(_: Any, peer_id: str) -> str | None:
        return told[peer_id]

    monkeypatch.setattr(relays, "observed", observed)
    return told


STRANGERS = [Identity(bytes([number]) * 32).peer_id for number in (7, 8, 9)]
HERE, LIE = "/ip4/44.1.1.1/udp/7/quic-v1", "/ip4/66.6.6.6/udp/6/quic-v1"


def at(peer_id: str) -> str:
    return f"/ip4/45.1.1.1/tcp/7/p2p/{peer_id}"


def outside(home: Path, others: dict[str, str | None], *named: str) -> Peer:
    """A peer that is connected to all who tell it something, the named ones last."""
    peer = Peer(
        home,
        wants_places=True,
        initial_peers=[at(one) for one in named],
        learned=[at(one) for one in others],
    )
    peer.control.connected = [*others]
    return peer


@pytest.mark.parametrize(
    ("told", "before", "believed"),
    [
        ([LIE], (), ()),
        ([LIE, HERE], (), ()),
        ([HERE, HERE.replace("/7/", "/8/")], (), (HERE, HERE.replace("/7/", "/8/"))),
        ([LIE, HERE], (HERE.replace("/7/", "/9/"),), (HERE,)),
        ([None, None], (HERE,), ()),
    ],
)
async def test_where_a_single_unnamed_peer_sees_us_is_not_announced(
    tmp_path: Path,
    others: dict[str, str | None],
    told: list[str | None],
    before: tuple[str, ...],
    believed: tuple[str, ...],
) -> None:
    others |= dict(zip(STRANGERS, told, strict=False))
    peer = outside(tmp_path, others)
    peer._reachability._observed = before
    await peer._reachability._ask_others()
    assert peer._reachability._observed == believed


@pytest.mark.parametrize(("known", "starts"), [((), True), ((BOOT.peer_id,), False)])
async def test_only_the_clocks_of_named_peers_decide_whether_it_starts(
    tmp_path: Path,
    started: Any,
    pings: dict[str, float | None],
    known: tuple[str, ...],
    starts: bool,
) -> None:
    peer = Peer(
        tmp_path,
        initial_peers=[at(one) for one in known],
        learned=[at(STRANGERS[0])],
        require_peers=False,
    )
    pings |= dict.fromkeys((BOOT.peer_id, STRANGERS[0]), 1000.0)
    try:
        with nullcontext() if starts else pytest.raises(Unhealthy):
            await peer.start()
    finally:
        await peer.close()


@pytest.mark.parametrize(
    ("told", "ahead"), [(float("nan"), None), (float("inf"), None), (NOW, 0.0)]
)
async def test_a_peer_whose_clock_shows_no_time_does_not_answer(
    told: float, ahead: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowcomm_node.net.hivemind_parts import dht_pb2

    class Protocol:
        node_info = dht_pb2.NodeInfo()
        responded: bool | None = None

        def get_stub(self, peer: Any) -> "Protocol":
            return self

        async def rpc_ping(self, request: Any) -> dht_pb2.PingResponse:
            return dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=bytes(20)), dht_time=told)

        async def update_routing_table(self, place: Any, peer: Any, responded: bool) -> None:
            self.responded = responded

    monkeypatch.setattr(hivemind_client, "time", lambda: NOW)
    node = SimpleNamespace(
        protocol=Protocol(), blacklist=SimpleNamespace(register_success=lambda _: None)
    )
    assert await hivemind_client.ping(node, BOOT.peer_id) == ahead
    assert node.protocol.responded is (ahead is not None)


# Its p2pd


class Daemon:
    """A p2pd that only pretends."""

    there = 0
    most = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.running, self.pid, self.control = False, 1, None

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.running = True
        Daemon.there += 1
        Daemon.most = max(Daemon.most, Daemon.there)

    async def stop(self) -> None:
        Daemon.there -= self.running
        self.running = False
        await asyncio.sleep(0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd and hivemind's node are pretended, so that a peer can be started."""

    async def nothing(*_: Any) -> None:
        await asyncio.sleep(0)

    for name in ("attach", "detach", "load_hivemind", "wait_routing"):
        monkeypatch.setattr(hivemind_client, name, nothing)
    monkeypatch.setattr(hivemind, "P2pDaemon", Daemon)
    Daemon.there = Daemon.most = 0

    async def make_node(_: Any) -> Any:
        table = SimpleNamespace(uid_to_peer_id={})
        return SimpleNamespace(protocol=SimpleNamespace(routing_table=table), shutdown=nothing)

    monkeypatch.setattr(Discovery, "_make_node", make_node)
    monkeypatch.setattr(relays.Reachability, "look_at_ourselves", nothing)


async def test_there_are_never_two_p2pds_and_none_after_the_end(peer: Peer, started: Any) -> None:
    await peer.start()
    reviving = (peer.revive(restart) for restart in (True, True, True, False))
    assert all(await asyncio.gather(*reviving))
    assert (Daemon.there, Daemon.most) == (1, 1)
    renewing = asyncio.create_task(peer.revive(restart=True))
    await asyncio.sleep(0)
    await peer.close()
    assert not await renewing
    assert not await peer.revive()
    assert peer.known_peers() == 0
    assert Daemon.there == 0
