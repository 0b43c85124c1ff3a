"""What the node asks of a DHT."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowcomm_node.libp2p.interface import Streams
from lowcomm_node.libp2p.targets import Targets
from lowcomm_protocol.errors import RecordError

MAX_VALUE = 30 * 1024
"""Bytes of one record: larger ones disturb hivemind's DHT."""


@dataclass(frozen=True)
class Knock:
    """What came of knocking at a peer of the DHT."""

    reason: str | None
    """Why it is not there; None: it answered."""
    ahead: float = 0.0
    """Seconds that its clock is ahead of ours; 0 within the time that the call took."""


class Discovery(Streams, Protocol):
    """Records by key and subkey, each with a life of its own."""

    peer_id: str
    targets: Targets
    """Which addresses of strangers are dialed."""
    max_clock_offset: float
    """Seconds that our clock may differ from the swarm's when we enter."""

    async def start(self) -> None:
        """Enter the DHT. Raises NoPeers if no entry point answers, PortInUse, ConfigError."""
        ...

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """Store a record for ``lifetime`` seconds; whether some peer took it.

        Raises RecordError if it is too large.
        """
        ...

    async def lookup(self, key: str) -> dict[str, bytes]:
        """The newest valid record of every subkey."""
        ...

    def answered(self, peer_id: str) -> None:
        """A peer has answered us or has called us, and has shown who it is: its records are the
        last to give way here."""
        ...

    def proved(self, key: str) -> frozenset[str]:
        """The peers under a key that have stored their record here themselves, or have answered."""
        ...

    def brought_from(self, key: str, subkey: str) -> tuple[str, ...]:
        """From which network a record was stored here, the narrowest first; empty if that is not
        known."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        ...

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """Remember addresses to try when the others do not answer; bounded, malformed ones are left
        out."""
        ...

    async def check_connection(self) -> int:
        """Find lost entry points again; how many DHT peers we know."""
        ...

    async def knock(self, doors: Mapping[str, Sequence[str]]) -> dict[str, Knock]:
        """Connect to peers, of which the addresses are given, and have them know us.

        Never raises.
        """
        ...

    async def find_neighbours(self) -> None:
        """Have the DHT tell us of its other peers, and them of us; after somebody has answered."""
        ...

    async def revive(self) -> bool:
        """Start again what has died on this machine, and look at our own addresses; whether that
        works."""
        ...

    async def restart(self) -> bool:
        """Start everything on this machine again, as ``revive``: what is left of connections is
        given up."""
        ...

    async def forget_connections(self, gone: Collection[str]) -> None:
        """Give up the connections that use addresses of ours which are ``gone``: they are dead, and
        do not know it."""
        ...

    async def connected_peers(self) -> frozenset[str]:
        """The peers that we are connected to now, whose ids the connections prove; empty if that
        can't be told."""
        ...

    async def has_connections(self) -> bool:
        """Whether we are connected to anybody at all, as far as that is known."""
        ...

    async def held_by_others(self, key: str, subkey: str) -> bytes | None:
        """The newest valid record of a subkey that others keep, to see whether ours has arrived;
        None if there is none."""
        ...

    def known_peers(self) -> int:
        """How many DHT peers we know."""
        ...

    async def close(self) -> None:
        """Leave the DHT."""
        ...


def check_size(value: bytes) -> None:
    """Raise RecordError if a value is too large for the DHT."""
    if len(value) > MAX_VALUE:
        raise RecordError(f"A record of {len(value)} bytes is too large for the DHT: at most {MAX_VALUE}.")
