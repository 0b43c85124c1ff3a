"""This node's own record, signed again for each announcement."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import time

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import (
    MAX_ENTRY_POINTS,
    PeerInfo,
    Phase,
    Told,
    next_issue,
    read_record,
    write_record,
)


@dataclass(kw_only=True)
class OwnRecord:
    """What this node announces of itself."""

    identity: Identity
    run_id: str
    certificate: bytes
    """Key of our TLS certificate."""
    addresses: tuple[str, ...]
    """``host:port`` of our Exchange service."""
    progress: Callable[[], tuple[int, int, float]]
    """Swarm step, own inner steps, tokens a second."""
    told: Callable[[], Told] = Told
    """What people see of us."""
    phase: Phase = Phase.JOINING
    last_issued: float = 0.0

    @property
    def peer_id(self) -> str:
        """Our peer id."""
        return self.identity.peer_id

    def follow(self, data: bytes, continues: bool) -> bool:
        """Whether a record under our peer id is newer than our last one.

        ``continues``: it may be ours from before a restart, so new ones are issued after it, or a
        clock set back would make them look outdated. Otherwise another process has our identity.
        """
        with suppress(LowcommError):
            info = read_record(data, time())
            if info.peer_id == self.peer_id and info.issued > self.last_issued:
                self.last_issued = info.issued if continues else self.last_issued
                return True
        return False

    def sign(self, life: float, entry_points: tuple[str, ...], claim: bytes) -> bytes:
        """A serialized SignedRecord that is valid for ``life`` seconds from now."""
        swarm_step, steps, speed = self.progress()
        self.last_issued = next_issue(time(), self.last_issued)
        info = PeerInfo(
            peer_id=self.peer_id,
            run_id=self.run_id,
            phase=self.phase,
            issued=self.last_issued,
            expires=self.last_issued + life,
            addresses=self.addresses,
            certificate=self.certificate,
            swarm_step=swarm_step,
            steps=steps,
            tokens_per_second=speed,
            entry_points=entry_points[:MAX_ENTRY_POINTS],
            claim=claim,
            told=self.told(),
        )
        return write_record(info, self.identity)
