"""State, tokenizer and weights from other peers, piece by piece, from several at once.

engine.py     the taking end: sessions with a few peers, and what a download is
state.py      a state under download          files.py      files of the run
catch_up.py   when a late peer copies, from whom; weights for an average
giving.py     the giving end: who is served, and who waits
"""

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
