"""What the node needs of a DHT, and what its entry points tell: who answers, whose clock is off."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from lowcomm_node.errors import ConfigError, Unhealthy
from lowcomm_node.net.addresses import parse_entry_point
from lowcomm_node.net.control import Streams
from lowcomm_node.net.targets import Targets
from lowcomm_protocol.errors import RecordError

MAX_VALUE = 30 * 1024
"""Bytes of one record. Larger ones disturb hivemind's DHT."""
MAX_CLOCK_OFFSET = 3.0
"""Seconds. Records live for seconds to minutes: with a larger offset they seem expired, or not
issued yet."""


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

    async def held_by_others(self, key: str, subkey: str, newest: bool = True) -> bytes | None:
        """The newest valid record of a subkey that others keep, to see whether ours has arrived.

        ``newest``: False where any version will do, which costs a fifth.
        """
        ...

    def answered(self, peer_id: str) -> None:
        """A peer has answered us, or called and authenticated: its records come first."""
        ...

    def proved(self, key: str) -> frozenset[str]:
        """The peers under a key that stored their record here themselves, or have answered."""
        ...

    def origin(self, key: str, subkey: str) -> str:
        """The address from which a record was stored here, or its relay; empty if unknown."""
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

    async def connected_peers(self) -> frozenset[str]:
        """The peers that we are connected to, by proven ids; empty if p2pd can't tell."""
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


def by_peer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The addresses of each peer. Malformed ones are skipped."""
    entries: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        with suppress(ConfigError):
            entry = parse_entry_point(text)
            entries[entry.peer_id] = (*entries.get(entry.peer_id, ()), str(entry))
    return entries


def nobody_answers(where: str) -> str:
    """An error text; ``where``: addresses and reasons in words."""
    return f"No peer answers at {where}: check the address, and that the bootstrap server runs."


def check_clock(knocks: Mapping[str, Knock], most: float = MAX_CLOCK_OFFSET) -> None:
    """Raise Unhealthy if our clock differs from that of every peer."""
    nearest = min(
        (knock.ahead for knock in knocks.values() if knock.reason is None), key=abs, default=0.0
    )
    if abs(nearest) > most:
        where = "behind" if nearest > 0 else "ahead of"
        raise Unhealthy(
            f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {most:.0f} "
            "s are allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap "
            "server."
        )
