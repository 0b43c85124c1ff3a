"""Publishes and looks up records through hivemind's node. Records of others are checked on
arrival."""

import asyncio
from collections.abc import Callable, Container, Sequence
from time import time
from typing import Any, TypeVar

from lowcomm_node.dht.interface import check_size
from lowcomm_node.dht.keys import MAX_LIFE, Provenances, pack, unpack
from lowcomm_node.libp2p.hivemind_client import CALL_DEADLINE, read_entry
from lowcomm_node.system.logs import log

T = TypeVar("T")
MAX_RECORDS = 4096
REPLICAS = 5
"""Peers that keep a record; hivemind's own default."""
SEARCHED = 2 * REPLICAS
"""Nearest peers that a search asks, and that an answer names; half of them may be gone. hivemind
takes 20, so that in a swarm of up to 20 everybody asks and names everybody."""


class Records:
    """One peer's requests to the DHT.

    Without a node, such as while p2pd is restarted, nothing is found or stored.
    """

    def __init__(
        self, node: Callable[[], Any], provenances: Provenances, answered: Container[str] = ()
    ) -> None:
        """``node``: returns hivemind's ``DHTNode``, or None; ``answered``: peers that have proved
        to be there."""
        self._node = node
        self._provenances = provenances
        self._answered = answered

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        return bool(
            await self._call("store", key, pack(key, value), expiration_time=expires, subkey=subkey)
        )

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        found = await self._call("get", key, latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now, records = time(), dict[str, bytes]()
        # Known peers first: a flooded storer must not displace them.
        known_first = sorted(entries.items(), key=lambda item: item[0] not in self._answered)
        for subkey, entry in known_first[:MAX_RECORDS]:
            value = entry.value
            if not isinstance(subkey, str) or not isinstance(value, bytes):
                continue
            belongs = self._provenances.check(value, subkey, now)
            if belongs is not None and belongs.key == key:
                records[subkey] = unpack(value)
        return records

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        """See Discovery."""
        from lowcomm_node.libp2p.hivemind_parts import DHTID

        place = DHTID.generate(source=key)
        options = {"k_nearest": REPLICAS, "exclude_self": True}
        near = await self._call("find_nearest_nodes", [place], **options) or {}
        storers = list(near.get(place, {}).values())
        if not newest and (held := await self._newest_at(storers[:1], place, key, subkey)):
            return held  # each answer carries the records of the whole swarm
        return await self._newest_at(storers, place, key, subkey)

    async def _newest_at(
        self, storers: Sequence[Any], place: Any, key: str, subkey: str
    ) -> bytes | None:
        answers = await asyncio.gather(*(self._find_at(peer, place) for peer in storers))
        held = [value for entries in answers if (value := read_entry(entries, subkey)) is not None]
        checked = [
            (found, value)
            for value in held
            if (found := self._provenances.check(value, subkey, time()))
        ]
        right = [(found.order, value) for found, value in checked if found.key == key]
        return unpack(max(right)[1]) if right else None

    def proved(self, key: str) -> frozenset[str]:
        """See Discovery."""
        return self._kept(key, lambda storage, place: storage.proved(place), frozenset())

    def brought_from(self, key: str, subkey: str) -> tuple[str, ...]:
        """See Discovery."""
        return self._kept(key, lambda storage, place: storage.brought_from(place, subkey), ())

    def _kept(self, key: str, tell: Callable[[Any, Any], T], nothing: T) -> T:
        from lowcomm_node.libp2p.hivemind_parts import DHTID

        node = self._node()
        return (
            tell(node.protocol.storage, DHTID.generate(source=key)) if node is not None else nothing
        )

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

    async def _find_at(self, peer: Any, place: Any) -> dict[Any, Any]:
        """The records under a key that one peer keeps."""
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                answer = await self._node().protocol.call_find(peer, [place])
        except Exception as error:  # hostile answers can make hivemind raise anything
            log.debug("dht.call_failed", method="call_find", error=repr(error))
            return {}
        found = answer[place][0] if answer else None
        return dict(found.value.items()) if found is not None else {}
