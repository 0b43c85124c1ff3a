"""What makes a stored value valid: signatures, names, sizes, and whatever bytes strangers send."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.interface import MAX_VALUE
from lowcomm_node.dht.keys import (
    RUNS_KEY,
    Provenances,
    pack,
    peers_key,
)
from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.spec.run import parse_toml, sign_run

NOW = 1_800_000_000.0
RUN_ID = "ab" * 32
KEY = peers_key(RUN_ID)
ADA, BOB, CLEO = (Identity(seed * 32) for seed in (b"a", b"b", b"c"))


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


def record_of(
    peer: Identity, *, issued: float = NOW, life: float = 30.0, step: int = 0, run_id: str = RUN_ID
) -> bytes:
    info = PeerInfo(
        peer_id=peer.peer_id,
        run_id=run_id,
        phase=Phase.TRAINING,
        issued=issued,
        expires=issued + life,
        swarm_step=step,
    )
    return write_record(info, peer)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ada(clock: Clock) -> MemoryDiscovery:
    return MemoryDiscovery(ADA.peer_id, MemoryNetwork(clock))


async def test_a_record_that_is_too_large_is_an_error(ada: MemoryDiscovery) -> None:
    with pytest.raises(RecordError, match=str(MAX_VALUE)):
        await ada.publish(KEY, ADA.peer_id, bytes(MAX_VALUE + 1), 30)


async def test_a_run_is_taken_only_under_its_own_id_and_signed(ada: MemoryDiscovery) -> None:
    run = sign_run(parse_toml('[run]\nname = "a"\n'), ADA)
    forged = run.to_bytes().replace(ADA.peer_id.encode(), BOB.peer_id.encode())
    assert not await ada.publish(RUNS_KEY, "ab" * 32, run.to_bytes(), 600)
    assert not await ada.publish(RUNS_KEY, run.run_id, forged, 600)
    assert not await ada.publish(KEY, run.run_id, run.to_bytes(), 600), "a run is no peer"
    assert await ada.publish(RUNS_KEY, run.run_id, run.to_bytes(), 600)


@given(st.binary(max_size=200), st.text(max_size=70))
@example(b"R" + json.dumps({"creator": "\ud800", "spec": "{}", "signature": ""}).encode(), "x")
@example(
    b"R" + json.dumps({"creator": ADA.peer_id, "spec": '"\ud800"', "signature": ""}).encode(), "x"
)
@example(b"R" + b"[" * 100_000, "\ud800")
@example(b"P", "")
@example(b"L", "\ud800")
def test_no_bytes_from_another_peer_raise(stored: bytes, subkey: str) -> None:
    for kind in (b"", b"R", b"P", b"L"):
        assert Provenances().check(kind + stored, subkey, NOW) is None


def test_what_was_checked_once_is_not_verified_again_and_expires_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified = list[str]()

    def counted(peer_id: str, *rest: Any) -> None:
        verified.append(peer_id)
        verify(peer_id, *rest)

    monkeypatch.setattr("lowcomm_protocol.peers.records.verify", counted)
    known, stored = Provenances(), pack(KEY, record_of(ADA, life=30))
    first = known.check(stored, ADA.peer_id, NOW)
    assert verified == [ADA.peer_id]
    assert first == Provenances().check(stored, ADA.peer_id, NOW)
    assert verified == [ADA.peer_id] * 2, "who knows nothing yet verifies"
    assert known.check(stored, ADA.peer_id, NOW + 29.9) is first
    assert known.check(stored, ADA.peer_id, NOW + 30.1) is None
    assert known.check(stored, BOB.peer_id, NOW) is None, (
        "valid for one subkey says nothing of another"
    )
    before = len(verified)
    assert all(known.check(stored, ADA.peer_id, NOW) for _ in range(200))
    assert len(verified) == before
