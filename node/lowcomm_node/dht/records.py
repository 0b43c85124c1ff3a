"""Publishes and looks up records through hivemind's node. Records of others are checked on
arrival.

hivemind's own ``get`` and ``store`` search each time, and each answer to such a search carries all
records under the key. We search for names alone, seldom, and ask or store at keepers in between
(keepers.py).
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from time import monotonic, time
from typing import Any, TypeVar

from lowcomm_node.dht.interface import check_size
from lowcomm_node.dht.keepers import REPLICAS, SEARCHED, Found, Keepers
from lowcomm_node.dht.keys import MAX_LIFE, Provenances, pack, unpack
from lowcomm_node.net.hivemind_client import CALL_DEADLINE, read_entry, write_entry
from lowcomm_node.system.logs import log

T = TypeVar("T")
MAX_RECORDS = 4096
SEEN_FOR = 15.0
"""Seconds for which a look that has found our record shows that others have it."""


class Records:
    """One peer's requests to the DHT.

    Without a node, such as while p2pd is restarted, nothing is found or stored.
    """

    def __init__(
        self,
        node: Callable[[], Any],
        provenances: Provenances,
        answered: Container[str] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``node``: returns hivemind's ``DHTNode``, or None; ``answered``: peers that have proved
        to be there."""
        self._node = node
        self._provenances = provenances
        self._answered = answered
        self._clock = clock
        self._keepers = Keepers(clock)
        self._seen: dict[tuple[str, str], tuple[float, bytes | None]] = {}
        """Records that somebody wants to be held by others: when a look has found them there, and
        what it has found."""

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        stored = write_entry(pack(key, value))
        known = self._keepers.known(key, self._near(key), self._node())
        took = await self._store(known, key, subkey, stored, expires) if known else [None]
        if None in took:
            self._keepers.forget(key)
            took += await self._store(await self._search(key), key, subkey, stored, expires)
        return True in took

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        answers = await self._look(key)
        subkeys = {subkey for answer in answers for subkey in answer if isinstance(subkey, str)}
        # Known peers first: a flooded storer must not displace them.
        known_first = sorted(subkeys, key=lambda subkey: subkey not in self._answered)
        found = {subkey: self._newest(answers, key, subkey) for subkey in known_first[:MAX_RECORDS]}
        return {subkey: value for subkey, value in found.items() if value is not None}

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        """See Discovery."""
        if not newest and (seen := self._seen_lately(key, subkey)):
            return seen
        found = await self._search(key)
        storers = found.keepers if found is not None else ()
        if not newest and (held := await self._held_at(storers[:1], key, subkey)):
            return held  # each answer carries the records of the whole swarm
        return await self._held_at(storers, key, subkey)

    async def _look(self, key: str) -> list[Mapping[Any, Any]]:
        """The records that we and some keepers have under a key."""
        if (node := self._node()) is None:
            return []
        asked = self._keepers.next_asked(key, self._near(key), node)
        answers = await self._find_at(asked, key)
        if not asked or None in answers:
            self._keepers.forget(key)
            found = await self._search(key, look=True)
            answers += await self._find_at(found.keepers if found is not None else (), key)
        others: list[Mapping[Any, Any]] = [answer for answer in answers if answer is not None]
        self._see(key, others)
        own = node.protocol.storage.get(_place(key))
        return [*others, dict(own.value.items())] if own is not None else others

    def _newest(self, answers: Sequence[Mapping[Any, Any]], key: str, subkey: str) -> bytes | None:
        """The newest valid value of a subkey."""
        told = (self._checked(answer, key, subkey) for answer in answers)
        held = [one for one in told if one is not None]
        return unpack(max(held)[1]) if held else None

    def _checked(
        self, answer: Mapping[Any, Any], key: str, subkey: str
    ) -> tuple[int, bytes] | None:
        """Order and stored value of a subkey in an answer, if it is valid."""
        value = read_entry(answer, subkey)
        told = self._provenances.check(value, subkey, time()) if value is not None else None
        if told is None or value is None or told.key != key:
            return None
        return told.order, value

    async def _held_at(self, storers: Sequence[Any], key: str, subkey: str) -> bytes | None:
        answers = await self._find_at(storers, key)
        return self._newest([one for one in answers if one is not None], key, subkey)

    def _see(self, key: str, answers: Iterable[Mapping[Any, Any]]) -> None:
        """Remember which wanted records others have."""
        for answer in answers:
            for wanted_key, subkey in self._seen:
                if wanted_key == key and (told := self._checked(answer, key, subkey)) is not None:
                    self._seen[key, subkey] = self._clock(), told[1]

    def _seen_lately(self, key: str, subkey: str) -> bytes | None:
        at, value = self._seen.setdefault((key, subkey), (float("-inf"), None))
        if value is None or self._clock() >= at + SEEN_FOR:
            return None
        told = self._provenances.check(value, subkey, time())
        return unpack(value) if told is not None else None

    async def _search(self, key: str, look: bool = False) -> Found | None:
        """Find the keepers of a key; None if there is no node, or it fails."""
        from lowcomm_node.net.hivemind_parts import DHTID

        # Whoever is asked for a key answers with all records under it. Nothing is stored at the
        # neighbouring number, and the same peers are the nearest to it.
        node, beside = self._node(), DHTID(_place(key) ^ 1)
        near = await self._call("find_nearest_nodes", [beside], k_nearest=SEARCHED)
        if near is None:
            return None
        answering = [
            (place, peer) for place, peer in near[beside].items() if peer not in node.blacklist
        ][:REPLICAS]
        found = Found(
            keepers=tuple(peer for place, peer in answering if place != node.node_id),
            ours=any(place == node.node_id for place, _ in answering),
            places=frozenset(near[beside]),
            node=node,
        )
        self._keepers.remember(key, found, look)
        return found

    def _near(self, key: str) -> list[Any]:
        """Places of the nearest peers that we have met."""
        if (node := self._node()) is None:
            return []
        table = node.protocol.routing_table
        return [place for place, _ in table.get_nearest_neighbors(_place(key), REPLICAS)]

    async def _store(
        self, found: Found | None, key: str, subkey: str, stored: bytes, expires: float
    ) -> list[bool | None]:
        """Store a record at its keepers: whether each took it; None: it did not answer."""
        if found is None:
            return []
        place = _place(key)
        told = list[bool | None](
            await asyncio.gather(
                *(self._store_at(peer, place, subkey, stored, expires) for peer in found.keepers)
            )
        )
        if found.ours and (node := self._node()) is not None:
            told.append(node.protocol.storage.store_subkey(place, subkey, stored, expires))
        return told

    async def _store_at(
        self, peer: Any, place: Any, subkey: str, stored: bytes, expires: float
    ) -> bool | None:
        """Store a record at one peer."""
        if (node := self._node()) is None:
            return None
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                told = await node.protocol.call_store(
                    peer, [place], [stored], [expires], subkeys=[subkey]
                )
        except Exception as error:  # hostile answers can make hivemind raise anything
            log.debug("dht.call_failed", method="call_store", error=repr(error))
            told = None
        if not told:
            node.blacklist.register_failure(peer)
            return None
        return bool(told[0])

    def proved(self, key: str) -> frozenset[str]:
        """See Discovery."""
        return self._kept(key, lambda storage, place: storage.proved(place), frozenset())

    def brought_from(self, key: str, subkey: str) -> tuple[str, ...]:
        """See Discovery."""
        return self._kept(key, lambda storage, place: storage.brought_from(place, subkey), ())

    def _kept(self, key: str, tell: Callable[[Any, Any], T], nothing: T) -> T:
        node = self._node()
        return tell(node.protocol.storage, _place(key)) if node is not None else nothing

    async def find_neighbours(self) -> None:
        """See Discovery."""
        node = self._node()
        if node is not None and self.known_peers():
            await self._call("find_nearest_nodes", [node.node_id])

    def known_peers(self) -> int:
        """See Discovery."""
        node = self._node()
        return len(node.protocol.routing_table.uid_to_peer_id) if node is not None else 0

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the DHT; None if it fails, or while there is no node."""
        node = self._node()
        if node is None:
            return None
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                return await getattr(node, method)(*arguments, **options)
        except Exception as error:  # hostile answers can make hivemind raise anything
            log.debug("dht.call_failed", method=method, error=repr(error))
            return None

    async def _find_at(self, peers: Sequence[Any], key: str) -> list[dict[Any, Any] | None]:
        """The records under a key that each of these peers keeps; None: it did not answer."""
        return list(await asyncio.gather(*(self._find_at_one(peer, key) for peer in peers)))

    async def _find_at_one(self, peer: Any, key: str) -> dict[Any, Any] | None:
        place, node = _place(key), self._node()
        if node is None:
            return None
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                answer = await node.protocol.call_find(peer, [place])
        except Exception as error:  # hostile answers can make hivemind raise anything
            log.debug("dht.call_failed", method="call_find", error=repr(error))
            answer = None
        if not answer:
            node.blacklist.register_failure(peer)
            return None
        found = answer[place][0]
        return dict(found.value.items()) if found is not None else {}


def _place(key: str) -> Any:
    from lowcomm_node.net.hivemind_parts import DHTID

    return DHTID.generate(source=key)
