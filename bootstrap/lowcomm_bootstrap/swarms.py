"""What a bootstrap server knows of the runs that it keeps, for people to look at.

Nothing here is a fact but what creators and peers have signed: a peer can tell any number of
tokens. So each figure says of how many peers it is, and a peer counts as *proved* only if it has
answered or stored its record here itself.
"""

from collections import Counter, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.records import PeerInfo, Phase, read_record
from lowcomm_protocol.spec.run import SignedRun

MOST_PEERS = 1024
"""Of one run. Records beyond them are not read, those of peers that have not proved themselves
first: a flood of identities neither holds the server up nor takes honest peers off the page."""
MOST_SHOWN = 100
"""Peers on the leaderboard, and releases."""
RATE_SECONDS = 300.0
"""Exchanges a minute are counted over the last so many seconds."""
GONE = frozenset({Phase.LEFT, Phase.FINISHED})


@dataclass
class Swarm:
    """One run, and what its peers told last."""

    run: SignedRun
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    proved: Set[str] = frozenset()
    _records: dict[str, bytes] = field(default_factory=dict)
    _exchanges: deque[tuple[float, int]] = field(default_factory=deque)
    """When peers told of so many more exchanges than before."""
    _since: float | None = None

    def saw(self, records: Mapping[str, bytes], proved: Set[str], now: float) -> None:
        """Take in the records of its peers at a Unix time."""
        peers: dict[str, PeerInfo] = {}
        for peer in sorted(records, key=lambda peer: peer not in proved)[:MOST_PEERS]:
            record = records[peer]
            # A signature costs more than all the rest, and most records are those of the last look.
            info = self.peers.get(peer) if self._records.get(peer) == record else _read(record, now)
            if info is not None and info.expires > now and info.phase not in GONE:
                peers[peer] = info
        more = sum(_more(self.peers.get(peer), info) for peer, info in peers.items())
        self._since = now if self._since is None else self._since
        if more:
            self._exchanges.append((now, more))
        while self._exchanges and self._exchanges[0][0] < now - RATE_SECONDS:
            self._exchanges.popleft()
        self.peers, self._records = peers, {peer: records[peer] for peer in peers}
        self.proved = frozenset(proved) & set(peers)

    def exchanges_a_minute(self, now: float) -> float:
        """Applied, as their peers tell; an exchange of two counts at both."""
        seconds = min(RATE_SECONDS, now - (now if self._since is None else self._since))
        return 60 * sum(count for _, count in self._exchanges) / seconds if seconds else 0.0

    def view(self, now: float, address: str) -> dict[str, Any]:
        """What people are shown; ``address``: where they enter."""
        spec, peers = self.run.spec, list(self.peers.values())
        training = [peer for peer in peers if peer.phase is Phase.TRAINING]
        losses = [peer.told.held_out_loss for peer in peers if peer.told.held_out_loss > 0]
        releases = Counter(peer.told.release or "unknown" for peer in peers)
        name = f"{spec.run.name}@{self.run.fingerprint}"
        return {
            "run": name,
            "description": spec.run.description,
            "creator": self.run.creator,
            "admission": spec.run.admission,
            "method": spec.sync.method,
            "model": _model(spec.model.model_dump()),
            "steps": spec.run.steps,
            "swarm_step": median_low([peer.swarm_step for peer in training] or [0]),
            "peers": len(peers),
            "proved": len(self.proved),
            "training": len(training),
            "tokens": sum(peer.told.tokens for peer in peers),
            "tokens_per_second": sum(peer.tokens_per_second for peer in training),
            "held_out_loss": median_low(losses) if losses else None,
            "held_out_loss_of": len(losses),
            "exchanges_per_minute": self.exchanges_a_minute(now),
            "releases": dict(releases.most_common(MOST_SHOWN)),
            "leaders": [self._leader(peer) for peer in _by_tokens(peers)],
            "join": f"lowcomm-node join --peers {address} --run {name}" if address else None,
        }

    def _leader(self, peer: PeerInfo) -> dict[str, Any]:
        return {
            "peer": peer.peer_id,
            "name": peer.told.name,
            "tokens": peer.told.tokens,
            "tokens_per_second": peer.tokens_per_second,
            "phase": peer.phase.value,
            "proved": peer.peer_id in self.proved,
        }


def _by_tokens(peers: list[PeerInfo]) -> list[PeerInfo]:
    return sorted(peers, key=lambda peer: (-peer.told.tokens, peer.peer_id))[:MOST_SHOWN]


def _read(record: bytes, now: float) -> PeerInfo | None:
    try:
        return read_record(record, now)
    except LowcommError:
        return None


def _more(before: PeerInfo | None, now: PeerInfo) -> int:
    """Exchanges of a peer since its last record; after a restart it counts from 0."""
    return max(0, now.told.exchanges - before.told.exchanges) if before is not None else 0


def _model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tells models apart at a glance."""
    told = ("kind", "type", "layers", "width", "heads", "context")
    return {name: settings[name] for name in told if settings.get(name) is not None}
