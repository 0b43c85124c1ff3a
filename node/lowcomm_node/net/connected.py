"""One open route to a peer, and the functions that open and test channels."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from lowcomm_node.net.addresses import CIRCUIT, relay_of
from lowcomm_node.net.dialer import TunnelDialer
from lowcomm_node.net.targets import Targets
from lowcomm_protocol.peers.records import PeerInfo

Dial = Callable[[PeerInfo], Awaitable[aio.Channel]]
"""Opens a channel straight to a peer.

Raises LowcommError if the peer can't be reached, or its record does not allow it."""
DialLocal = Callable[[str], aio.Channel]
"""Opens a channel to a unix socket of ours."""
Ping = Callable[[aio.Channel, str], Any]
"""Awaitable: one call to a peer over a channel. Raises grpc.RpcError."""


@dataclass(frozen=True)
class Dialers:
    """The functions that open and test channels."""

    direct: Dial
    local: DialLocal
    ping: Ping
    doubt: Callable[[], None] = lambda: None
    """Called when somebody else answers at a peer's address."""
    targets: Targets | None = None
    """Selects the addresses of a record that may be dialed now; None: all."""


@dataclass(eq=False)
class Connected:
    """An open route."""

    channel: aio.Channel
    dialer: TunnelDialer | None = None
    """The tunnel's dialer, if the route is a tunnel."""
    address: str = ""
    round_trip: float | None = None
    """Seconds, the least of late."""
    is_used: bool = True
    """Whether there was a call since the round trip was measured."""
    tasks: tuple[asyncio.Task[None], ...] = ()

    @property
    def cut(self) -> str:
        """Why an interrupted tunnel carries nothing at the moment; empty if it carries, or is
        none."""
        return self.dialer.cut if self.dialer is not None else ""


async def end(connected: Connected, grace: float | None = None) -> None:
    """Close a channel; its calls have ``grace`` seconds to end."""
    for task in connected.tasks:
        if task is not asyncio.current_task():
            task.cancel()
    try:
        await connected.channel.close(grace)
    finally:
        if connected.dialer is not None:
            await connected.dialer.close()


async def is_ready(connected: Connected) -> bool:
    """Whether a channel can be connected."""
    state = connected.channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await connected.channel.wait_for_state_change(state)
        state = connected.channel.get_state(try_to_connect=True)
    return True


def describe_route(connected: Connected) -> str:
    """The name of a route, as ``peers`` prints it."""
    if connected.dialer is None:
        return f"direct {connected.address}"
    return name_tunnel(connected.dialer.address)


def name_tunnel(address: str) -> str:
    """The name of a tunnel to a multiaddress, as ``peers`` prints it; empty address: not known
    yet."""
    relay = relay_of(address)
    return f"relay {relay[-6:]}" if relay else "punched" if address else "tunnel"


def has_direct(addresses: Sequence[str]) -> bool:
    """Whether one of these connections goes through no relay."""
    return any(address and not address.endswith(CIRCUIT) for address in addresses)
