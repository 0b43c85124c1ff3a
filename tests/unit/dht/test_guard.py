"""What a storer of the DHT lets in, and what it keeps; hivemind's own types, no network."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from lowcomm_node.dht import callers, guard
from lowcomm_node.dht.answered import Answered, Silent
from lowcomm_node.dht.eviction import Bringer
from lowcomm_node.dht.guard import BoundedStorage, OwnRecords
from lowcomm_node.dht.keepers import SEARCHED
from lowcomm_node.dht.keys import (
    RUNS_KEY,
    Provenances,
    amendments_key,
    pack,
    peers_key,
    provenance,
    removals_key,
)
from lowcomm_node.net.hivemind_parts import (
    DHTID,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    RoutingTable,
)
from lowcomm_node.system.quota import prefixes_of
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import issue_invite, write_removals
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


def test_a_record_is_not_stored_for_longer_than_its_invite_lasts():
    run = run_of("invite")
    claim = issue_invite(CREATOR, run.run_id, b"i" * 32, NOW + 10).claim(ADA.peer_id, NOW).data
    provenances = Provenances()
    assert lets_in(provenances, RUNS_KEY, run.run_id, run.to_bytes())
    stored = pack(peers_key(run.run_id), record(run.run_id, claim=claim))
    found = provenances.check(stored, ADA.peer_id, NOW)
    assert found is not None and found.expires == pytest.approx(NOW + 10, abs=0.01)
    assert provenances.check(stored, ADA.peer_id, NOW + 11) is None


def test_who_only_publishes_a_run_knows_who_may_join_it():
    run, provenances = run_of("list"), Provenances()
    value = MSGPackSerializer.dumps(pack(RUNS_KEY, run.to_bytes()))
    assert BoundedStorage(provenances).store_subkey(
        DHTID.generate(source=RUNS_KEY), run.run_id, value, NOW + 60
    )
    assert not lets_in(provenances, peers_key(run.run_id), BOB.peer_id, record(run.run_id, BOB))


def test_runs_that_are_known_are_bounded(monkeypatch):
    monkeypatch.setattr("lowcomm_node.dht.keys._MAX_RULES", 2)
    provenances = Provenances()
    for number in range(4):
        spec = parse_toml(f'[run]\nname = "a{number}"\nadmission = "invite"\n')
        run = sign_run(spec, CREATOR)
        assert lets_in(provenances, RUNS_KEY, run.run_id, run.to_bytes())
    assert len(provenances._rules) == 2


def test_what_was_checked_under_one_name_is_not_believed_under_another():
    run_id, provenances = "41" * 16 + "00" + "41" * 15, Provenances()
    removals = write_removals(ADA, run_id, 1, frozenset()).data
    stored = pack(removals_key(run_id, ADA.peer_id), removals)
    assert provenances.check(stored, ADA.peer_id, NOW) is not None
    before, _, rest = stored.partition(b"\0")
    assert provenances.check(rest, f"{ADA.peer_id}\0{before.decode()}", NOW) is None


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


def test_who_may_join_changes_at_a_storer_when_a_record_tells_the_step():
    run, provenances = run_of("list"), Provenances()
    key, records = amendments_key(run.run_id, CREATOR.peer_id), peers_key(run.run_id)
    opened = write_amendment(CREATOR, run, Chain(), 500, {"run.admission": "open"})
    assert lets_in(provenances, RUNS_KEY, run.run_id, run.to_bytes())
    assert lets_in(provenances, key, CREATOR.peer_id, opened.data, life=1800)
    assert lets_in(provenances, records, ADA.peer_id, record(run.run_id, ADA, swarm_step=499))
    assert not lets_in(provenances, records, BOB.peer_id, record(run.run_id, BOB, swarm_step=499))
    assert lets_in(provenances, records, CLEO.peer_id, record(run.run_id, CLEO, swarm_step=500)), (
        "all of old may be gone"
    )
    assert lets_in(provenances, records, BOB.peer_id, record(run.run_id, BOB, swarm_step=499))


def test_an_older_chain_brings_back_no_older_rules():
    run, provenances = run_of("open"), Provenances()
    key = amendments_key(run.run_id, CREATOR.peer_id)
    listed = write_amendment(
        CREATOR, run, Chain(), 0, {"run.admission": "list", "run.members": [ADA.peer_id]}
    )
    opened = write_amendment(CREATOR, run, listed, 0, {"run.admission": "open"})
    assert lets_in(provenances, RUNS_KEY, run.run_id, run.to_bytes())
    for chain in (opened, listed):
        assert lets_in(provenances, key, CREATOR.peer_id, chain.data, life=1800)
    assert lets_in(provenances, peers_key(run.run_id), BOB.peer_id, record(run.run_id, BOB))


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


# Removal lists


def test_only_the_creator_can_write_where_its_removals_are_looked_for():
    run_id = "ab" * 32
    mine, theirs = (
        write_removals(one, run_id, 1, frozenset([ADA.peer_id])).data for one in (CREATOR, BOB)
    )
    key = removals_key(run_id, CREATOR.peer_id)
    provenances = Provenances()
    assert lets_in(provenances, key, CREATOR.peer_id, mine, life=1800)
    assert not lets_in(provenances, key, CREATOR.peer_id, theirs)
    assert not lets_in(provenances, key, BOB.peer_id, theirs), "its place is another"
    assert not lets_in(provenances, key, BOB.peer_id, mine)
    assert provenance(pack(key, mine), CREATOR.peer_id, NOW) is not None


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


def test_a_silent_peer_is_avoided_for_seconds_that_no_clock_makes_longer():
    clock = [0.0]
    silent = Silent(lambda: clock[0], lasts=10.0)
    silent.register_failure("ada")
    clock[0] = 9.0
    assert "ada" in silent and "bob" not in silent
    clock[0] = 10.0
    assert "ada" not in silent
    silent.register_failure("ada")
    silent.register_success("ada")
    assert "ada" not in silent


def test_where_there_is_no_more_room_a_record_is_still_renewed(monkeypatch):
    run_id = "ab" * 32
    storage, key = BoundedStorage(Provenances()), DHTID.generate(source=peers_key(run_id))
    sizes = []

    def store(issued: float) -> bool:
        value = MSGPackSerializer.dumps(pack(peers_key(run_id), record(run_id, issued=issued)))
        sizes.append(len(value))
        return storage.store_subkey(key, ADA.peer_id, value, issued + 25)

    assert store(NOW)
    monkeypatch.setattr(guard, "MAX_KEY_BYTES", max(sizes) + 20)
    assert store(NOW + 1)


def test_a_removal_list_is_not_replaced_by_one_with_a_lower_number():
    run_id = "ab" * 32
    place = removals_key(run_id, CREATOR.peer_id)
    storage, key = BoundedStorage(Provenances()), DHTID.generate(source=place)
    lists = [
        write_removals(CREATOR, run_id, version, frozenset([ADA.peer_id])).data
        for version in (2, 1, 3)
    ]
    taken = [
        storage.store_subkey(
            key, CREATOR.peer_id, MSGPackSerializer.dumps(pack(place, data)), NOW + life
        )
        for data, life in zip(lists, (1000, 3000, 500), strict=True)
    ]
    assert taken == [True, False, True]


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
        await self.update_routing_table(place or guard.place_of(peer.peer_id), peer_id)
        return [
            node_id for node_id, one in self.routing_table.uid_to_peer_id.items() if one == peer_id
        ]


def test_searches_and_answers_are_narrow_and_the_table_is_not():
    table: Any = Table(ADA)
    assert (table.bucket_size, table.routing_table.bucket_size) == (SEARCHED, 20)


ANYWHERE, ELSEWHERE = (
    DHTID.generate(source="next to a key"),
    DHTID.generate(source="somewhere else"),
)


async def test_only_a_peer_that_the_owner_has_named_may_stand_anywhere():
    table = Table(ADA)
    assert await table.hear(BOB, ANYWHERE) == []
    assert await table.hear(BOB) == [guard.place_of(BOB.peer_id)]
    assert await table.hear(ADA, ANYWHERE) == [ANYWHERE]


async def test_a_named_peer_that_was_restarted_stands_at_its_new_place_only():
    table = Table(ADA)
    await table.hear(ADA, ANYWHERE)
    assert await table.hear(ADA, ELSEWHERE) == [ELSEWHERE]


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
def brought_by(peer: str, host: str) -> Iterator[None]:
    """As if this peer stored what is stored meanwhile, from this address."""
    token = callers._BRINGER.set(Bringer(peer, prefixes_of(host)))
    try:
        yield
    finally:
        callers._BRINGER.reset(token)


class Stored:
    """What one storer keeps under the key of a run."""

    def __init__(self, monkeypatch, room: int) -> None:
        monkeypatch.setattr(guard, "MAX_KEY_BYTES", room)
        self.answered = Answered(lambda: NOW)
        self.storage = BoundedStorage(Provenances(), self.answered)
        self.key = DHTID.generate(source=peers_key(RUN))

    def store(self, peer: Identity, host: str = "203.0.113.1", by: str = "", step: int = 0) -> bool:
        data = record(
            RUN, peer, life=300.0, issued=NOW + step / 1000, addresses=("203.0.113.1:4000",) * 8
        )
        value = MSGPackSerializer.dumps(pack(peers_key(RUN), data))
        with brought_by(by or peer.peer_id, host):
            return self.storage.store_subkey(self.key, peer.peer_id, value, NOW + 280 + step / 1000)

    def keeps(self, peers: list[Identity]) -> int:
        found = self.storage.get(self.key)
        return sum(peer.peer_id in found.value for peer in peers) if found is not None else 0


RUN = "ab" * 32
HONEST = [Identity(bytes([0, number]) * 16) for number in range(1, 9)]
SYBILS = [Identity(bytes([1, number // 256, number % 256, 1]) * 8) for number in range(200)]
ROOM = 25_000
"""Of about 60 records of the tests."""


def test_a_flood_from_one_connection_pushes_nobody_out_and_keeps_nobody_out(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    early, late = HONEST[:4], HONEST[4:]
    assert all(stored.store(peer) for peer in early)
    taken = [stored.store(sybil, "198.51.100.7", by=SYBILS[0].peer_id) for sybil in SYBILS]
    assert 20 < sum(taken) < 100
    assert all(stored.store(peer) for peer in late), (
        "who comes later, at the address of all honest peers"
    )
    assert stored.keeps(HONEST) == len(HONEST)


def test_a_flood_of_as_many_connections_pushes_out_only_itself(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    assert all(stored.store(peer, f"203.0.113.{number}") for number, peer in enumerate(HONEST[:4]))
    for sybil in SYBILS:
        stored.store(sybil, "198.51.100.7")
    assert all(stored.store(peer, f"192.0.{number}.1") for number, peer in enumerate(HONEST[4:]))
    assert stored.keeps(HONEST) == len(HONEST)


def test_who_shares_the_address_of_a_flood_stays_if_it_was_here_before_or_has_answered(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    assert stored.store(HONEST[0], "198.51.100.7")
    for sybil in SYBILS:
        stored.store(sybil, "198.51.100.7")
    assert not stored.store(HONEST[1], "198.51.100.7"), "nothing tells it from the flood"
    stored.answered.add(HONEST[1].peer_id)
    assert stored.store(HONEST[1], "198.51.100.7")
    for step, sybil in enumerate(SYBILS):
        stored.store(sybil, "198.51.100.7", step=step + 1)
    assert stored.keeps(HONEST[:2]) == 2


def test_a_replayed_record_does_not_lower_its_owner(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    assert stored.store(HONEST[0])
    assert stored.store(HONEST[0], "198.51.100.7", by=SYBILS[0].peer_id, step=1)
    for sybil in SYBILS:
        stored.store(sybil, "198.51.100.7", by=SYBILS[0].peer_id)
    assert stored.keeps(HONEST[:1]) == 1


def test_what_we_publish_ourselves_never_gives_way(monkeypatch):
    stored = Stored(monkeypatch, 2_000)
    value = MSGPackSerializer.dumps(pack(peers_key(RUN), record(RUN, ADA, life=300.0)))
    for sybil in SYBILS[:20]:
        stored.store(sybil)
    assert stored.storage.store_subkey(stored.key, ADA.peer_id, value, NOW + 280)
    for sybil in SYBILS[20:]:
        stored.answered.add(sybil.peer_id)
        stored.store(sybil)
    assert stored.keeps([ADA]) == 1


def test_invented_runs_keep_no_run_out_and_take_no_more_than_their_share_of_memory(monkeypatch):
    monkeypatch.setattr(guard, "MAX_KEYS", 20)
    storage = BoundedStorage(Provenances(), Answered(lambda: NOW))

    def store(run_id: str, peer: Identity, host: str) -> bool:
        value = MSGPackSerializer.dumps(pack(peers_key(run_id), record(run_id, peer, life=300.0)))
        with brought_by(peer.peer_id, host):
            return storage.store_subkey(
                DHTID.generate(source=peers_key(run_id)), peer.peer_id, value, NOW + 280
            )

    taken = [store(f"{number:064x}", SYBILS[0], "198.51.100.7") for number in range(50)]
    assert sum(taken) == 20
    assert store(RUN, HONEST[0], "203.0.113.1")
    assert len(storage) == 20 and storage.get(DHTID.generate(source=peers_key(RUN))) is not None
    monkeypatch.setattr(guard, "MAX_BYTES", storage._bytes)
    assert not store(f"{99:064x}", SYBILS[0], "198.51.100.7")
    assert store(RUN, HONEST[1], "203.0.113.2")
    assert storage._bytes <= guard.MAX_BYTES


def test_what_is_known_of_records_goes_with_them(monkeypatch):
    stored = Stored(monkeypatch, ROOM)
    now = [NOW]
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now[0])
    for sybil in SYBILS[:20]:
        stored.store(sybil)
    now[0] = NOW + 10_000
    stored.storage._sweep()
    assert (stored.storage._kept, stored.storage._bytes) == ({}, 0)


def test_a_flood_is_refused_without_another_look_and_a_renewal_never_is(monkeypatch):
    stored, looks = Stored(monkeypatch, ROOM), []
    choose = guard.those_to_go
    monkeypatch.setattr(guard, "those_to_go", lambda *rest: looks.append(rest) or choose(*rest))
    first = SYBILS[0]
    assert stored.store(first, "198.51.100.7")
    for sybil in SYBILS[1:]:
        stored.store(sybil, "198.51.100.7")
    assert len(looks) <= 2
    assert stored.store(first, "198.51.100.7", step=1)
    assert stored.store(HONEST[0])
