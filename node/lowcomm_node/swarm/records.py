"""What a node reports of its way into the swarm."""

from dataclasses import dataclass
from typing import ClassVar

from lowcomm_node.system.events import Event


@dataclass(frozen=True, kw_only=True)
class EntryPointAnswers(Event):
    """An entry point that the owner named answers."""

    wire_name: ClassVar[str] = "door.open"
    peer_id: str
    """Its peer id."""
    address: str | None
    """Its multiaddress."""


@dataclass(frozen=True, kw_only=True)
class EntryPointSilent(Event):
    """An entry point that the owner named does not answer."""

    wire_name: ClassVar[str] = "door.closed"
    peer_id: str
    """Its peer id."""
    address: str | None
    """Its multiaddress."""
    reason: str
    """Why it does not answer."""


@dataclass(frozen=True, kw_only=True)
class SwarmLooking(Event):
    """The node looks for its swarm."""

    wire_name: ClassVar[str] = "swarm.looking"
    reason: str | None
    """Why the node is not in the swarm."""


@dataclass(frozen=True, kw_only=True)
class SwarmConnected(Event):
    """The node is in its swarm."""

    wire_name: ClassVar[str] = "swarm.connected"
    reason: str | None = None
    """Always null."""


@dataclass(frozen=True, kw_only=True)
class SwarmLost(Event):
    """No peer answers any more."""

    wire_name: ClassVar[str] = "swarm.lost"
    reason: str | None
    """Why the node is not in the swarm."""


@dataclass(frozen=True, kw_only=True)
class SwarmUnlisted(Event):
    """Other peers answer, but do not have the record of this node."""

    wire_name: ClassVar[str] = "swarm.unlisted"
    reason: str | None
    """Why the node is not in the swarm."""


@dataclass(frozen=True, kw_only=True)
class AddressesChanged(Event):
    """The addresses of this machine have changed."""

    wire_name: ClassVar[str] = "addresses.changed"
    addresses: tuple[str, ...]
    """All that it has now."""
