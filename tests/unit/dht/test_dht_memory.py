"""What holds for records, whichever DHT they lie in: shown on the twin without a network."""

import json
from dataclasses import dataclass
from typing import Any

import base58
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from lowcomm_node.dht.interface import MAX_VALUE
from lowcomm_node.dht.keys import (
    MAX_LIFE,
    RUNS_KEY,
    Provenances,
    pack,
    peers_key,
)
from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import (
    decode,
    encode,
    parse_announced,
    parse_entry_point,
    reach,
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


@pytest.fixture
def bob(ada: MemoryDiscovery) -> MemoryDiscovery:
    return MemoryDiscovery(BOB.peer_id, ada._network)


async def test_peers_see_each_others_records(ada: MemoryDiscovery, bob: MemoryDiscovery) -> None:
    mine, yours = record_of(ADA), record_of(BOB)
    assert await ada.publish(KEY, ADA.peer_id, mine, 30)
    assert await bob.publish(KEY, BOB.peer_id, yours, 30)
    assert await ada.lookup(KEY) == await bob.lookup(KEY) == {ADA.peer_id: mine, BOB.peer_id: yours}


async def test_a_record_under_someone_elses_name_is_refused(
    ada: MemoryDiscovery, bob: MemoryDiscovery
) -> None:
    mine = record_of(ADA)
    assert await ada.publish(KEY, ADA.peer_id, mine, 10)
    assert not await bob.publish(KEY, ADA.peer_id, record_of(BOB), 600)
    assert await bob.lookup(KEY) == {ADA.peer_id: mine}


async def test_a_record_of_another_run_is_refused(ada: MemoryDiscovery) -> None:
    assert not await ada.publish(KEY, ADA.peer_id, record_of(ADA, run_id="cd" * 32), 30)
    assert await ada.lookup(KEY) == {}


async def test_a_record_is_gone_when_its_life_is_over(ada: MemoryDiscovery, clock: Clock) -> None:
    assert await ada.publish(KEY, ADA.peer_id, record_of(ADA, life=300), 10)
    clock.now += 9.9
    assert ada.peer_id in await ada.lookup(KEY)
    clock.now += 0.2
    assert await ada.lookup(KEY) == {}


async def test_a_record_is_gone_when_its_signer_no_longer_vouches_for_it(
    ada: MemoryDiscovery, clock: Clock
) -> None:
    assert await ada.publish(KEY, ADA.peer_id, record_of(ADA, life=5), 600)
    clock.now += 5.1
    assert await ada.lookup(KEY) == {}


async def test_the_newest_record_of_a_peer_wins(ada: MemoryDiscovery, clock: Clock) -> None:
    old, new = record_of(ADA, step=1), record_of(ADA, step=2)
    assert await ada.publish(KEY, ADA.peer_id, old, 10)
    clock.now += 1
    assert await ada.publish(KEY, ADA.peer_id, new, 10)
    clock.now -= 1
    assert not await ada.publish(KEY, ADA.peer_id, old, 10), "replayed"
    assert await ada.lookup(KEY) == {ADA.peer_id: new}


async def test_a_record_that_is_too_large_is_an_error(ada: MemoryDiscovery) -> None:
    with pytest.raises(RecordError, match=str(MAX_VALUE)):
        await ada.publish(KEY, ADA.peer_id, bytes(MAX_VALUE + 1), 30)


async def test_no_record_outlives_the_longest_life(ada: MemoryDiscovery, clock: Clock) -> None:
    run = sign_run(parse_toml('[run]\nname = "a"\n'), ADA)
    assert await ada.publish(RUNS_KEY, run.run_id, run.to_bytes(), 10 * MAX_LIFE)
    clock.now += MAX_LIFE - 1
    assert await ada.lookup(RUNS_KEY) == {run.run_id: run.to_bytes()}
    clock.now += 2
    assert await ada.lookup(RUNS_KEY) == {}


async def test_a_run_is_taken_only_under_its_own_id_and_signed(ada: MemoryDiscovery) -> None:
    run = sign_run(parse_toml('[run]\nname = "a"\n'), ADA)
    forged = run.to_bytes().replace(ADA.peer_id.encode(), BOB.peer_id.encode())
    assert not await ada.publish(RUNS_KEY, "ab" * 32, run.to_bytes(), 600)
    assert not await ada.publish(RUNS_KEY, run.run_id, forged, 600)
    assert not await ada.publish(KEY, run.run_id, run.to_bytes(), 600), "a run is no peer"
    assert await ada.publish(RUNS_KEY, run.run_id, run.to_bytes(), 600)


async def test_memory_peers_count_each_other(ada: MemoryDiscovery, bob: MemoryDiscovery) -> None:
    await ada.start()
    assert await ada.check_connection() == 0
    await bob.start()
    assert await ada.check_connection() == 1
    await bob.close()
    assert await ada.check_connection() == 0


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


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_makes_a_record_invalid(position: int, flip: int) -> None:
    stored = bytearray(pack(KEY, record_of(ADA)))
    stored[position % len(stored)] ^= flip
    assert Provenances().check(bytes(stored), ADA.peer_id, NOW) is None


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


@pytest.mark.parametrize(
    "dial",
    [
        "/ip4/203.0.113.7/tcp/31337",
        "/ip6/2001:db8::1/tcp/1",
        "/dns4/a.example.org/tcp/65535",
        "/dns/localhost/tcp/31337",
        "/ip4/203.0.113.7/udp/31337/quic-v1",
        f"/ip4/203.0.113.7/udp/31337/quic-v1/p2p/{BOB.peer_id}/p2p-circuit",
    ],
)
def test_an_address_is_split_into_peer_and_place(dial: str) -> None:
    entry = parse_entry_point(f" {dial}/p2p/{ADA.peer_id}\n")
    assert (entry.dial, entry.peer_id, str(entry)) == (
        dial,
        ADA.peer_id,
        f"{dial}/p2p/{ADA.peer_id}",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:31337",
        ADA.peer_id,
        f"/p2p/{ADA.peer_id}",
        "/ip4/203.0.113.7/tcp/31337",
        "/ip4/203.0.113.7/tcp/31337/p2p/Qmabc",
        f"/ip4/203.0.113.7/tcp/0/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/65536/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/{'9' * 5000}/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/٣/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.300/tcp/1/p2p/{ADA.peer_id}",
        f"/ip6/203.0.113.7/tcp/1/p2p/{ADA.peer_id}",
        f"/ip6/fe80::1%eth0/tcp/1/p2p/{ADA.peer_id}",
        f"/dns4//tcp/1/p2p/{ADA.peer_id}",
        f"/dns4/a,b/tcp/1/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/udp/31337/quic/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/ws/p2p/{ADA.peer_id}",
        f"/unix/tmp/x/tcp/1/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/000031337/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{ADA.peer_id}/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/Qmabc/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/31337/p2p-circuit/p2p/{ADA.peer_id}",
        f"/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/1/p2p/{BOB.peer_id}/p2p-circuit/p2p/{CLEO.peer_id}/p2p-circuit/p2p/{ADA.peer_id}",
        f"/ip4/203.0.113.7/tcp/1/p2p/{BOB.peer_id}/p2p-circuit",
    ],
)
def test_a_malformed_address_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_entry_point(text)
    assert text[:60] in str(caught.value)
    assert "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW" in str(caught.value)


@pytest.mark.parametrize(
    ("dial", "relay"),
    [
        ("/ip4/203.0.113.7/tcp/31337", None),
        ("/ip6/2001:db8::1/udp/65535/quic-v1", None),
        ("/dns4/a.example.org/tcp/1", None),
        (f"/dns6/b.example.org/tcp/300/p2p/{BOB.peer_id}/p2p-circuit", BOB.peer_id),
    ],
)
def test_an_address_is_the_same_after_its_way_as_bytes(dial: str, relay: str | None) -> None:
    entry = parse_entry_point(f"{dial}/p2p/{ADA.peer_id}")
    assert entry.relay == relay
    assert decode(entry.to_bytes()) == dial


def test_the_bytes_of_an_address_are_those_of_the_specification() -> None:
    # https://github.com/multiformats/multiaddr: ip4 = 4, tcp = 6, p2p = 421, p2p-circuit = 290
    relay = base58.b58decode(BOB.peer_id)
    expected = (
        bytes([4, 203, 0, 113, 7, 6, 0x7A, 0x69])
        + b"\xa5\x03"
        + bytes([len(relay)])
        + relay
        + b"\xa2\x02"
    )
    assert encode(f"/ip4/203.0.113.7/tcp/31337/p2p/{BOB.peer_id}/p2p-circuit") == expected


@given(st.binary(max_size=64))
def test_bytes_that_are_no_address_of_ours_are_none(data: bytes) -> None:
    text = decode(data)
    assert text is None or text == "" or text.startswith("/")


def test_an_announced_address_has_no_peer_id_or_the_own_one() -> None:
    dial = "/dns4/boot.example.org/tcp/31337"
    assert (
        parse_announced(dial, ADA.peer_id)
        == parse_announced(f"{dial}/p2p/{ADA.peer_id}", ADA.peer_id)
        == dial
    )
    for wrong in (
        f"{dial}/p2p/{BOB.peer_id}",
        "/dns4/boot.example.org/tcp/0",
        "boot.example.org:31337",
    ):
        with pytest.raises(ConfigError, match="can't be announced"):
            parse_announced(wrong, ADA.peer_id)


def test_addresses_that_reach_further_come_first() -> None:
    far, near, here = "/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1"
    assert sorted([here, far, near], key=lambda dial: -reach(dial)) == [far, near, here]
    assert reach("/dns4/example.org/tcp/1") == reach("/ip6/2a00::1/tcp/1") == 2


async def test_what_its_signer_says_is_newer_holds_though_it_expires_earlier(
    ada: MemoryDiscovery, clock: Clock
) -> None:
    old = record_of(ADA, issued=NOW, life=500, step=1)
    clock.now += 1
    new = record_of(ADA, issued=NOW + 1, life=30, step=2)
    assert await ada.publish(KEY, ADA.peer_id, old, 400)
    assert await ada.publish(KEY, ADA.peer_id, new, 30), "such as a goodbye"
    assert not await ada.publish(KEY, ADA.peer_id, old, 400), "an old one can't be replayed over it"
    assert await ada.lookup(KEY) == {ADA.peer_id: new}
    clock.now += 31
    assert await ada.publish(KEY, ADA.peer_id, old, 400), "nobody remembers what has expired"
