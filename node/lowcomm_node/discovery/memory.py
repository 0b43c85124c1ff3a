"""The twin of the DHT without a network, for tests: same records, same checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowcomm_node.discovery.interface import check_size
from lowcomm_node.discovery.keys import MAX_LIFE, key_of, pack, unpack


@dataclass
class MemoryNetwork:
    """What all twins of one test share."""

    clock: Callable[[], float]
    records: dict[tuple[str, str], tuple[bytes, float]] = field(default_factory=dict)
    """(key, subkey) -> stored value and Unix time of its expiry."""
    peers: set[str] = field(default_factory=set)


class MemoryDiscovery:
    """One peer of a MemoryNetwork."""

    def __init__(self, peer_id: str, network: MemoryNetwork) -> None:
        self.peer_id, self._network = peer_id, network

    async def start(self) -> None:
        """See Discovery."""
        self._network.peers.add(self.peer_id)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """See Discovery."""
        check_size(value)
        now, stored = self._network.clock(), pack(key, value)
        expires = now + min(lifetime, MAX_LIFE)
        known = self._network.records.get((key, subkey))
        if key_of(stored, subkey, now) != key or (known is not None and known[1] >= expires):
            return False
        self._network.records[key, subkey] = (stored, expires)
        return True

    async def lookup(self, key: str) -> dict[str, bytes]:
        """See Discovery."""
        now = self._network.clock()
        return {
            subkey: unpack(stored)
            for (its_key, subkey), (stored, expires) in self._network.records.items()
            if its_key == key and expires > now and key_of(stored, subkey, now) == key
        }

    def addresses(self) -> tuple[str, ...]:
        """See Discovery."""
        return (f"/memory/{self.peer_id}",)

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """See Discovery."""

    async def check_connection(self) -> int:
        """See Discovery."""
        return len(self._network.peers - {self.peer_id})

    async def close(self) -> None:
        """See Discovery."""
        self._network.peers.discard(self.peer_id)
