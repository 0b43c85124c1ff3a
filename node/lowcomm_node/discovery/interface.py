"""What the node asks of a DHT."""

from collections.abc import Sequence
from typing import Protocol

from lowcomm_protocol.errors import RecordError

MAX_VALUE = 30 * 1024
"""Bytes of one record: larger ones disturb hivemind's DHT."""


class Discovery(Protocol):
    """Records by key and subkey, each with a life of its own."""

    peer_id: str

    async def start(self) -> None:
        """Enter the DHT. Raises NoPeers if no entry point answers, PortInUse, ConfigError."""
        ...

    async def publish(self, key: str, subkey: str, value: bytes, lifetime: float) -> bool:
        """Store a record for ``lifetime`` seconds; whether some peer took it. Raises RecordError if it is too large."""
        ...

    async def lookup(self, key: str) -> dict[str, bytes]:
        """The newest valid record of every subkey."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Our own multiaddresses, good for another node's ``--peers``."""
        ...

    def add_entry_points(self, addresses: Sequence[str]) -> None:
        """Remember addresses to try when the others do not answer; bounded, malformed ones are left out."""
        ...

    async def check_connection(self) -> int:
        """Find lost entry points again; how many DHT peers we know."""
        ...

    async def close(self) -> None:
        """Leave the DHT."""
        ...


def check_size(value: bytes) -> None:
    """Raise RecordError if a value is too large for the DHT."""
    if len(value) > MAX_VALUE:
        raise RecordError(f"A record of {len(value)} bytes is too large for the DHT: at most {MAX_VALUE}.")
