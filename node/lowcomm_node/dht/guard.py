"""Hardens hivemind's DHT against other peers, and bounds what we keep for them.

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
    -> at most MAX_KEYS keys, MAX_KEY_BYTES for each, MAX_BYTES for all, and 1 / SHARE of each for
       one address. A peer that has answered us is not counted by address, and takes the place of
       the newest record of a peer that has not
- an older record over a newer one
    -> the order of the signer decides
- any place in the DHT, such as next to a key
    -> the place must be the hash of the peer id, else the peer is ignored. A peer named by the
       owner may stand anywhere, as hivemind's own programs do
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from cachetools import TTLCache

from lowcomm_node.dht.keys import MAX_LIFE, MAX_VALUE, Provenance, Provenances
from lowcomm_node.dht.records import SEARCHED, place_of_key
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import place_in
from lowcomm_node.net.control import Connection
from lowcomm_node.net.hivemind_parts import (
    DHTID,
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    RecordValidatorBase,
    ValueWithExpiration,
)
from lowcomm_node.system.quota import prefixes_of
from lowcomm_protocol.errors import Reason, What
from lowcomm_protocol.peers.shards import rank
from lowcomm_protocol.peers.view import OF_PLACE

MAX_KEYS = 1024
MAX_KEY_BYTES = 2 * 1024**2
"""Of all records under one key. An answer of more than 4 MiB can't be sent, and so nobody would
find anything."""
MAX_BYTES = 64 * 1024**2
"""Of all records that we keep for others."""
SHARE = 4
"""One address gets this fraction of each bound."""
SWEEP_EVERY = 256
"""Records stored between two sweeps of expired ones."""
MAX_SUBKEY = 256
"""Bytes. Ours are peer ids and run ids."""
CLOCK_SLACK = 60.0
"""Seconds that an expiry may exceed the signer's claim or MAX_LIFE, for clocks that differ."""
LOOK_EVERY, PLACE_SECONDS, MAX_PLACES = 0.1, 30.0, 8192
"""Least seconds between two reads of p2pd's connections, and seconds for which a result holds."""

_CALLER: ContextVar[tuple[str, str] | None] = ContextVar("caller", default=None)
"""Peer id and address of the peer whose call stores a record; None if we store it ourselves."""


class Callers:
    """The peers that store records here, and their addresses, which hivemind passes on to no
    storage."""

    def __init__(self, connections: Callable[[], Awaitable[Sequence[Connection]]]) -> None:
        self._connections = connections
        self._places: TTLCache[str, str] = TTLCache(MAX_PLACES, PLACE_SECONDS, monotonic)
        self._looked = float("-inf")
        self._looking = asyncio.Lock()

    async def enter(self, peer_id: str) -> None:
        """Note that a peer's call begins in this task."""
        if peer_id not in self._places:
            async with self._looking:
                if peer_id not in self._places:
                    await self._look()
        _CALLER.set((peer_id, prefixes_of(self._places.get(peer_id, "unknown"))[0]))

    async def _look(self) -> None:
        # Each look lists all connections. The pause bounds its cost in a flood of callers.
        await asyncio.sleep(max(0.0, self._looked + LOOK_EVERY - monotonic()))
        with suppress(LinkLost):
            places = [(one.peer_id, place_in(one.address)) for one in await self._connections()]
            # A direct connection sorts last, and so replaces a relayed one of the same peer.
            self._places.update(sorted(places, key=lambda pair: not pair[1].startswith("relay")))
        self._looked = monotonic()


class Silent(TTLCache[Any, None]):
    """Peers that hivemind avoids, in place of its ``Blacklist``: no clock makes a ban longer."""

    def register_failure(self, peer: object) -> None:
        """Note that a peer has not answered."""
        self[peer] = None

    def register_success(self, peer: object) -> None:
        """Note that a peer has answered."""
        self.pop(peer, None)


def guard(
    protocol: DHTProtocol,
    provenances: Provenances,
    named: Collection[str] = (),
    answered: Collection[str] = (),
) -> None:
    """Harden a protocol that was just created and has met no peer yet. ``named``: ids of the peers
    named by our owner; ``answered``: peers that have proved to be there."""
    call_find, update_routing_table = protocol.call_find, protocol.update_routing_table

    def is_in_place(node_id: DHTID, peer: PeerID) -> bool:
        # Others may report a named peer only at the place that it has named itself.
        name = peer.to_base58()
        return node_id == place_of_key(name) or (
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
        if known is None or not (known == place_of_key(name) or name in named):
            return
        before: Any = table.get(peer_id=peer_id)
        if before is not None and before != known and before in table:
            del table[before]  # hivemind's own programs stand elsewhere each time that they start
        await update_routing_table(known, peer_id, responded=responded)

    validator = OwnRecords(provenances)

    def keep_valid(key: bytes, records: DictionaryDHTValue) -> bool:
        with records.freeze():
            for subkey, (value, expires) in list(records.items()):
                name = MSGPackSerializer.dumps(subkey)
                if not validator.validate(DHTRecord(key, name, value, expires)):
                    del records[subkey]
        return bool(records)

    protocol.bucket_size = SEARCHED  # its table still keeps 20 peers at each distance
    hardened: Any = protocol  # with parts of other classes than it declares
    hardened.storage, hardened.cache = BoundedStorage(provenances, answered), NoCache()
    hardened.record_validator = validator
    # hivemind's own drops all records of an answer for one that is bad.
    hardened._validate_dictionary = keep_valid
    hardened.call_find, hardened.update_routing_table = find, update


class OwnRecords(RecordValidatorBase):
    """Accepts records signed by the subkey's peer, under the right key, and not for too long."""

    def __init__(self, provenances: Provenances) -> None:
        self._provenances = provenances

    def validate(self, record: DHTRecord) -> bool:
        """Check a record at the storer and at the reader. Never raises."""
        now = time()
        if len(record.value) > MAX_VALUE + 64 or len(record.subkey) > MAX_SUBKEY:
            return self._refuse(Reason.TOO_LARGE)  # before anything is unpacked
        if record.expiration_time <= now:
            return self._refuse(Reason.EXPIRED)
        try:
            subkey = MSGPackSerializer.loads(record.subkey)
            value = MSGPackSerializer.loads(record.value)
        except Exception:  # untrusted msgpack and its extension types can raise anything
            return self._refuse(Reason.MALFORMED)
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            return self._refuse(Reason.MALFORMED)
        found = self._provenances.check(value, subkey, now)
        if found is None:
            return False
        if not record.expiration_time <= min(found.expires, now + MAX_LIFE) + CLOCK_SLACK:
            return self._refuse(Reason.LIVES_TOO_LONG)
        if place_of_key(found.key).to_bytes() != record.key:
            return self._refuse(Reason.MISPLACED)
        return True

    def _refuse(self, reason: Reason) -> bool:
        self._provenances.refusals.count(What.RECORD, reason)
        return False


@dataclass(frozen=True)
class _Kept:
    """A record that we keep."""

    entry: ValueWithExpiration[bytes]
    owner: str
    """Its signer."""
    place: str
    """The address from which it came first; empty if it is our own."""
    by_owner: bool
    """Whether its own peer has stored it here, over a connection that proves its peer id."""

    @property
    def size(self) -> int:
        """Bytes of its value."""
        return len(self.entry.value)

    @property
    def source(self) -> tuple[str, bool]:
        """What shares are counted by: a connection can bring any number of records of others, and
        leaves room for those that the peers of its address store themselves."""
        return self.place, self.by_owner


class BoundedStorage:
    """Records that we keep for others: the newest of each subkey, within bounds. In place of
    hivemind's ``DHTLocalStorage``."""

    def __init__(self, provenances: Provenances, answered: Collection[str] = ()) -> None:
        self._provenances = provenances
        self._answered = answered
        self._kept: dict[DHTID, dict[Any, _Kept]] = {}
        """Records by key and subkey, oldest first. Expired ones stay until they are swept."""
        self._bytes = Counter[object]()
        """Bytes of all records (None), of a key, of a source, and of a source under a key."""
        self._stored = 0

    def get(self, key: DHTID) -> ValueWithExpiration[Any] | None:
        """The records under a key, in an object of their own: hivemind's search adds the answers of
        others to it."""
        now, records = time(), DictionaryDHTValue()
        kept = self._kept.get(key, {}).items()
        records.data = {name: it.entry for name, it in kept if it.entry.expiration_time >= now}
        if not records.data:
            return None
        latest = max(entry.expiration_time for entry in records.data.values())
        records.latest_expiration_time = latest
        return ValueWithExpiration(records, latest)

    def items(self) -> list[tuple[DHTID, ValueWithExpiration[Any]]]:
        """All records, by key."""
        return [(key, records) for key in self._kept if (records := self.get(key)) is not None]

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Store a record, as ``store_subkey``; a value without a subkey is refused."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record; returns whether it was taken."""
        self._stored += 1
        if self._stored % SWEEP_EVERY == 0:
            self._sweep()
        # Also for our own records: a run says who may join it.
        checked = self._provenance(subkey, value)
        order, owner = (checked.order, checked.owner) if checked is not None else (-1, "")
        old = self._kept.get(key, {}).get(subkey)
        if old is not None and old.entry.expiration_time < time():
            self._drop(key, subkey)
            old = None
        if old is not None:
            before = self._provenance(subkey, old.entry.value)
            known = before.order if before is not None else -1
            if (order, expiration_time) <= (known, old.entry.expiration_time):
                return False
        peer, place = _CALLER.get() or (owner, "")
        new = _Kept(
            ValueWithExpiration(value, expiration_time),
            owner,
            # A renewal keeps its origin, or others could replay a record to have it counted as
            # theirs.
            place=old.place if old is not None and place else place,
            by_owner=peer == owner or (old is not None and old.by_owner),
        )
        most = checked.most if checked is not None else None
        if not self._make_place(key, subkey, new, most) or not self._make_room(key, subkey, new):
            return False
        self._drop(key, subkey)
        self._kept.setdefault(key, {})[subkey] = new
        self._count(key, new, new.size)
        return True

    def proved(self, key: DHTID) -> frozenset[str]:
        """The signers under a key that stored their record here themselves, or have answered."""
        kept = self._kept.get(key, {}).values()
        return frozenset(it.owner for it in kept if it.by_owner or it.owner in self._answered)

    def origin(self, key: DHTID, subkey: Any) -> str:
        """The address that a record came from; empty if it is not here, or is ours."""
        kept = self._kept.get(key, {}).get(subkey)
        return kept.place if kept is not None else ""

    # bounds

    def _comes_first(self, entry: _Kept) -> bool:
        return not entry.place or entry.owner in self._answered

    def _make_place(self, key: DHTID, subkey: Any, new: _Kept, most: int | None) -> bool:
        """Whether there is a place for a record among at most ``most`` of its key."""
        kept = self._kept.get(key, {})
        if most is None or subkey in kept or len(kept) < most:
            return True
        entries, now = kept | {subkey: new}, time()
        crowds = Counter(it.place for it in entries.values())

        def claim(name: Any) -> tuple[bool, bool, int, float]:
            it = entries[name]
            return (
                self._comes_first(it),
                it.by_owner,
                -max(0, crowds[it.place] - OF_PLACE),
                -rank(it.owner, now),
            )

        gives_way = min(entries, key=claim)
        if gives_way == subkey:
            return False
        self._drop(key, gives_way)
        return True

    def _make_room(self, key: DHTID, subkey: Any, new: _Kept) -> bool:
        """Whether there is room for a record. For a peer that has answered us others give way."""
        old = self._kept.get(key, {}).get(subkey)
        growth = new.size - (old.size if old is not None else 0)
        comes_first = self._comes_first(new)
        if growth > 0 and not comes_first and not self._has_share(key, new, growth):
            return False
        while True:
            is_key_full = self._bytes[key] + growth > MAX_KEY_BYTES
            is_new_key = key not in self._kept and len(self._kept) >= MAX_KEYS
            if not (is_key_full or is_new_key or self._bytes[None] + growth > MAX_BYTES):
                return True
            gone = self._newest_stranger(key, subkey) if is_key_full else self._newest_key(key)
            if not comes_first or not gone:
                return False
            for name in gone:
                self._drop(*name)

    def _has_share(self, key: DHTID, new: _Kept, growth: int) -> bool:
        """Whether the source of a record may take up more."""
        sources = (next(iter(entries.values())).source for entries in self._kept.values())
        opened = sum(source == new.source for source in sources)
        return (
            self._bytes[key, new.source] + growth <= MAX_KEY_BYTES // SHARE
            and self._bytes[new.source] + growth <= MAX_BYTES // SHARE
            and (key in self._kept or opened < MAX_KEYS // SHARE)
        )

    def _newest_stranger(self, key: DHTID, subkey: Any) -> list[tuple[DHTID, Any]]:
        """The newest record under a key of a peer that has not answered."""
        entries = reversed(self._kept.get(key, {}).items())
        strangers = (name for name, entry in entries if not self._comes_first(entry))
        return [(key, name) for name in strangers if name != subkey][:1]

    def _newest_key(self, key: DHTID) -> list[tuple[DHTID, Any]]:
        """Records under the newest other key that has none of a peer that answered us."""
        for other, entries in reversed(self._kept.items()):
            if other != key and not any(map(self._comes_first, entries.values())):
                return [(other, name) for name in entries]
        return []

    def _count(self, key: DHTID, entry: _Kept, size: int) -> None:
        for counted in (None, key, entry.source, (key, entry.source)):
            self._bytes[counted] += size
            if not self._bytes[counted]:
                del self._bytes[counted]

    def _drop(self, key: DHTID, subkey: Any) -> None:
        entries = self._kept.get(key, {})
        if (gone := entries.pop(subkey, None)) is not None:
            self._count(key, gone, -gone.size)
            if not entries:
                del self._kept[key]

    def _sweep(self) -> None:
        """Forget the records that have expired."""
        now = time()
        for key, entries in list(self._kept.items()):
            for subkey, kept in list(entries.items()):
                if kept.entry.expiration_time < now:
                    self._drop(key, subkey)

    def _provenance(self, subkey: Any, value: bytes) -> Provenance | None:
        """The provenance of an accepted value."""
        stored: Any = MSGPackSerializer.loads(value)
        return self._provenances.check(stored, subkey, time())


class NoCache(DHTLocalStorage):
    """Keeps nothing."""

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return False

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        return False


def _honest(found: ValueWithExpiration[Any] | None) -> ValueWithExpiration[Any] | None:
    """The records of an answer, with an expiry that follows from them."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    with found.value.freeze():
        return ValueWithExpiration(
            found.value, max(entry.expiration_time for _, entry in found.value.items())
        )
