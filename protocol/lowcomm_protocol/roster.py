"""Who is alive, as signed records tell."""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256

from lowcomm_protocol.admission import Admission, Rules
from lowcomm_protocol.errors import LowcommError, RecordError
from lowcomm_protocol.records import MAX_LIFE, MAX_RECORD_BYTES, PeerInfo, Phase, read_record
from lowcomm_protocol.refusals import Reason, Refusals, What

MAX_PEERS = 4096
_REMEMBERED = 2 * MAX_PEERS
_GONE = (Phase.LEFT, Phase.FINISHED)


class Roster:
    """The peers of one run that may take part in it, the own one excluded. Holds at most ``MAX_PEERS`` records."""

    def __init__(
        self, own_peer_id: str, run_id: str, admission: Admission | None = None, refusals: Refusals | None = None
    ) -> None:
        self.own_peer_id = own_peer_id
        self.run_id = run_id
        self.admission = admission or Admission(Rules(run_id, creator=""))
        """Without one anybody may take part."""
        self._refusals = refusals or Refusals()
        self._records: dict[str, PeerInfo] = {}
        self._heard: OrderedDict[bytes, None] = OrderedDict()

    def hear(self, data: bytes, now: float, sender: str | None = None) -> PeerInfo | None:
        """Take in a serialized signed record; the peer's news, or None if we knew as much or the record is refused.

        With a ``sender`` only its own is believed. Refusals are counted, the same bytes once.
        """
        digest = sha256(data).digest() if len(data) <= MAX_RECORD_BYTES else b""
        if digest in self._heard:
            return None  # the DHT tells the same again and again
        try:
            info = self._read(data, now, sender)
        except LowcommError as error:
            self._refusals.count(What.RECORD, error.reason)
            # What is misplaced may be sound in its place, and bytes that are too many are told by their number.
            if error.reason not in (Reason.MISPLACED, Reason.TOO_LARGE):
                self._remember(digest)
            return None
        known = self._records.get(info.peer_id)
        if info.peer_id == self.own_peer_id or (known is not None and info.issued <= known.issued):
            self._remember(digest)
            return None
        self._sweep(now)
        if known is None and len(self._records) >= MAX_PEERS:
            return None
        self._remember(digest)
        self._records[info.peer_id] = info
        return info

    def get(self, peer_id: str, now: float) -> PeerInfo | None:
        """The newest record of a peer that is alive and may take part."""
        info = self._records.get(peer_id)
        return info if info is not None and self._is_alive(info, now) else None

    def alive(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers that are there and may take part, in the order of their ids, which is the same at every peer."""
        return tuple(sorted(self._alive(now), key=lambda info: info.peer_id))

    def in_phase(self, phase: Phase, now: float) -> tuple[PeerInfo, ...]:
        """The peers that are there and in one phase."""
        return tuple(info for info in self.alive(now) if info.phase is phase)

    def _read(self, data: bytes, now: float, sender: str | None) -> PeerInfo:
        info = read_record(data, now)
        if info.run_id != self.run_id or sender not in (None, info.peer_id):
            raise RecordError(
                f"A record of {info.peer_id} that {sender or 'somebody'} told as its own, or of another run, is refused.",
                reason=Reason.MISPLACED,
            )
        self.admission.check(info.peer_id, info.claim, now)
        return info

    def _alive(self, now: float) -> Iterator[PeerInfo]:
        return (info for info in self._records.values() if self._is_alive(info, now))

    def _is_alive(self, info: PeerInfo, now: float) -> bool:
        # Asked each time: a removal, an expired invite or an earlier claim takes effect at once.
        return info.expires > now and info.phase not in _GONE and not self.admission.barred(info.peer_id, now)

    def _remember(self, digest: bytes) -> None:
        self._heard[digest] = None
        if len(self._heard) > _REMEMBERED:
            self._heard.popitem(last=False)

    def _sweep(self, now: float) -> None:
        # A record is kept until no older one can be valid any more, which would bring back a peer that has left; in
        # a full roster only until it expires.
        full = len(self._records) >= MAX_PEERS
        ends = {peer: info.expires if full else info.issued + MAX_LIFE for peer, info in self._records.items()}
        for peer_id in [peer_id for peer_id, end in ends.items() if end <= now]:
            del self._records[peer_id]
