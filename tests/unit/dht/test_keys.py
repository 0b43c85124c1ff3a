"""What makes a stored value valid: signatures, names, sizes, and whatever bytes strangers send."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.clock import Clock
from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.keys import (
    MAX_VALUE,
    RUNS_KEY,
    Provenances,
    pack,
    peers_key,
    read_key,
)
from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.reading import write_statement
from lowcomm_protocol.spec.run import parse_toml, sign_run

NOW = 1_800_000_000.0
RUN_ID = "ab" * 32
KEY = peers_key(RUN_ID)
ADA, BOB, CLEO = (Identity(seed * 32) for seed in (b"a", b"b", b"c"))


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


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


async def test_what_a_peer_has_read_is_taken_under_its_part_and_epoch_alone(
    ada: MemoryDiscovery,
) -> None:
    read = np.ones(20, np.bool_)
    told = write_statement(ADA, RUN_ID, (1, 7), read, 5)
    assert not await ada.publish(read_key(RUN_ID, 1, 8), ADA.peer_id, told, 600)
    assert not await ada.publish(read_key(RUN_ID, 1, 7), BOB.peer_id, told, 600)
    assert not await ada.publish(KEY, ADA.peer_id, told, 600), "it is no record"
    assert await ada.publish(read_key(RUN_ID, 1, 7), ADA.peer_id, told, 600)
    before = write_statement(ADA, RUN_ID, (1, 7), read[:3], 4)
    assert not await ada.publish(read_key(RUN_ID, 1, 7), ADA.peer_id, before, 6000)


def test_in_a_run_with_a_list_nobody_else_states_what_was_read() -> None:
    spec = f'[run]\nname = "a"\nadmission = "list"\nmembers = ["{BOB.peer_id}"]\n'
    run, provenances = sign_run(parse_toml(spec), ADA), Provenances()
    assert provenances.check(pack(RUNS_KEY, run.to_bytes()), run.run_id, NOW)
    for who, is_taken in ((ADA, True), (BOB, True), (CLEO, False)):
        told = write_statement(who, run.run_id, (0, 0), np.ones(2, np.bool_), 1)
        found = provenances.check(pack(read_key(run.run_id, 0, 0), told), who.peer_id, NOW)
        assert (found is not None) == is_taken


@given(st.binary(max_size=200), st.text(max_size=70))
@example(b"R" + json.dumps({"creator": "\ud800", "spec": "{}", "signature": ""}).encode(), "x")
@example(
    b"R" + json.dumps({"creator": ADA.peer_id, "spec": '"\ud800"', "signature": ""}).encode(), "x"
)
@example(b"R" + b"[" * 100_000, "\ud800")
@example(b"P", "")
@example(b"S", "")
@example(b"L", "\ud800")
def test_no_bytes_from_another_peer_raise(stored: bytes, subkey: str) -> None:
    for kind in (b"", b"R", b"P", b"L", b"T"):
        assert Provenances().check(kind + stored, subkey, NOW) is None
