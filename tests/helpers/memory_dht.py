"""The twin of the DHT without a network, for tests: same records, same checks."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lowcomm_node.dht.hivemind import MAX_CLOCK_OFFSET, Knock
from lowcomm_node.dht.keys import MAX_LIFE, Provenance, Provenances, check_size, pack, unpack
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.control import OpenStream, TakeStream
from lowcomm_node.net.targets import Targets


@dataclass
class MemoryNetwork:
    """What all twins of one test share."""

    clock: Callable[[], float]
    records: dict[tuple[str, str], tuple[bytes, float]] = field(default_factory=dict)
    """(key, subkey) -> stored value and Unix time of its expiry."""
    peers: set[str] = field(default_factory=set)
    served: dict[tuple[str, str], TakeStream] = field(default_factory=dict)
    """(peer id, protocol) -> who takes its streams."""
    address: str = "/ip4/127.0.0.1/tcp/4001"
    """Where connections seem to lead."""


class MemoryDiscovery:
    """One peer of a MemoryNetwork."""

    def __init__(self, peer_id: str, network: MemoryNetwork) -> None:
        self.peer_id = peer_id
        self._network = network
        self.targets = Targets(local=True)
        self.max_clock_offset = MAX_CLOCK_OFFSET
        self.opened: list[socket.socket] = []
        """Its streams to others, open and closed."""

    async def start(self) -> None:
        self._network.peers.add(self.peer_id)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        check_size(value)
        now, stored = self._network.clock(), pack(key, value)
        expires = now + min(lifetime, MAX_LIFE)
        found, known = _provenance(stored, subkey, now), self._network.records.get((key, subkey))
        if found is None or found.key != key:
            return False
        if known is not None and known[1] > now:
            # As guard.py has it: what its signer says is newer holds; if that is the same, what
            # lives longer.
            kept = _provenance(known[0], subkey, now)
            if kept is not None and (kept.order, known[1]) >= (found.order, expires):
                return False
        self._network.records[key, subkey] = (stored, expires)
        return True

    async def lookup(self, key: str, few: bool = False) -> dict[str, bytes]:
        now = self._network.clock()
        return {
            subkey: unpack(stored)
            for (its_key, subkey), (stored, expires) in self._network.records.items()
            if its_key == key
            and expires > now
            and (found := _provenance(stored, subkey, now)) is not None
            and found.key == key
        }

    def answered(self, peer_id: str) -> None:
        pass

    def proved(self, key: str) -> frozenset[str]:
        subkeys = {subkey for its_key, subkey in self._network.records if its_key == key}
        return frozenset(subkeys) & self._network.peers

    def origin(self, key: str, subkey: str) -> str:
        return ""

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}",)

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        pass

    async def knock(self, entry_points: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        there = self._network.peers - {self.peer_id}
        return {
            peer: Knock(None if peer in there else "connection refused") for peer in entry_points
        }

    async def find_neighbours(self) -> None:
        pass

    async def revive(self, restart: bool = False) -> bool:
        return True

    async def connected_peers(self) -> frozenset[str]:
        return frozenset(self._network.peers - {self.peer_id})

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        return (await self.lookup(key)).get(subkey) if self.known_peers() else None

    def known_peers(self) -> int:
        return len(self._network.peers - {self.peer_id})

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        if not any(served == peer_id for served, _ in self._network.served):
            raise LinkLost("can't be reached")

    async def disconnect(self, peer_id: str) -> None:
        pass

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        take = self._network.served.get((peer_id, protocol))
        if take is None:
            raise LinkLost("can't be reached")
        near, far = socket.socketpair()
        for end in (near, far):
            end.setblocking(False)
        self.opened.append(near)
        take(OpenStream(self.peer_id, self._network.address, far))
        return OpenStream(peer_id, self._network.address, near)

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        self._network.served[self.peer_id, protocol] = take

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        return (self._network.address,)

    async def close(self) -> None:
        self._network.peers.discard(self.peer_id)
        for key in [key for key in self._network.served if key[0] == self.peer_id]:
            del self._network.served[key]


def _provenance(stored: bytes, subkey: str, now: float) -> Provenance | None:
    return Provenances().check(stored, subkey, now)
