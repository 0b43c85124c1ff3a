"""Reports of states that a node has copied."""

from dataclasses import dataclass

from lowcomm_node.system.logs import Event


class StateAdopted(Event, name="state.adopted"):
    """The node trains on from the state of other peers."""

    donors: tuple[str, ...]
    """Peer ids of those who sent it."""
    swarm_step: int
    """Swarm step of the state."""
    bytes: int
    """Bytes received."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Slow weights of peers, as files on this machine."""

    folder: str
    """A file for each peer, by its id: the slow weights of all fragments, float32."""
    peers: tuple[str, ...] = ()
    """Peers whose weights came."""
    missing: str = ""
    """Why those of others did not; empty if nothing is missing."""
