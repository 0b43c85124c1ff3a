"""What the node needs of a DHT."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowcomm_node.net.control import Streams
from lowcomm_node.net.targets import Targets
from lowcomm_protocol.errors import RecordError

MAX_VALUE = 30 * 1024
"""Bytes of one record. Larger ones disturb hivemind's DHT."""


@dataclass(frozen=True)
class Knock:
    """The result of connecting to a DHT peer and pinging it."""

    reason: str | None
    """Why it failed; None: the peer answered."""
    ahead: float = 0.0
    """Seconds that its clock is ahead of ours; 0 within the call's duration."""


class Discovery(Streams, Protocol):
    """Records by key and subkey, each with an expiry of its own."""

    peer_id: str
    targets: Targets
    """Which addresses from untrusted records are dialed."""
    max_clock_offset: float
    """Seconds that our clock may differ from the swarm's when we enter."""

    async def start(self) -> None:
        """Enter the DHT. Raises NoPeers if no entry point answers, PortInUse, ConfigError."""
        ...

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """Store a record for ``lifetime`` seconds. Returns whether some peer took it.

        Raises RecordError if it is too large.
        """
        ...

    async def lookup(self, key: str) -> dict[str, bytes]:
        """The newest valid record of every subkey."""
        ...

    def answered(self, peer_id: str) -> None:
        """A peer has answered us, or called and authenticated: its records are evicted last."""
        ...

    def proved(self, key: str) -> frozenset[str]:
        """The peers under a key that stored their record here themselves, or have answered."""
        ...

    def brought_from(self, key: str, subkey: str) -> tuple[str, ...]:
        """The networks from which a record was stored here, narrowest first; empty if unknown."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        ...

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """Remember addresses to try when the others do not answer. Bounded; malformed ones are
        skipped."""
        ...

    async def check_connection(self) -> int:
        """Find lost entry points again. Returns the number of known DHT peers."""
        ...

    async def knock(self, entry_points: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        """Connect to peers at the given addresses, and have them know us.

        Never raises.
        """
        ...

    async def find_neighbours(self) -> None:
        """Learn other DHT peers, and make us known to them, once a peer has answered."""
        ...

    async def revive(self) -> bool:
        """Restart what has died on this machine, and refresh our own addresses. Returns whether it
        works."""
        ...

    async def restart(self) -> bool:
        """Restart everything on this machine, dropping its connections. Returns as ``revive``
        does."""
        ...

    async def forget_connections(self, gone: Collection[str]) -> None:
        """Close the connections that use our ``gone`` addresses. They are dead without knowing
        it."""
        ...

    async def connected_peers(self) -> frozenset[str]:
        """The peers that we are connected to, by proven ids; empty if p2pd can't tell."""
        ...

    async def has_connections(self) -> bool:
        """Whether we are connected to any peer, as far as p2pd knows."""
        ...

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        """The newest valid record of a subkey that others keep, to see if ours has arrived; or
        None. ``newest``: False where any will do, which costs a fifth."""
        ...

    def known_peers(self) -> int:
        """The number of known DHT peers."""
        ...

    async def close(self) -> None:
        """Leave the DHT."""
        ...


def check_size(value: bytes) -> None:
    """Raise RecordError if a value is too large for the DHT."""
    if len(value) > MAX_VALUE:
        raise RecordError(
            f"A record of {len(value)} bytes is too large for the DHT: at most {MAX_VALUE}."
        )
