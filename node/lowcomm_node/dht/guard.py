"""Hardens hivemind's DHT against other peers.

hivemind trusts the peers of a DHT. Measured on 1.1.12, each of these takes one call of anybody who
can dial us:

- a record under another peer's name
    -> every record is checked, where it is stored and where it is read
- one bad record makes a reader drop all others
    -> only the bad one is dropped
- a record in the *cache* hides all that is stored
    -> there is no cache
- an answer that claims never to expire ends the search for better ones
    -> the claim is recomputed from the records
- any number of records, of any size
    -> at most MAX_KEYS keys, MAX_KEY_BYTES for each, MAX_BYTES for all; a flood evicts itself
       (dht/eviction.py)
- an older record over a newer one
    -> the order of the signer decides
- any place in the DHT, such as next to a key
    -> the place must be the hash of the peer id, else the peer is ignored. A peer named by the
       owner may stand anywhere, as hivemind's own programs do
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from time import monotonic, time
from typing import Any

from lowcomm_node.dht.answered import Answered
from lowcomm_node.dht.callers import bringer
from lowcomm_node.dht.eviction import Kept, Rank, first_to_go, those_to_go
from lowcomm_node.dht.interface import MAX_VALUE
from lowcomm_node.dht.keepers import SEARCHED
from lowcomm_node.dht.keys import MAX_LIFE, Provenance, Provenances
from lowcomm_node.net.hivemind_parts import (
    DHTID,
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    RecordValidatorBase,
    TimedStorage,
    ValueWithExpiration,
)
from lowcomm_protocol.errors import Reason

Records = Any
"""A ``DictionaryDHTValue``. hivemind's decorator hides from type checkers that it is a class."""
MAX_KEYS = 1024
MAX_KEY_BYTES = 2 * 1024**2
"""Of all records under one key. An answer of more than 4 MiB can't be sent, and so nobody would
find anything."""
MAX_BYTES = 64 * 1024**2
"""Of all records that we keep for others."""
REFUSED_FOR = 1.0
"""Seconds for which records no better than a refused one are refused at once."""
MAX_REFUSED = 1024
SWEEP_EVERY = 256
"""Records stored between two sweeps of expired ones."""
MAX_SUBKEY = 256
"""Bytes. Ours are peer ids and run ids."""
CLOCK_SLACK = 60.0
"""Seconds that an expiry may exceed the signer's claim or MAX_LIFE, for clocks that differ."""


def place_of(peer_id: str) -> DHTID:
    """The DHT place of a peer. Python's ``random`` would put two processes with one seed at one
    place."""
    return DHTID.generate(source=peer_id)


def guard(
    protocol: DHTProtocol,
    provenances: Provenances,
    named: Collection[str] = (),
    answered: Answered | None = None,
) -> None:
    """Harden a protocol that was just created and has met no peer yet.

    ``named``: ids of the peers named by our owner; ``answered``: peers that have proved to be
    there.
    """
    call_find, update_routing_table = protocol.call_find, protocol.update_routing_table

    def is_in_place(node_id: DHTID, peer: PeerID) -> bool:
        # Others may report a named peer only at the place that it has told us itself.
        name = peer.to_base58()
        return node_id == place_of(name) or (
            name in named and protocol.routing_table.get(peer_id=peer) == node_id
        )

    async def find(peer: PeerID, keys: Any) -> Any:
        answer = await call_find(peer, keys)
        return answer and {
            key: (
                _honest(value),
                # A liar that names places next to a key would stand between us and its records.
                {place: one for place, one in near.items() if is_in_place(place, one)},
            )
            for key, (value, near) in answer.items()
        }

    async def update(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        # hivemind declares that its table gives a PeerID here; it gives a DHTID.
        known: Any = node_id if node_id is not None else protocol.routing_table.get(peer_id=peer_id)
        name, table = peer_id.to_base58(), protocol.routing_table
        if known is None or not (known == place_of(name) or name in named):
            return
        before: Any = table.get(peer_id=peer_id)
        if before is not None and before != known and before in table:
            del table[before]  # hivemind's own programs stand elsewhere each time that they start
        await update_routing_table(known, peer_id, responded=responded)

    protocol.bucket_size = SEARCHED  # its table still keeps 20 peers at each distance
    protocol.storage, protocol.cache = BoundedStorage(provenances, answered), NoCache()
    protocol.record_validator = OwnRecords(provenances)
    # hivemind's own drops all records of an answer for one that is bad.
    setattr(protocol, "_validate_dictionary", _keep_valid(protocol.record_validator))  # noqa: B010 - a method of it
    protocol.call_find, protocol.update_routing_table = find, update


class OwnRecords(RecordValidatorBase):
    """Accepts records signed by the subkey's peer, under the right key, and not for too long."""

    def __init__(self, provenances: Provenances) -> None:
        self._provenances = provenances

    def validate(self, record: DHTRecord) -> bool:
        """Called at the storer and at the reader. Never raises."""
        now = time()
        if len(record.value) > MAX_VALUE + 64 or len(record.subkey) > MAX_SUBKEY:
            return self._refuse(Reason.TOO_LARGE)  # before anything is unpacked
        if not now < record.expiration_time <= now + MAX_LIFE + CLOCK_SLACK:
            return self._refuse(
                Reason.EXPIRED if record.expiration_time <= now else Reason.LIVES_TOO_LONG
            )
        try:
            subkey, value = (
                MSGPackSerializer.loads(record.subkey),
                MSGPackSerializer.loads(record.value),
            )
        except Exception:  # untrusted msgpack and its extension types can raise anything
            return self._refuse(Reason.MALFORMED)
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            return self._refuse(Reason.MALFORMED)
        found = self._provenances.check(value, subkey, now)
        if found is None:
            return False
        if record.expiration_time > found.expires + CLOCK_SLACK:
            return self._refuse(Reason.LIVES_TOO_LONG)
        if DHTID.generate(source=found.key).to_bytes() != record.key:
            return self._refuse(Reason.MISPLACED)
        return True

    def _refuse(self, reason: Reason) -> bool:
        self._provenances.refuse(reason)
        return False


class BoundedStorage(DHTLocalStorage):
    """Records that we keep for others: the newest of each subkey, within bounds; see
    eviction.py."""

    def __init__(self, provenances: Provenances, answered: Answered | None = None) -> None:
        super().__init__()
        self._provenances = provenances
        self._answered = answered if answered is not None else Answered()
        self._kept: dict[DHTID, dict[Any, Kept]] = {}
        """What is known of each record, by key and subkey. Expired ones stay until they are
        swept."""
        self._stored = self._bytes = 0
        self._refused: dict[tuple[DHTID, Rank, tuple[str, ...]], tuple[float, int]] = {}
        """Time and size of the last refusal of each kind, so that a flood is refused without
        another search."""

    def get(self, key: DHTID) -> ValueWithExpiration[Any] | None:
        """A copy: hivemind's search adds the answers of others to the very object that it gets
        here."""
        found = super().get(key)
        return found and ValueWithExpiration(_copy(found.value), found.expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record; returns whether it was taken."""
        # Also for our own records: a run says who may join it.
        told = self._provenance(subkey, value)
        order = told.order if told is not None else -1
        found = super().get(key)
        records: Records | None = found.value if found is not None else None
        known = records.get(subkey) if records is not None else None
        if known is not None:
            before = self._provenance(subkey, known.value)
            kept = before.order if before is not None else -1
            if order < kept or (order == kept and expiration_time <= known.expiration_time):
                return False
        new = self._describe(
            key, subkey, value, told.owner if told is not None else "", known is not None
        )
        if not self._make_room(key, records, new):
            return False
        if not self._put(key, records, subkey, value, expiration_time):
            return False
        self._forget(key, [subkey])
        self._kept.setdefault(key, {})[subkey] = new
        self._bytes += new.size
        return True

    def proved(self, key: DHTID) -> frozenset[str]:
        """The signers under a key that stored their record here themselves, or have answered."""
        entries = (self._ranked(entry) for entry in self._kept.get(key, {}).values())
        return frozenset(
            entry.owner for entry in entries if entry.rank in (Rank.BROUGHT, Rank.ANSWERED)
        )

    def brought_from(self, key: DHTID, subkey: Any) -> tuple[str, ...]:
        """The networks that a record came from, narrowest first; empty if it is not here, or is
        ours."""
        kept = self._kept.get(key, {}).get(subkey)
        return kept.networks if kept is not None else ()

    def _put(
        self, key: DHTID, records: Records | None, subkey: Any, value: bytes, expiration_time: float
    ) -> bool:
        if records is None:
            return super().store_subkey(key, subkey, value, expiration_time)
        known = records.get(subkey)
        if known is not None and known.expiration_time >= expiration_time:
            # hivemind would keep the older of two records if it expires later, such as before a
            # goodbye.
            del records[subkey]
        if expiration_time > records.latest_expiration_time:
            TimedStorage.store(self, key, records, expiration_time)
        return records.store(subkey, value, expiration_time)

    def _describe(self, key: DHTID, subkey: Any, value: bytes, owner: str, is_known: bool) -> Kept:
        by = bringer()
        rank = Rank.OWN if by is None else Rank.BROUGHT if by.peer_id == owner else Rank.TOLD
        self._stored += 1
        new = Kept(
            subkey, len(value), rank, owner, by.networks if by is not None else (), self._stored
        )
        before = self._kept.get(key, {}).get(subkey)
        return before.renewed(new) if before is not None and is_known else new

    def _make_room(self, key: DHTID, records: Records | None, new: Kept) -> bool:
        """Whether there is room for a record under a key, evicting others where needed."""
        if self._stored % SWEEP_EVERY == 0:
            self._sweep()
        if records is not None:
            others = {name: len(entry.value) for name, entry in records.items() if name != new.name}
            excess = sum(others.values()) + new.size - MAX_KEY_BYTES
            if excess > 0 and not self._evict(key, records, new, set(others), excess):
                return False
        return self._make_room_beside(key, new)

    def _evict(
        self, key: DHTID, records: DictionaryDHTValue, new: Kept, others: set[Any], excess: int
    ) -> bool:
        kept, ranked, now = self._kept.get(key, {}), self._ranked(new), monotonic()
        kind = (key, ranked.rank, ranked.networks)
        refused_at, size = self._refused.get(kind, (float("-inf"), 0))
        if now < refused_at + REFUSED_FOR and new.size >= size and new.name not in kept:
            return False
        gone = those_to_go(
            ranked, [self._ranked(kept[name]) for name in others if name in kept], excess
        )
        if gone is None:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[kind] = now, new.size
        for entry in gone or ():
            del records[entry.name]
        self._forget(key, [entry.name for entry in gone or ()])
        return gone is not None

    def _make_room_beside(self, key: DHTID, new: Kept) -> bool:
        """Whether there is room for one more key, or one that grows, evicting other keys where
        needed."""
        size = sum(entry.size for entry in self._kept.get(key, {}).values())
        if (
            len(self._kept) < MAX_KEYS or key in self._kept
        ) and self._bytes + new.size <= MAX_BYTES:
            return True
        self._sweep()
        keys = [self._of_key(one, entries) for one, entries in self._kept.items() if one != key]
        own = self._ranked(replace(new, name=key, size=size + new.size))
        too_many = len(keys) + 1 - MAX_KEYS
        while too_many > 0 or sum(one.size for one in keys) + own.size > MAX_BYTES:
            first = first_to_go([*keys, own])
            if first is None or first is own:
                return False
            keys.remove(first)
            gone: Any = first.name
            del self[gone]
            self._forget(gone, list(self._kept[gone]))
            too_many -= 1
        return True

    def _of_key(self, key: DHTID, entries: dict[Any, Kept]) -> Kept:
        """All records under one key as one entry, with the best rank and age among them."""
        best = max(
            (self._ranked(entry) for entry in entries.values()),
            key=lambda entry: (entry.rank, -entry.since),
        )
        return replace(best, name=key, size=sum(entry.size for entry in entries.values()))

    def _ranked(self, entry: Kept) -> Kept:
        answered = entry.rank < Rank.ANSWERED and entry.owner in self._answered
        return replace(entry, rank=Rank.ANSWERED) if answered else entry

    def _sweep(self) -> None:
        """Drop the metadata of records that have expired."""
        live = {key: found.value for key, found in self.items()}
        for key, entries in list(self._kept.items()):
            records = live.get(key)
            self._forget(key, [name for name in entries if records is None or name not in records])

    def _forget(self, key: DHTID, names: Iterable[Any]) -> None:
        entries = self._kept.get(key, {})
        for name in names:
            gone = entries.pop(name, None)
            self._bytes -= gone.size if gone is not None else 0
        if not entries:
            self._kept.pop(key, None)

    def _provenance(self, subkey: Any, value: bytes) -> Provenance | None:
        """The provenance of an accepted value."""
        stored: Any = MSGPackSerializer.loads(value)
        return self._provenances.check(stored, subkey, time())


class NoCache(DHTLocalStorage):
    """Keeps nothing."""

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Refuse."""
        return False

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Refuse."""
        return False


def _keep_valid(validator: OwnRecords) -> Callable[[bytes, DictionaryDHTValue], bool]:
    def keep_valid(key: bytes, records: DictionaryDHTValue) -> bool:
        with records.freeze():
            for subkey, (value, expires) in list(records.items()):
                if not validator.validate(
                    DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires)
                ):
                    del records[subkey]
        return bool(records)

    return keep_valid


def _honest(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    """The records of an answer, with an expiry that follows from them."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    with found.value.freeze():
        return ValueWithExpiration(
            found.value, max(entry.expiration_time for _, entry in found.value.items())
        )


def _copy(records: DictionaryDHTValue) -> DictionaryDHTValue:
    copy = DictionaryDHTValue()
    copy.data, copy.key_to_heap = dict(records.data), dict(records.key_to_heap)
    copy.expiration_heap, copy.latest_expiration_time = (
        list(records.expiration_heap),
        records.latest_expiration_time,
    )
    return copy
