"""The DHT of hivemind, in our own event loop.

Only its Kademlia (``DHTNode``) and its client of p2pd (``P2P``) are used, never its processes, averaging or optimizers.

    start              p2pd -> client -> DHTNode, guarded -> dial and ping the entry points -> look for neighbours
    check_connection   p2pd died: all of the above again; else ping the entry points, and peers' if those are dead
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from lowcomm_node.discovery.client import (
    CALL_DEADLINE,
    CLOSE_DEADLINE,
    attach,
    detach,
    dial,
    load_hivemind,
    ping,
    wait_routing,
)
from lowcomm_node.discovery.interface import check_size
from lowcomm_node.discovery.keys import MAX_LIFE, Provenances, pack, unpack
from lowcomm_node.discovery.multiaddress import EntryPoint, parse_announced, parse_entry_point, reach
from lowcomm_node.discovery.p2pd import START_DEADLINE, P2pDaemon
from lowcomm_node.discovery.twin import refuse_twin
from lowcomm_node.errors import ConfigError, NodeError, NoPeers, Unhealthy
from lowcomm_node.logs import log
from lowcomm_protocol.identity import Identity

MAX_ENTRY_POINTS = 32
MAX_RECORDS = 4096
MAX_CLOCK_OFFSET = 3.0
"""Seconds; records live for seconds to minutes, and would seem dead or not yet issued."""
_BAN = 10.0
"""Seconds that hivemind keeps away from a silent peer; they do not grow, or one that returns is ignored for hours."""


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
        start_deadline: float = START_DEADLINE,
    ) -> None:
        """Raises ConfigError that names a malformed address."""
        self.peer_id = identity.peer_id
        self._entry_points = [parse_entry_point(text) for text in initial_peers]
        self._given = len(self._entry_points)
        self._announce = tuple(parse_announced(text, self.peer_id) for text in announce)
        self._key_file, self._listen = key_file, tuple(listen)
        self._require_peers, self._start_deadline = require_peers, start_deadline
        self._provenances = Provenances()
        self._daemon: P2pDaemon | None = None
        self._node: Any = None
        self._p2p: Any = None
        self._visible: tuple[str, ...] = ()

    async def start(self) -> None:
        """See Discovery. Also raises RetryLater if our identity is in use, Unhealthy if our clock is off."""
        try:
            others = [entry for entry in self._entry_points if entry.peer_id != self.peer_id]
            if others:
                await refuse_twin(self.peer_id, others)
            await self._open()
            offsets = await self._enter(self._entry_points)
            if self._entry_points and not offsets and self._require_peers:
                tried = ", ".join(str(entry) for entry in self._entry_points)
                raise NoPeers(f"No peer answers at {tried}: check the address, and that the bootstrap server runs.")
            _check_clock(offsets)
        except BaseException:
            await self.close()
            raise

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        expires = time() + min(lifetime, MAX_LIFE)
        return bool(await self._call("store", key, pack(key, value), expiration_time=expires, subkey=subkey))

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        found = await self._call("get", key, latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now, records = time(), dict[str, bytes]()
        for subkey, entry in list(entries.items())[:MAX_RECORDS]:
            value = entry.value
            if not isinstance(subkey, str) or not isinstance(value, bytes):
                continue
            belongs = self._provenances.check(value, subkey, now)
            if belongs is not None and belongs.key == key:
                records[subkey] = unpack(value)
        return records

    def addresses(self) -> tuple[str, ...]:
        """See Discovery."""
        return tuple(f"{address}/p2p/{self.peer_id}" for address in self._announce or self._visible)

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """See Discovery."""
        for text in addresses:
            with suppress(ConfigError):
                entry = parse_entry_point(text)
                if entry.peer_id != self.peer_id and entry not in self._entry_points:
                    self._entry_points.append(entry)
        # The owner's addresses are always kept, of the others the newest.
        surplus = len(self._entry_points) - MAX_ENTRY_POINTS
        if surplus > 0:
            del self._entry_points[self._given : max(self._given, self._given + surplus)]

    async def check_connection(self) -> int:
        """See Discovery. Never raises: whatever is wrong is tried again at the next call."""
        try:
            if self._daemon is None or not self._daemon.running:
                log.warning("dht.lost", reason="p2pd ended; it is started again")
                await self.close()
                await self._open()
            offsets = await self._enter(self._entry_points[: self._given])
            if not offsets and not self._known_peers():
                offsets = await self._enter(self._entry_points[self._given :])
            _check_clock(offsets)
            await self._look_at_ourselves()
        except (NodeError, OSError) as error:
            log.warning("dht.trouble", reason=str(error))
        return self._known_peers()

    async def close(self) -> None:
        """See Discovery."""
        node, p2p, daemon = self._node, self._p2p, self._daemon
        self._node = self._p2p = self._daemon = None
        if node is not None:
            with suppress(Exception):  # it waits for p2pd, which may be dead
                async with asyncio.timeout(CLOSE_DEADLINE):
                    await node.shutdown()
        if p2p is not None:
            await detach(p2p)
        if daemon is not None:
            await daemon.stop()

    async def _open(self) -> None:
        self._daemon = P2pDaemon(self._key_file, self._listen, self._announce, self._start_deadline)
        try:
            await asyncio.gather(self._daemon.start(), load_hivemind())
            self._p2p = await attach(self._daemon)
            self._node = await self._make_node()
            await self._look_at_ourselves()
        except BaseException:
            await self.close()
            raise

    async def _make_node(self) -> Any:
        from hivemind.dht.node import DHTNode

        from lowcomm_node.discovery.guard import guard, place_of

        try:
            async with asyncio.timeout(CALL_DEADLINE):
                node = await DHTNode.create(
                    p2p=self._p2p,
                    node_id=place_of(self.peer_id),
                    cache_locally=False,
                    cache_nearest=0,
                    blacklist_time=_BAN,
                    backoff_rate=1.0,
                )
        except TimeoutError:
            raise NodeError("p2pd started, but does not answer: is this machine overloaded? Try again.") from None
        guard(node.protocol, self._provenances)
        return node

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the DHT; None if it fails, or while p2pd is started again."""
        if self._node is None:
            return None
        try:
            async with asyncio.timeout(CALL_DEADLINE):
                return await getattr(self._node, method)(*arguments, **options)
        except Exception as error:  # whatever the answers of strangers make hivemind raise
            log.debug("dht.call_failed", method=method, error=repr(error))
            return None

    async def _look_at_ourselves(self) -> None:
        """Learn at which addresses we can be reached; they change with networks and NATs."""
        async with asyncio.timeout(CALL_DEADLINE):
            _, found = await self._p2p._client.identify()
        dials = []
        for address in found:
            with suppress(ConfigError, ValueError):  # relayed ones, and those that no other node can use
                dials.append(parse_entry_point(f"{address}/p2p/{self.peer_id}").dial)
        self._visible = tuple(sorted(dials, key=lambda text: -reach(text)))

    def _known_peers(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id) if self._node is not None else 0

    async def _enter(self, entries: Sequence[EntryPoint]) -> list[float]:
        """Dial and ping peers, then look for our neighbours; by how many seconds the clocks of those are ahead."""
        alone = not self._known_peers()
        answers = await asyncio.gather(*(self._knock(entry) for entry in entries))
        offsets = [offset for offset in answers if offset is not None]
        if offsets:
            if alone:
                await wait_routing(self._p2p)
            await self._call("find_nearest_nodes", [self._node.node_id])
        return offsets

    async def _knock(self, entry: EntryPoint) -> float | None:
        if entry.peer_id == self.peer_id or not await dial(self._p2p, entry.peer_id, entry):
            return None
        return await ping(self._node, entry.peer_id)


def _check_clock(offsets: Sequence[float]) -> None:
    """Raise Unhealthy if our clock differs from everybody's."""
    nearest = min(offsets, key=abs, default=0.0)
    if abs(nearest) > MAX_CLOCK_OFFSET:
        where = "behind" if nearest > 0 else "ahead of"
        raise Unhealthy(
            f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {MAX_CLOCK_OFFSET:.0f} s are "
            "allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap server."
        )
