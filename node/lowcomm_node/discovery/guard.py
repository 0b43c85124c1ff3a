"""What hivemind's DHT lets strangers do, and ours does not.

Hivemind trusts the peers of a DHT. Measured on 1.1.12, each of these is one call for anybody who can dial us:

- a record under someone else's name               -> every record is checked, where it is stored and where it is read
- one bad record makes a reader drop all others    -> only the bad one is dropped
- a record in the *cache* hides all that is stored -> there is no cache
- an answer that claims to expire never ends the search for better ones -> the claim is recomputed from the records
- any number of records, of any size               -> at most MAX_KEYS keys, and MAX_KEY_BYTES for each
- an older record over a newer one                 -> what its signer says is newer holds
- any place in the DHT, such as next to a key      -> the place is the hash of the peer id, else a peer is ignored;
                                                      one that the owner has named may stand anywhere, as hivemind's
                                                      own programs do
"""

from collections.abc import Callable, Collection
from time import time
from typing import Any

from lowcomm_node.discovery.hivemind_parts import (
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
from lowcomm_node.discovery.interface import MAX_VALUE
from lowcomm_node.discovery.keys import MAX_LIFE, Provenances
from lowcomm_protocol.refusals import Reason

MAX_KEYS = 1024
MAX_KEY_BYTES = 2 * 1024**2
"""Of all records under one key: an answer of more than 4 MiB can't be sent, and nobody would find anything."""
MAX_SUBKEY = 256
"""Bytes; ours are peer ids and run ids."""
CLOCK_SLACK = 60.0
"""Seconds that a record's expiry may lie beyond what its signer or MAX_LIFE allow, for clocks that differ."""


def place_of(peer_id: str) -> DHTID:
    """Where in the DHT a peer stands; Python's ``random`` would put two processes with one seed at the same place."""
    return DHTID.generate(source=peer_id)


def guard(protocol: DHTProtocol, provenances: Provenances, named: Collection[str] = ()) -> None:
    """Make a protocol that was just created, and has met nobody yet, safe to use among strangers.

    ``named``: ids of the peers that our owner has named.
    """
    call_find, update_routing_table = protocol.call_find, protocol.update_routing_table

    def is_in_place(node_id: DHTID, peer: PeerID) -> bool:
        # What others say of where a named peer stands must be what that one has told us.
        name = peer.to_base58()
        return node_id == place_of(name) or (name in named and protocol.routing_table.get(peer_id=peer) == node_id)

    async def find(peer: PeerID, keys: Any) -> Any:
        answer = await call_find(peer, keys)
        return answer and {
            key: (_honest(value), {place: one for place, one in near.items() if is_in_place(place, one)})
            for key, (value, near) in answer.items()
        }

    async def update(node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        known = node_id if node_id is not None else protocol.routing_table.get(peer_id=peer_id)
        name, table = peer_id.to_base58(), protocol.routing_table
        if known is None or not (known == place_of(name) or name in named):
            return
        before = table.get(peer_id=peer_id)
        if before is not None and before != known and before in table:
            del table[before]  # hivemind's own programs stand elsewhere each time that they start
        await update_routing_table(known, peer_id, responded=responded)

    protocol.storage, protocol.cache = BoundedStorage(provenances), NoCache()
    protocol.record_validator = OwnRecords(provenances)
    protocol._validate_dictionary = _keep_valid(protocol.record_validator)
    protocol.call_find, protocol.update_routing_table = find, update


class OwnRecords(RecordValidatorBase):
    """Lets in what is signed by whom the subkey names, under the right key, and not for too long."""

    def __init__(self, provenances: Provenances) -> None:
        self._provenances = provenances

    def validate(self, record: DHTRecord) -> bool:
        """Called at the storer and at the reader; never raises."""
        now = time()
        if len(record.value) > MAX_VALUE + 64 or len(record.subkey) > MAX_SUBKEY:
            return self._refuse(Reason.TOO_LARGE)  # before anything is unpacked
        if not now < record.expiration_time <= now + MAX_LIFE + CLOCK_SLACK:
            return self._refuse(Reason.EXPIRED if record.expiration_time <= now else Reason.LIVES_TOO_LONG)
        try:
            subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        except Exception:  # msgpack of a stranger, and its extension types: anything can be raised
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
    """Records that we keep for others: the newest of each subkey, within bounds; what is new is refused when full."""

    def __init__(self, provenances: Provenances) -> None:
        super().__init__()
        self._provenances = provenances

    def get(self, key: DHTID) -> ValueWithExpiration[Any] | None:
        """A copy, because hivemind's search adds what others answer to the very object that it gets here."""
        found = super().get(key)
        return found and ValueWithExpiration(_copy(found.value), found.expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Whether it was taken."""
        order = self._order(subkey, value)  # also of what we publish ourselves: a run tells who may join it
        found = super().get(key)
        if found is None:
            return len(self) < MAX_KEYS and super().store_subkey(key, subkey, value, expiration_time)
        records: DictionaryDHTValue = found.value
        known = records.get(subkey)
        if known is not None:
            kept = self._order(subkey, known.value)
            if order < kept or (order == kept and expiration_time <= known.expiration_time):
                return False
        others = sum(len(entry.value) for _, entry in records.items()) - (len(known.value) if known is not None else 0)
        if others + len(value) > MAX_KEY_BYTES:
            return False
        if known is not None and known.expiration_time >= expiration_time:
            # A newer one that expires earlier, such as a goodbye: hivemind would keep the older one.
            del records[subkey]
        if expiration_time > records.latest_expiration_time:
            TimedStorage.store(self, key, records, expiration_time)
        return records.store(subkey, value, expiration_time)

    def _order(self, subkey: Any, value: bytes) -> int:
        """What the signer of a value that was let in says of its age."""
        found = self._provenances.check(MSGPackSerializer.loads(value), subkey, time())
        return found.order if found is not None else -1


class NoCache(DHTLocalStorage):
    """Keeps nothing."""

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Refuse."""
        return False

    store_subkey = store


def _keep_valid(validator: OwnRecords) -> Callable[[bytes, DictionaryDHTValue], bool]:
    def keep_valid(key: bytes, records: DictionaryDHTValue) -> bool:
        with records.freeze():
            for subkey, (value, expires) in list(records.items()):
                if not validator.validate(DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires)):
                    del records[subkey]
        return bool(records)

    return keep_valid


def _honest(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    """The records of an answer, with an expiry that follows from them."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    with found.value.freeze():
        return ValueWithExpiration(found.value, max(entry.expiration_time for _, entry in found.value.items()))


def _copy(records: DictionaryDHTValue) -> DictionaryDHTValue:
    copy = DictionaryDHTValue()
    copy.data, copy.key_to_heap = dict(records.data), dict(records.key_to_heap)
    copy.expiration_heap, copy.latest_expiration_time = list(records.expiration_heap), records.latest_expiration_time
    return copy
