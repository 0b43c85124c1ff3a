"""What makes a stored value valid: signatures, names, sizes, and whatever bytes strangers send."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.keys import (
    MAX_VALUE,
    RUNS_KEY,
    Provenances,
    peers_key,
)
from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.identity import Identity
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
