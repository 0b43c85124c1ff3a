"""What a storer of the DHT lets in, and what it keeps; hivemind's own types, no network."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lowcomm_node.dht import guard
from lowcomm_node.dht.guard import BoundedStorage, Callers, OwnRecords
from lowcomm_node.dht.keys import (
    RUNS_KEY,
    Provenances,
    amendments_key,
    pack,
    peers_key,
    removals_key,
)
from lowcomm_node.dht.records import place_of_key
from lowcomm_node.net.control import Connection
from lowcomm_node.net.hivemind_parts import (
    DHTID,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    RoutingTable,
)
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.spec.amendments import Chain, write_amendment
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

CREATOR, ADA, BOB, CLEO = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _clock_that_stands_still(monkeypatch):
    monkeypatch.setattr(guard, "time", lambda: NOW)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: NOW)


def run_of(admission: str) -> SignedRun:
    members = f'members = ["{ADA.peer_id}"]\n' if admission == "list" else ""
    return sign_run(parse_toml(f'[run]\nname = "a"\nadmission = "{admission}"\n{members}'), CREATOR)


def record(
    run_id: str, peer: Identity = ADA, *, issued: float = NOW, life: float = 30.0, **fields
) -> bytes:
    info = PeerInfo(
        peer_id=peer.peer_id,
        run_id=run_id,
        phase=Phase.TRAINING,
        issued=issued,
        expires=issued + life,
        **fields,
    )
    return write_record(info, peer)


def dht_record(key: str, subkey: str, value: bytes, life: float = 30.0) -> DHTRecord:
    place = DHTID.generate(source=key).to_bytes()
    return DHTRecord(
        place,
        MSGPackSerializer.dumps(subkey),
        MSGPackSerializer.dumps(pack(key, value)),
        NOW + life,
    )


def lets_in(
    provenances: Provenances, key: str, subkey: str, value: bytes, life: float = 25.0
) -> bool:
    return OwnRecords(provenances).validate(dht_record(key, subkey, value, life))


# Who may join


@pytest.mark.parametrize("admission", ["invite", "list"])
def test_who_has_seen_a_run_stores_no_record_of_those_that_it_does_not_take(admission):
    run = run_of(admission)
    token = issue_invite(CREATOR, run.run_id, b"i" * 32, NOW + 1000)
    ada = record(
        run.run_id, claim=token.claim(ADA.peer_id, NOW).data if admission == "invite" else b""
    )
    bob, key = record(run.run_id, BOB), peers_key(run.run_id)
    stranger = Provenances()
    assert lets_in(stranger, key, BOB.peer_id, bob), "who does not know the run can't tell"
    knowing = Provenances()
    assert lets_in(knowing, RUNS_KEY, run.run_id, run.to_bytes())
    assert lets_in(knowing, key, ADA.peer_id, ada)
    assert not lets_in(knowing, key, BOB.peer_id, bob)
    assert not lets_in(knowing, key, BOB.peer_id, bob)
    reason = "not-invited" if admission == "invite" else "not-listed"
    assert knowing.refusals.counts() == {f"record.{reason}": 1}, "the same bytes count once"


def test_a_stolen_or_forged_claim_is_not_stored():
    run = run_of("invite")
    stolen = issue_invite(CREATOR, run.run_id, b"i" * 32, NOW + 1000).claim(ADA.peer_id, NOW).data
    forged = issue_invite(BOB, run.run_id, b"i" * 32, NOW + 1000).claim(BOB.peer_id, NOW).data
    provenances = Provenances()
    assert lets_in(provenances, RUNS_KEY, run.run_id, run.to_bytes())
    for claim in (stolen, forged):
        assert not lets_in(
            provenances, peers_key(run.run_id), BOB.peer_id, record(run.run_id, BOB, claim=claim)
        )
    assert provenances.refusals.counts() == {"record.bad-signature": 2}


# Amendments


@pytest.mark.parametrize("chain_first", [False, True])
def test_who_may_join_by_an_amendment_is_enforced_whatever_was_seen_first(chain_first: bool):
    run, provenances = run_of("open"), Provenances()
    listed = write_amendment(
        CREATOR, run, Chain(), 0, {"run.admission": "list", "run.members": [ADA.peer_id]}
    )
    seen = [
        (RUNS_KEY, run.run_id, run.to_bytes()),
        (amendments_key(run.run_id, CREATOR.peer_id), CREATOR.peer_id, listed.data),
    ]
    assert lets_in(provenances, peers_key(run.run_id), BOB.peer_id, record(run.run_id, BOB))
    for key, subkey, data in seen[::-1] if chain_first else seen:
        assert lets_in(provenances, key, subkey, data, life=1800)
    assert not lets_in(provenances, peers_key(run.run_id), CLEO.peer_id, record(run.run_id, CLEO))
    assert lets_in(provenances, peers_key(run.run_id), ADA.peer_id, record(run.run_id, ADA))
    opened = write_amendment(CREATOR, run, listed, 0, {"run.admission": "open"})
    assert lets_in(provenances, seen[1][0], CREATOR.peer_id, opened.data, life=1800)
    assert lets_in(provenances, seen[1][0], CREATOR.peer_id, listed.data, life=1800), (
        "it is sound, but older"
    )
    assert lets_in(provenances, peers_key(run.run_id), CLEO.peer_id, record(run.run_id, CLEO))


def test_only_the_creator_can_amend_a_run_and_an_older_chain_replaces_no_newer():
    run, provenances = run_of("open"), Provenances()
    key = amendments_key(run.run_id, CREATOR.peer_id)
    first = write_amendment(CREATOR, run, Chain(), 0, {"run.steps": 500})
    second = write_amendment(CREATOR, run, first, 0, {"run.steps": 600})
    orders = [
        provenances.check(pack(key, one.data), CREATOR.peer_id, NOW) for one in (first, second)
    ]
    assert [one.order for one in orders if one is not None] == [1, 2]
    assert not lets_in(provenances, key, BOB.peer_id, first.data)
    assert not lets_in(
        provenances, amendments_key(run.run_id, BOB.peer_id), BOB.peer_id, first.data
    )
    assert not lets_in(
        provenances, removals_key(run.run_id, CREATOR.peer_id), CREATOR.peer_id, first.data
    )


# Sizes and times


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": bytes(1_000_000)}, "too-large"),
        ({"subkey": MSGPackSerializer.dumps("x" * 1_000_000)}, "too-large"),
        ({"value": b"\xc1"}, "malformed"),
        ({"value": MSGPackSerializer.dumps(7)}, "malformed"),
        ({"expiration_time": NOW - 1}, "expired"),
        ({"expiration_time": NOW + 1e10}, "lives-too-long"),
        ({"expiration_time": NOW + 300}, "lives-too-long"),
        ({"key": DHTID.generate(source="elsewhere").to_bytes()}, "misplaced"),
    ],
)
def test_what_is_not_let_in_is_counted_by_its_reason(change, reason, monkeypatch):
    run_id = "ab" * 32
    sound = dht_record(peers_key(run_id), ADA.peer_id, record(run_id))
    provenances = Provenances()
    assert OwnRecords(provenances).validate(sound)
    assert provenances.refusals.counts() == {}
    if reason == "too-large":
        monkeypatch.setattr(
            MSGPackSerializer, "loads", lambda *_: pytest.fail("too much was unpacked")
        )
    assert not OwnRecords(provenances).validate(replace(sound, **change))
    assert provenances.refusals.counts() == {f"record.{reason}": 1}


# What is kept


def test_an_older_record_never_replaces_a_newer_one_however_long_it_is_to_be_kept():
    run_id = "ab" * 32
    storage, key = BoundedStorage(Provenances()), DHTID.generate(source=peers_key(run_id))

    def store(data: bytes, life: float) -> bool:
        value = MSGPackSerializer.dumps(pack(peers_key(run_id), data))
        return storage.store_subkey(key, ADA.peer_id, value, NOW + life)

    def kept() -> bytes:
        found = storage.get(key)
        assert found is not None
        return MSGPackSerializer.loads(found.value.get(ADA.peer_id).value)[1:]

    old, new = record(run_id, life=300.0), record(run_id, issued=NOW + 1, life=30.0, swarm_step=1)
    assert store(old, 100)
    assert store(new, 20), "newer, though it expires earlier"
    assert kept() == new
    assert not store(old, 290)
    assert not store(new, 10), "no longer than it is kept already"
    assert store(new, 25)
    assert kept() == new


def test_a_record_from_when_both_clocks_were_ahead_hides_no_newer_one(monkeypatch):
    run_id, ahead, provenances = "ab" * 32, NOW + 3600, Provenances()
    storage, key = BoundedStorage(provenances), DHTID.generate(source=peers_key(run_id))

    def store(data: bytes, expires: float) -> bool:
        value = MSGPackSerializer.dumps(pack(peers_key(run_id), data))
        return storage.store_subkey(key, ADA.peer_id, value, expires)

    early, right = record(run_id, issued=ahead), record(run_id)
    with monkeypatch.context() as patch:
        patch.setattr(guard, "time", lambda: ahead)
        assert store(early, ahead + 30)
    assert provenances.check(pack(peers_key(run_id), early), ADA.peer_id, NOW) is None
    assert store(right, NOW + 30)
    found = storage.get(key)
    assert found is not None and MSGPackSerializer.loads(found.value.get(ADA.peer_id).value)[
        1:
    ] == (right)


# Where a peer stands


class Table:
    """hivemind's routing table behind a guard, without a network."""

    def __init__(self, *named: Identity) -> None:
        self.routing_table = RoutingTable(
            DHTID.generate(source="us"), bucket_size=20, depth_modulo=5
        )
        self.near: dict[DHTID, PeerID] = {}
        guard.guard(self, Provenances(), {peer.peer_id for peer in named})  # pyright: ignore[reportArgumentType]

    async def update_routing_table(
        self, node_id: DHTID, peer_id: PeerID, responded: bool = True
    ) -> None:
        if responded:
            self.routing_table.add_or_update_node(node_id, peer_id)
        else:
            del self.routing_table[node_id]

    async def call_find(self, peer: PeerID, keys):
        return dict.fromkeys(keys, (None, self.near))

    async def hear(self, peer: Identity, place: DHTID | None = None) -> list[DHTID]:
        """A peer says where it stands; where it stands by our table."""
        peer_id = PeerID.from_base58(peer.peer_id)
        await self.update_routing_table(place or place_of_key(peer.peer_id), peer_id)
        return [
            node_id for node_id, one in self.routing_table.uid_to_peer_id.items() if one == peer_id
        ]


ANYWHERE, ELSEWHERE = (
    DHTID.generate(source="next to a key"),
    DHTID.generate(source="somewhere else"),
)


async def test_only_a_peer_that_the_owner_has_named_may_stand_anywhere():
    table = Table(ADA)
    assert await table.hear(BOB, ANYWHERE) == []
    assert await table.hear(BOB) == [place_of_key(BOB.peer_id)]
    assert await table.hear(ADA, ANYWHERE) == [ANYWHERE]


async def test_what_others_say_of_where_a_peer_stands_is_believed_only_if_that_one_has_told_us():
    table, ada, bob = Table(ADA), PeerID.from_base58(ADA.peer_id), PeerID.from_base58(BOB.peer_id)
    table.near = {ANYWHERE: ada, ELSEWHERE: bob}
    key = DHTID.generate(source="key")

    async def believed() -> dict[DHTID, PeerID]:
        return (await table.call_find(bob, [key]))[key][1]

    assert await believed() == {}
    await table.hear(ADA, ANYWHERE)
    assert await believed() == {ANYWHERE: ada}
    table.near = {ELSEWHERE: ada}
    assert await believed() == {}


# A flood


@contextmanager
def stored_by(peer: str, host: str) -> Iterator[None]:
    """As if this peer stored what is stored meanwhile, from this address."""
    token = guard._CALLER.set((peer, host))
    try:
        yield
    finally:
        guard._CALLER.reset(token)


class Stored:
    """What a storer keeps under the key of a run."""

    def __init__(self, monkeypatch, room: int) -> None:
        monkeypatch.setattr(guard, "MAX_KEY_BYTES", room)
        self.answered = set[str]()
        self.storage = BoundedStorage(Provenances(), self.answered)

    def store(
        self,
        peer: Identity,
        host: str = "203.0.113.1",
        by: str = "",
        step: int = 0,
        run_id: str = "ab" * 32,
    ) -> bool:
        data = record(
            run_id, peer, life=300.0, issued=NOW + step / 1000, addresses=("203.0.113.1:4000",) * 8
        )
        key = peers_key(run_id)
        value = MSGPackSerializer.dumps(pack(key, data))
        with stored_by(by or peer.peer_id, host):
            return self.storage.store_subkey(
                DHTID.generate(source=key), peer.peer_id, value, NOW + 280 + step / 1000
            )

    def keeps(self, peers: list[Identity]) -> int:
        found = self.storage.get(KEY)
        return sum(peer.peer_id in found.value for peer in peers) if found is not None else 0


KEY = DHTID.generate(source=peers_key("ab" * 32))
HONEST = [Identity(bytes([0, number]) * 16) for number in range(1, 9)]
SYBILS = [Identity(bytes([1, number // 256, number % 256, 1]) * 8) for number in range(200)]
ROOM = 25_000
"""Of about 60 records of the tests."""


def test_a_flood_from_one_address_gets_a_quarter_of_the_room(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    early, late = HONEST[:4], HONEST[4:]
    assert all(stored.store(peer) for peer in early)
    taken = [stored.store(sybil, "198.51.100.7") for sybil in SYBILS]
    assert 10 < sum(taken) < 20
    assert all(stored.store(peer) for peer in late)
    assert stored.keeps(HONEST) == len(HONEST)
    assert not stored.store(SYBILS[-1], "198.51.100.7")
    assert stored.store(SYBILS[0], "198.51.100.7", step=1), "a renewal takes up no more"


def test_a_peer_that_has_answered_comes_before_a_flood_from_everywhere(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    assert stored.store(HONEST[0])
    for number, sybil in enumerate(SYBILS):
        stored.store(sybil, f"198.51.100.{number}")
    stored.answered.add(HONEST[1].peer_id)
    assert stored.store(HONEST[1])
    for number, sybil in enumerate(SYBILS):
        stored.store(sybil, f"198.51.100.{number}", step=1)
    assert stored.keeps(HONEST[:2]) == 2


def test_peers_that_store_their_record_themselves_have_proved_to_be_there(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    stored.store(HONEST[0])
    stored.store(HONEST[1], "198.51.100.7", by=SYBILS[0].peer_id)
    stored.store(HONEST[2], "198.51.100.7", by=SYBILS[0].peer_id)
    stored.store(HONEST[0], "198.51.100.7", by=SYBILS[0].peer_id, step=1)
    stored.answered.add(HONEST[2].peer_id)
    assert stored.storage.proved(KEY) == {HONEST[0].peer_id, HONEST[2].peer_id}
    assert stored.storage.origin(KEY, HONEST[0].peer_id) == "203.0.113.1", "who renews keeps it"


def test_invented_runs_get_a_quarter_of_the_keys_and_of_the_memory(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    monkeypatch.setattr(guard, "MAX_KEYS", 20)
    runs = [f"{number:064x}" for number in range(50)]
    taken = [stored.store(SYBILS[0], "198.51.100.7", run_id=run_id) for run_id in runs]
    assert sum(taken) == 5
    assert stored.store(HONEST[0])
    for number, run_id in enumerate(runs):
        stored.store(SYBILS[1], f"192.0.2.{number}", run_id=run_id)
    assert len(stored.storage.items()) == 20
    assert not stored.store(HONEST[1], run_id="cd" * 32)
    stored.answered.add(HONEST[1].peer_id)
    assert stored.store(HONEST[1], run_id="cd" * 32)
    assert len(stored.storage.items()) == 20 and stored.keeps(HONEST[:1]) == 1
    monkeypatch.setattr(guard, "MAX_BYTES", 1)
    assert not stored.store(HONEST[2])


async def test_a_caller_is_known_by_the_address_of_its_connection_or_by_its_relay(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_EVERY", 0.0)
    addresses = {
        "ada": "/ip4/203.0.113.7/tcp/4001",
        "bob": "/ip6/2001:db8:1:2::3/udp/4001/quic-v1",
        "cleo": f"/ip4/198.51.100.1/tcp/4001/p2p/{ADA.peer_id}/p2p-circuit",
    }

    async def connections() -> list[Connection]:
        return [Connection(peer, address) for peer, address in addresses.items()]

    known = Callers(connections)

    async def call(peer: str) -> tuple[str, str] | None:
        await known.enter(peer)
        await asyncio.sleep(0)
        return guard._CALLER.get()

    peers = ("ada", "bob", "cleo", "nobody")
    found = await asyncio.gather(*(asyncio.create_task(call(peer)) for peer in peers))
    assert found == [
        ("ada", "203.0.113.7"),
        ("bob", "2001:db8:1:2::/64"),
        ("cleo", f"relay {ADA.peer_id}"),
        ("nobody", "unknown"),
    ]
    assert guard._CALLER.get() is None, "what we publish ourselves"
