"""The DHT of hivemind, in our own event loop.

Only its Kademlia (``DHTNode``) and its client of p2pd (``P2P``) are used, never its processes, averaging or optimizers.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from lowcomm_node.discovery.interface import MAX_VALUE
from lowcomm_node.discovery.keys import MAX_LIFE, key_of, pack, unpack
from lowcomm_node.discovery.memory import check_size
from lowcomm_node.discovery.multiaddress import EntryPoint, parse_entry_point
from lowcomm_node.discovery.p2pd import P2pDaemon
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_protocol.identity import Identity

CALL_DEADLINE = 15.0
DIAL_DEADLINE = 5.0
MAX_ENTRY_POINTS = 32
MAX_RECORDS = 4096


class HivemindDiscovery:
    """A peer of the DHT."""

    def __init__(
        self,
        *,
        identity: Identity,
        key_file: Path,
        listen: Sequence[str],
        initial_peers: Sequence[str] = (),
        announce: Sequence[str] = (),
        require_peers: bool = True,
    ) -> None:
        self.peer_id = identity.peer_id
        self._entry_points = [parse_entry_point(text) for text in initial_peers]
        self._given = len(self._entry_points)
        self._announce, self._require_peers = tuple(announce), require_peers
        self._daemon = P2pDaemon(key_file, listen)
        self._node: Any = None
        self._p2p: Any = None
        self._visible: tuple[str, ...] = ()

    async def start(self) -> None:
        """See Discovery."""
        silence_hivemind()
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        await self._daemon.start()
        prefix = f"/unix{self._daemon.control.parent}/"
        client = type("OwnP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": prefix})
        self._p2p = await client.replicate(Multiaddr(f"/unix{self._daemon.control}"))
        # Python's random would give two processes with the same seed the same id.
        node_id = DHTID.generate(source=self.peer_id)
        self._node = await DHTNode.create(
            p2p=self._p2p, node_id=node_id, record_validator=make_validator(), cache_locally=False, cache_nearest=0
        )
        self._visible = tuple(f"{address}/p2p/{self.peer_id}" for address in self._p2p._visible_maddrs)
        if self._entry_points and not await self._enter(self._entry_points) and self._require_peers:
            tried = ", ".join(str(entry) for entry in self._entry_points)
            raise NoPeers(f"No peer answers at {tried}: check the address, and that the bootstrap server runs.")

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                return bool(await self._node.store(key, pack(key, value), expiration_time=expires, subkey=subkey))
        except TimeoutError:
            return False

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                found = await self._node.get(key, latest=True)
        except TimeoutError:
            return {}
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now, records = time(), dict[str, bytes]()
        for subkey, entry in list(entries.items())[:MAX_RECORDS]:
            value = entry.value
            if isinstance(subkey, str) and isinstance(value, bytes) and key_of(value, subkey, now) == key:
                records[subkey] = unpack(value)
        return records

    def addresses(self) -> tuple[str, ...]:
        """See Discovery."""
        return tuple(f"{address}/p2p/{self.peer_id}" for address in self._announce) or self._visible

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """See Discovery."""
        for text in addresses:
            try:
                entry = parse_entry_point(text)
            except ConfigError:
                continue
            if entry.peer_id != self.peer_id and entry not in self._entry_points:
                self._entry_points.append(entry)
        # The owner's addresses are always kept, of the others the newest.
        surplus = len(self._entry_points) - MAX_ENTRY_POINTS
        if surplus > 0:
            del self._entry_points[self._given : self._given + surplus]

    async def check_connection(self) -> int:
        """See Discovery."""
        given = self._entry_points[: self._given]
        answered = await self._enter(given)
        if not answered and not self._known_peers():
            await self._enter(self._entry_points[self._given :])
        return self._known_peers()

    async def close(self) -> None:
        """See Discovery."""
        if self._node is not None:
            await self._node.shutdown()
        if self._p2p is not None:
            await self._p2p.shutdown()
        await self._daemon.stop()

    def _known_peers(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def _enter(self, entries: Sequence[EntryPoint]) -> int:
        """Dial and ping peers, so that each side takes the other into its routing table; how many answered."""
        answers = await asyncio.gather(*(self._ping(entry) for entry in entries))
        if any(answers):
            try:
                async with asyncio.timeout(CALL_DEADLINE):
                    await self._node.find_nearest_nodes([self._node.node_id])
            except TimeoutError:
                pass
        return sum(answers)

    async def _ping(self, entry: EntryPoint) -> bool:
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
        from hivemind.utils.multiaddr import Multiaddr

        peer = PeerID.from_base58(entry.peer_id)
        try:
            async with asyncio.timeout(DIAL_DEADLINE):
                await self._p2p._client.connect(peer, [Multiaddr(entry.dial)])
                return await self._node.protocol.call_ping(peer) is not None
        except (ControlFailure, TimeoutError, OSError):
            return False


def make_validator() -> Any:
    """A record validator of hivemind that lets only our own kinds of records in, at the storer and at the reader."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.utils import MSGPackSerializer

    class OwnRecords(RecordValidatorBase):
        """Signed by whom the subkey names, stored under the right key, not for too long."""

        def validate(self, record: DHTRecord) -> bool:
            now = time()
            if len(record.value) > MAX_VALUE + 64 or not now < record.expiration_time <= now + MAX_LIFE + 60:
                return False
            try:
                subkey = MSGPackSerializer.loads(record.subkey)
                value = MSGPackSerializer.loads(record.value)
            except Exception:
                return False
            if not isinstance(subkey, str) or not isinstance(value, bytes):
                return False
            key = key_of(value, subkey, now)
            return key is not None and DHTID.generate(source=key).to_bytes() == record.key

    return OwnRecords()


def silence_hivemind() -> None:
    """hivemind logs on its own and for developers; what matters to an owner we say ourselves."""
    import os

    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    os.environ.setdefault("HIVEMIND_COLORS", "0")
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
