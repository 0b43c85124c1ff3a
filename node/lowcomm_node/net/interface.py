"""Streams to other peers, as the rest of the node uses them."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class OpenStream:
    """A stream to another peer, whose identity is proven."""

    peer_id: str
    address: str
    """Multiaddress of the other end, with the relay if there is one; empty if unknown."""
    socket: socket.socket
    """Non-blocking. Whoever takes the stream closes it."""
    protocol: str = ""
    """The protocol of an incoming stream."""


TakeStream = Callable[[OpenStream], None]
"""Takes over an incoming stream."""


class Streams(Protocol):
    """Byte streams between peers, even if only one of them, or neither, can be dialed."""

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """Connect to a peer: at these addresses, or through our own entry points as relays.

        Raises LinkLost with the reason if it fails.
        """
        ...

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections to a peer, such as dead ones. Never raises."""
        ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream to a connected peer. Raises LinkLost.

        Only an answer of the other end shows that it serves the protocol, and that the connection
        works.
        """
        ...

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with each incoming stream of a protocol, from now on. Raises
        LinkLost.

        Each protocol can be served once.
        """
        ...

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of the connections to a peer; empty if there are none, or p2pd can't
        tell."""
        ...
