"""How a node stands to its swarm, as ``status`` and the events say it."""

from dataclasses import dataclass

from lowcomm_node.system.logs import Event


@dataclass(frozen=True, kw_only=True)
class EntryPointStatus:
    """A peer at which the swarm can be entered."""

    peer_id: str
    address: str | None
    """Its multiaddress; null if none is known."""
    named: bool
    """Whether the owner named it with `--peers`."""
    answers: bool
    """Whether it answered when it was called last."""
    reason: str | None
    """Why it does not answer."""
    next_attempt: float | None
    """Seconds until it is called again; null if it is left alone."""


@dataclass(frozen=True, kw_only=True)
class SwarmStatus:
    """How a node stands to the swarm."""

    state: str
    """`looking` until a peer answers, `connected`, `lost` when none answers any more, or `unlisted`
    while others do not have its record."""
    seconds: float
    """Seconds in this state."""
    reason: str | None
    """Why it is not connected."""
    doors: tuple[EntryPointStatus, ...] = ()
    """The peers that the owner named, and others that are tried."""


class EntryPointAnswers(Event, name="door.open"):
    """An entry point that the owner named answers."""

    peer_id: str
    address: str | None
    """Multiaddress of the entry point."""


class EntryPointSilent(Event, name="door.closed"):
    """An entry point that the owner named does not answer."""

    peer_id: str
    address: str | None
    """Multiaddress of the entry point."""
    reason: str
    """Why it does not answer."""


class SwarmConnected(Event, name="swarm.connected"):
    """The node is in its swarm."""

    reason: str | None = None
    """Always null."""


class SwarmLost(Event, name="swarm.lost"):
    """No peer answers any more."""

    reason: str | None
    """Why the node is not in the swarm."""


class SwarmUnlisted(Event, name="swarm.unlisted"):
    """Other peers answer, but do not have the record of this node."""

    reason: str | None
    """Why the node is not in the swarm."""


class AddressesChanged(Event, name="addresses.changed"):
    """The addresses of this machine have changed."""

    addresses: tuple[str, ...]
    """All that it has now."""


EVENTS = {"connected": SwarmConnected, "lost": SwarmLost, "unlisted": SwarmUnlisted}
"""By state."""
