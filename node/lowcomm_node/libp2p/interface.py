"""What the node asks of streams to other peers."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class OpenStream:
    """A stream to another peer, whose identity is proven."""

    peer_id: str
    address: str
    """Multiaddress of the other end, which tells whether it goes through a relay; empty if it is
    not known."""
    socket: socket.socket
    """Non-blocking; whoever takes the stream closes it."""
    protocol: str = ""
    """Of a stream that came in: what the other end wants of us."""


TakeStream = Callable[[OpenStream], None]
"""Takes over a stream that came in."""


class Streams(Protocol):
    """Streams of bytes between peers, also where only one of the two, or neither, can be dialed."""

    async def connect(self, peer_id: str, entry_points: Sequence[str], seconds: float) -> None:
        """Be connected to a peer: at these addresses, or through our own entry points as relays.

        Raises LinkLost that says why it failed.
        """
        ...

    async def disconnect(self, peer_id: str) -> None:
        """Give up all connections to a peer, such as those that are dead; never raises."""
        ...

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        """Open a stream to a connected peer. Raises LinkLost.

        That the other end serves the protocol, and that the connection still works, shows only when
        it answers.
        """
        ...

    async def serve_streams(self, protocol: str, take: TakeStream) -> None:
        """Have ``take`` called with every stream of a protocol that comes in, from now on. Raises
        LinkLost.

        Each protocol can be served once.
        """
        ...

    async def connected_at(self, peer_id: str) -> tuple[str, ...]:
        """The addresses of the connections to a peer that there are now; empty if none, or if that
        can't be told."""
        ...
