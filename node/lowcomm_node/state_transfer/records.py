"""What a node reports of the states that it copies."""

from dataclasses import dataclass
from typing import ClassVar

from lowcomm_node.system.events import Event


@dataclass(frozen=True, kw_only=True)
class StateAdopted(Event):
    """The node trains on from the state of other peers."""

    wire_name: ClassVar[str] = "state.adopted"
    donors: tuple[str, ...]
    """Peer ids of those who sent it."""
    swarm_step: int
    """Swarm step of the state."""
    bytes: int
    """Bytes received."""
