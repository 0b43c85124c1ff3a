"""Entry points to the DHT, and the addresses at which its peers are dialed."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.multiaddress import EntryPoint, circuit, parse_entry_point

MAX_ENTRY_POINTS = 32
MAX_DIALED = 8
"""Addresses of one peer that are dialed. A record has no more."""
MAX_DETOURS = 4
"""Entry points of ours tried as relays for a peer whose own addresses name none."""


class EntryPoints:
    """The addresses that the owner has named, followed by the newest learned ones."""

    def __init__(self, peer_id: str, named: Sequence[str], learned: Sequence[str] = ()) -> None:
        """``peer_id``: ours. Raises ConfigError for a malformed address of the owner's."""
        self._peer_id = peer_id
        self.named = tuple(parse_entry_point(text) for text in named)
        self.learned: tuple[EntryPoint, ...] = ()
        self.add(learned)

    def __iter__(self) -> Iterator[EntryPoint]:
        return iter((*self.named, *self.learned))

    def add(self, addresses: Sequence[str]) -> None:
        """Remember addresses. Malformed ones are skipped; the oldest learned ones are evicted when
        full."""
        for text in addresses:
            with suppress(ConfigError):
                entry = parse_entry_point(text)
                if entry.peer_id != self._peer_id and entry not in (*self.named, *self.learned):
                    self.learned = (*self.learned, entry)
        surplus = len(self.named) + len(self.learned) - MAX_ENTRY_POINTS
        self.learned = self.learned[max(0, surplus) :]

    def entries_for(self, peer_id: str, addresses: Sequence[str]) -> list[EntryPoint]:
        """Where to dial a peer: at these addresses of it, or through other entry points as
        relays."""
        relays = [e for e in self if e.relay is None and e.peer_id not in (peer_id, self._peer_id)]
        detours = [EntryPoint(peer_id, circuit(relay)) for relay in relays[:MAX_DETOURS]]
        return list(dict.fromkeys([*leading_to(peer_id, addresses), *detours]))


def leading_to(peer_id: str, addresses: Sequence[str]) -> list[EntryPoint]:
    """The addresses that lead to this peer. They come from its record, so others are ignored."""
    entries: list[EntryPoint] = []
    for text in addresses[:MAX_DIALED]:
        with suppress(ConfigError):
            entry = parse_entry_point(text)
            if entry.peer_id == peer_id:
                entries.append(entry)
    return entries
