"""What our peer of hivemind's DHT does around it: what it tells of itself, where it knocks. Nothing is started."""

from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

import pytest

from lowcomm_node.discovery import hivemind
from lowcomm_node.discovery.hivemind import HivemindDiscovery
from lowcomm_node.discovery.multiaddress import EntryPoint
from lowcomm_node.discovery.relay import Place
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.records import PeerInfo, Phase, read_record, write_record

ADA, BOOT, RELAY = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


class Control:
    """p2pd as far as it is asked here."""

    def __init__(self) -> None:
        self.dialed: list[list[str]] = []

    async def connect(self, peer_id: str, entries: Sequence[EntryPoint], seconds: float) -> None:
        self.dialed.append([entry.dial for entry in entries])


class Peer(HivemindDiscovery):
    """With a p2pd that only pretends."""

    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__(identity=ADA, key_file=home / "identity.key", listen=["/ip4/0.0.0.0/tcp/0"], **options)
        self.control = Control()

    def _control(self) -> Any:
        return self.control


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(tmp_path)


# What it tells of itself


def test_a_relay_with_a_long_name_does_not_make_our_record_invalid(peer: Peer) -> None:
    name = ".".join(["r" * 60] * 3)
    relay = EntryPoint(RELAY.peer_id, f"/dns4/{name}/tcp/1")
    peer._visible = ("/ip4/44.1.1.1/tcp/1",)
    peer._places._held = {RELAY.peer_id: Place(relay, time() + 60, None, None)}
    now = time()
    info = PeerInfo(
        peer_id=ADA.peer_id, run_id="ab" * 32, phase=Phase.TRAINING, issued=now, expires=now + 30,
        entry_points=peer.addresses(),
    )  # fmt: skip
    assert read_record(write_record(info, ADA), now).entry_points == (f"/ip4/44.1.1.1/tcp/1/p2p/{ADA.peer_id}",)


DIALS = ("/ip4/44.1.1.1/tcp/7", "/ip4/44.1.1.1/udp/8/quic-v1", "/ip6/2001:db8::1/tcp/9", "/ip6/::1/udp/10/quic-v1")


@pytest.mark.parametrize(
    ("listen", "next_time"),
    [
        ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/tcp/7"),
        ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/udp/8/quic-v1"),
        ("/ip6/::/tcp/0", "/ip6/::/tcp/9"),
        ("/ip6/::/udp/0/quic-v1", "/ip6/::/udp/10/quic-v1"),
        ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/7"),
        ("/ip4/0.0.0.0/tcp/5", "/ip4/0.0.0.0/tcp/5"),
        ("/ip4/10.0.0.1/tcp/500", "/ip4/10.0.0.1/tcp/500"),
    ],
)
def test_after_a_restart_it_listens_at_the_ports_that_others_know(listen: str, next_time: str) -> None:
    assert hivemind._with_port(listen, DIALS) == next_time


def test_a_port_that_was_never_known_stays_free() -> None:
    assert hivemind._with_port("/ip4/0.0.0.0/tcp/0", DIALS[1:]) == "/ip4/0.0.0.0/tcp/0"


# Where it knocks


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What peers answer to a ping: seconds that their clock is ahead."""
    answers: dict[str, float | None] = {}

    async def ping(_: Any, peer_id: str) -> float | None:
        return answers.get(peer_id, 0.0)

    monkeypatch.setattr(hivemind, "ping", ping)
    return answers


async def test_a_door_is_knocked_at_over_quic_too(peer: Peer, pings: dict[str, float | None]) -> None:
    peer._node = object()
    entry = EntryPoint(BOOT.peer_id, "/ip4/44.1.1.1/tcp/7")
    assert (await peer._knock(BOOT.peer_id, [entry])).reason is None
    assert peer.control.dialed == [["/ip4/44.1.1.1/tcp/7", "/ip4/44.1.1.1/udp/7/quic-v1"]]
