"""Publishes and looks up records through hivemind's node. Records of others are checked on
arrival.

hivemind's own ``get`` and ``store`` search each time, and each answer carries all records under the
key. We search for names alone, seldom, and otherwise ask or store at the keepers found last:

    search ──► look: all keepers ──► look: two ──► look: two others ──► ... ──► LOOKS-th: search
      ▲                                   │
      └── one is silent, or we have met a peer that is nearer ──┘
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import sample
from time import monotonic, time
from typing import Any

from cachetools import LRUCache

from lowcomm_node.dht.keys import MAX_LIFE, Provenances, check_size, pack, unpack
from lowcomm_node.net.hivemind_client import CALL_DEADLINE, read_entry, write_entry
from lowcomm_node.system.logs import log

MAX_RECORDS = 4096
SEEN_FOR = 15.0
"""Seconds for which a look that has found our record shows that others have it."""
REPLICAS = 5
"""Peers that keep a record; hivemind's own default."""
SEARCHED = 2 * REPLICAS
"""Nearest peers that a search asks, and that an answer names; half of them may be gone. hivemind
takes 20, so that in a swarm of up to 20 everybody asks and names everybody."""
ASKED = 2
"""Keepers that a look between two searches asks, others each time. A look at a shard asks no
more after a search: it is rare, so most of them search."""
LOOKS = 8
"""Looks from one search to the next."""
FOUND_FOR = 120.0
"""Longest time in seconds from one search to the next."""
MAX_SEARCHED_KEYS = 64


@dataclass
class _Found:
    """What the last search for a key has found."""

    keepers: tuple[Any, ...]
    """Other peers that keep the records, nearest first."""
    ours: bool
    """Whether we keep them, too."""
    places: frozenset[Any]
    """Places of all peers found, ours included."""
    node: Any
    """The DHT node that has searched: after a restart of p2pd a new node knows nobody yet."""
    at: float
    looks: int
    """Looks since then."""


class DhtRecords:
    """One peer's requests to the DHT. Without a node, such as while p2pd is restarted, nothing is
    found or stored."""

    def __init__(
        self,
        provenances: Provenances,
        answered: Container[str] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``answered``: peers that have proved to be there."""
        self.node: Any = None
        """hivemind's ``DHTNode``."""
        self._provenances = provenances
        self._answered = answered
        self._clock = clock
        self._searched: LRUCache[str, _Found] = LRUCache(MAX_SEARCHED_KEYS)
        self._seen: dict[tuple[str, str], tuple[float, bytes | None]] = {}
        """Our records that others shall keep: when a look last found each there, and its value."""

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """Store a record for ``lifetime`` seconds. Returns whether some peer took it. Raises
        RecordError if it is too large."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        stored = write_entry(pack(key, value))
        found = self._last_search(key)
        took = await self._store(found, key, subkey, stored, expires) if found else [None]
        if None in took:
            self._searched.pop(key, None)
            took += await self._store(await self._search(key), key, subkey, stored, expires)
        return True in took

    async def lookup(self, key: str, few: bool = False) -> dict[str, bytes]:
        """The newest valid record of every subkey. ``few``: ask two keepers after a search, too."""
        answers = await self._look(key, few)
        subkeys = {subkey for answer in answers for subkey in answer if isinstance(subkey, str)}
        # Known peers first: a flooded storer must not displace them.
        known_first = sorted(subkeys, key=lambda subkey: subkey not in self._answered)
        found = {subkey: self._newest(answers, key, subkey) for subkey in known_first[:MAX_RECORDS]}
        return {subkey: value for subkey, value in found.items() if value is not None}

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        """The newest valid record of a subkey that others keep, to see whether ours has arrived.
        ``newest``: False where any version will do, which costs a fifth."""
        if not newest:
            at, seen = self._seen.setdefault((key, subkey), (float("-inf"), None))
            is_valid = seen is not None and self._provenances.check(seen, subkey, time())
            if seen is not None and is_valid and self._clock() < at + SEEN_FOR:
                return unpack(seen)
        found = await self._search(key)
        storers = found.keepers if found is not None else ()
        # Each answer carries the records of the whole swarm, so one may do.
        for asked in [storers] if newest else [storers[:1], storers[1:]]:
            answers = await asyncio.gather(*(self._find_at(peer, key) for peer in asked))
            held = self._newest([one for one in answers if one is not None], key, subkey)
            if held is not None:
                return held
        return None

    async def find_neighbours(self) -> None:
        """Learn other DHT peers, and make us known to them, once a peer has answered."""
        if self.known_peers():
            await _answer(self.node.find_nearest_nodes([self.node.node_id], k_nearest=SEARCHED))

    def known_peers(self) -> int:
        """The number of known DHT peers."""
        if self.node is None:
            return 0
        return len(self.node.protocol.routing_table.uid_to_peer_id)

    # looks

    async def _look(self, key: str, few: bool) -> list[Mapping[Any, Any]]:
        """The records under a key that we and some keepers have."""
        if self.node is None:
            return []
        asked: Sequence[Any] = ()
        found = self._last_search(key)
        if found is not None and found.looks < LOOKS:
            first, count = (found.looks - 1) * ASKED, len(found.keepers)
            found.looks += 1
            asked = [found.keepers[(first + one) % count] for one in range(min(ASKED, count))]
        answers = await asyncio.gather(*(self._find_at(peer, key) for peer in asked))
        if not asked or None in answers:
            self._searched.pop(key, None)
            found = await self._search(key, looks=1)
            keepers = found.keepers if found is not None else ()
            if few:
                keepers = sample(keepers, min(ASKED, len(keepers)))
            answers += await asyncio.gather(*(self._find_at(peer, key) for peer in keepers))
        others: list[Mapping[Any, Any]] = [answer for answer in answers if answer is not None]
        self._note_seen(key, others)
        own = self.node.protocol.storage.get(place_of_key(key)) if self.node is not None else None
        return [*others, dict(own.value.items())] if own is not None else others

    def _newest(self, answers: Sequence[Mapping[Any, Any]], key: str, subkey: str) -> bytes | None:
        """The newest valid value of a subkey."""
        held = filter(None, (self._checked(answer, key, subkey) for answer in answers))
        _, newest = max(held, default=(0, None))
        return unpack(newest) if newest is not None else None

    def _checked(
        self, answer: Mapping[Any, Any], key: str, subkey: str
    ) -> tuple[int, bytes] | None:
        """Order and stored value of a subkey in an answer, if it is valid."""
        value = read_entry(answer, subkey)
        found = self._provenances.check(value, subkey, time()) if value is not None else None
        if found is None or value is None or found.key != key:
            return None
        return found.order, value

    def _note_seen(self, key: str, answers: Iterable[Mapping[Any, Any]]) -> None:
        for answer in answers:
            for wanted, subkey in self._seen:
                if wanted == key and (checked := self._checked(answer, key, subkey)) is not None:
                    self._seen[key, subkey] = self._clock(), checked[1]

    # searches

    def _last_search(self, key: str) -> _Found | None:
        """What the last search has found; None if a new search is due."""
        found = self._searched.get(key)
        if found is None or found.node is not self.node:
            return None
        nearest = self.node.protocol.routing_table.get_nearest_neighbors(
            place_of_key(key), REPLICAS
        )
        is_old = self._clock() >= found.at + FOUND_FOR
        return None if is_old or any(place not in found.places for place, _ in nearest) else found

    async def _search(self, key: str, looks: int = LOOKS) -> _Found | None:
        """Find the keepers of a key; None if there is no node, or the search fails. ``looks``: 1 if
        a look of all keepers follows."""
        # A peer that is asked for a key answers with all records under it. Nothing is stored at the
        # neighbouring number, and the same peers are the nearest to it.
        from lowcomm_node.net.hivemind_parts import DHTID

        node, place = self.node, DHTID(place_of_key(key) ^ 1)
        if node is None:
            return None
        answer = await _answer(node.find_nearest_nodes([place], k_nearest=SEARCHED))
        if answer is None:
            return None
        near: dict[Any, Any] = answer[place]
        before = self._searched.pop(key, None)
        known = ((place, peer) for place, peer in near.items() if peer not in node.blacklist)
        answering = list(islice(known, REPLICAS))
        found = _Found(
            keepers=tuple(peer for place, peer in answering if place != node.node_id),
            ours=any(place == node.node_id for place, _ in answering),
            places=frozenset(near),
            node=node,
            at=self._clock(),
            looks=min(looks, before.looks) if before is not None else looks,
        )
        if found.keepers:
            self._searched[key] = found
        return found

    # calls to one peer

    async def _store(
        self, found: _Found | None, key: str, subkey: str, stored: bytes, expires: float
    ) -> list[bool | None]:
        """Store a record at its keepers: whether each took it; None: it did not answer."""
        if found is None:
            return []
        place, options = place_of_key(key), {"subkeys": [subkey]}
        record = [place], [stored], [expires]
        calls = (self._call("call_store", peer, *record, **options) for peer in found.keepers)
        answers = await asyncio.gather(*calls)
        took = [bool(answer[0]) if answer else None for answer in answers]
        if found.ours and self.node is not None:
            storage = self.node.protocol.storage
            took.append(storage.store_subkey(place, subkey, stored, expires))
        return took

    async def _find_at(self, peer: Any, key: str) -> dict[Any, Any] | None:
        """The records under a key that a peer keeps; None: it did not answer."""
        place = place_of_key(key)
        answer = await self._call("call_find", peer, [place])
        if not answer:
            return None
        found = answer[place][0]
        return dict(found.value.items()) if found is not None else {}

    async def _call(self, method: str, peer: Any, *arguments: Any, **options: Any) -> Any:
        """Call one peer. Without an answer it is avoided for a while."""
        node = self.node
        if node is None:
            return None
        answer = await _answer(getattr(node.protocol, method)(peer, *arguments, **options))
        if not answer:
            node.blacklist.register_failure(peer)
        return answer


async def _answer(call: Any) -> Any:
    """The answer to a call (a coroutine) of hivemind's; None if it failed."""
    try:
        async with asyncio.timeout(CALL_DEADLINE):
            return await call
    except Exception as error:  # hostile answers can make hivemind raise anything
        log.debug("dht.call_failed", method=call.__name__, error=repr(error))
        return None


def place_of_key(key: str) -> Any:
    """The place of a key, or of a peer id, in the DHT.

    Python's ``random``, as hivemind has it, would put two processes with one seed at one place.
    """
    from lowcomm_node.net.hivemind_parts import DHTID

    return DHTID.generate(source=key)
