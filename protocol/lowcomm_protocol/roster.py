"""Who is alive, as signed records tell."""

from collections.abc import Iterator

from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.records import MAX_LIFE, PeerInfo, Phase, read_record

MAX_PEERS = 4096
_GONE = (Phase.LEFT, Phase.FINISHED)


class Roster:
    """The peers of one run, the own one excluded. Holds at most ``MAX_PEERS`` records."""

    def __init__(self, own_peer_id: str, run_id: str) -> None:
        self.own_peer_id = own_peer_id
        self.run_id = run_id
        self._records: dict[str, PeerInfo] = {}

    def hear(self, data: bytes, now: float) -> PeerInfo | None:
        """Take in a serialized signed record; the peer's news, or None if we knew as much or the record is refused."""
        try:
            info = read_record(data, now)
        except LowcommError:
            return None
        if info.peer_id == self.own_peer_id or info.run_id != self.run_id:
            return None
        known = self._records.get(info.peer_id)
        if known is not None and info.issued <= known.issued:
            return None
        self._sweep(now)
        if known is None and len(self._records) >= MAX_PEERS:
            return None
        self._records[info.peer_id] = info
        return info

    def get(self, peer_id: str, now: float) -> PeerInfo | None:
        """The newest record of a peer that is alive."""
        info = self._records.get(peer_id)
        return info if info is not None and _is_alive(info, now) else None

    def alive(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers that are there, in the order of their ids, which is the same at every peer."""
        return tuple(sorted(self._alive(now), key=lambda info: info.peer_id))

    def in_phase(self, phase: Phase, now: float) -> tuple[PeerInfo, ...]:
        """The peers that are there and in one phase."""
        return tuple(info for info in self.alive(now) if info.phase is phase)

    def _alive(self, now: float) -> Iterator[PeerInfo]:
        return (info for info in self._records.values() if _is_alive(info, now))

    def _sweep(self, now: float) -> None:
        # A record is kept until no older one can be valid any more, which would bring back a peer that has left; in
        # a full roster only until it expires.
        full = len(self._records) >= MAX_PEERS
        ends = {peer: info.expires if full else info.issued + MAX_LIFE for peer, info in self._records.items()}
        for peer_id in [peer_id for peer_id, end in ends.items() if end <= now]:
            del self._records[peer_id]


def _is_alive(info: PeerInfo, now: float) -> bool:
    return info.expires > now and info.phase not in _GONE
