"""Who is there: whose signed record holds, and who of them has proved lately to be alive."""

from collections import OrderedDict
from hashlib import sha256

from lowcomm_protocol.errors import LowcommError, RecordError
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.liveness import Liveness
from lowcomm_protocol.peers.records import MAX_LIFE, MAX_RECORD_BYTES, PeerInfo, Phase, read_record
from lowcomm_protocol.refusals import Reason, Refusals, What

MAX_PEERS = 4096
SWEEP_EVERY = 5.0
"""Seconds between two looks for records that are of no more use."""
_REMEMBERED = 2 * MAX_PEERS
_GONE = (Phase.LEFT, Phase.FINISHED)


class Roster:
    """The peers of one run that may take part in it, the own one excluded.

    Holds at most ``MAX_PEERS`` records.
    """

    def __init__(
        self, own_peer_id: str, run_id: str, admission: Admission | None = None, refusals: Refusals | None = None
    ) -> None:
        self.own_peer_id = own_peer_id
        self.run_id = run_id
        self.admission = admission or Admission(Rules(run_id, creator=""))
        """Without one anybody may take part."""
        self.liveness = Liveness(own_peer_id)
        """Signs of life: a record costs its writer nothing, and proves nothing."""
        self._refusals = refusals or Refusals()
        self._records: dict[str, PeerInfo] = {}
        self._swept = float("-inf")
        self._heard: OrderedDict[bytes, None] = OrderedDict()

    def hear(self, data: bytes, now: float, sender: str | None = None) -> PeerInfo | None:
        """Take in a serialized signed record; the peer's news, or None if we knew as much or the
        record is refused.

        With a ``sender`` only its own is believed. Refusals are counted, the same bytes once.
        """
        digest = sha256(data).digest() if len(data) <= MAX_RECORD_BYTES else b""
        if digest in self._heard:
            return None  # the DHT tells the same again and again
        try:
            info = self._read(data, now, sender)
        except LowcommError as error:
            self._refusals.count(What.RECORD, error.reason)
            # What is misplaced may be sound in its place, and bytes that are too many are told by
            # their number.
            if error.reason not in (Reason.MISPLACED, Reason.TOO_LARGE):
                self._remember(digest)
            return None
        known = self._records.get(info.peer_id)
        if info.peer_id == self.own_peer_id or (known is not None and info.issued <= known.issued):
            self._remember(digest)
            return None
        self._sweep(now)
        if known is None and len(self._records) >= MAX_PEERS and not self._make_room(now, sender):
            return None
        self._remember(digest)
        self._records[info.peer_id] = info
        return info

    def get(self, peer_id: str, now: float) -> PeerInfo | None:
        """The newest record of a peer that may take part, as long as it holds."""
        info = self._records.get(peer_id)
        return info if info is not None and self._holds(info, now) else None

    def known(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers whose record holds and that may take part, whether or not they are there; in no
        order."""
        return tuple(info for info in self._records.values() if self._holds(info, now))

    def alive(self, now: float) -> tuple[PeerInfo, ...]:
        """Those of them that have answered lately or have called us, in the order of their ids."""
        proved = (info for info in self._records.values() if self.liveness.is_proved(info.peer_id, now))
        return tuple(sorted((info for info in proved if self._holds(info, now)), key=lambda info: info.peer_id))

    def in_phase(self, phase: Phase, now: float) -> tuple[PeerInfo, ...]:
        """The peers that are alive and in one phase."""
        return tuple(info for info in self.alive(now) if info.phase is phase)

    def partners(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers that train, are alive, and answer offers: those that an exchange is planned
        with."""
        return tuple(info for info in self.in_phase(Phase.TRAINING, now) if self.liveness.is_alive(info.peer_id, now))

    def _read(self, data: bytes, now: float, sender: str | None) -> PeerInfo:
        info = read_record(data, now)
        if info.run_id != self.run_id or sender not in (None, info.peer_id):
            raise RecordError(
                f"A record of {info.peer_id} that {sender or 'somebody'} told as its own, or of another run, is refused.",
                reason=Reason.MISPLACED,
            )
        self.admission.check(info.peer_id, info.claim, now)
        return info

    def _make_room(self, now: float, sender: str | None) -> bool:
        """Forget the oldest record of a peer that has never answered: nobody fills a roster with
        such.

        A record from the DHT takes the place of one that was probed in vain; a peer that calls us
        that of any.
        """
        liveness = self.liveness
        for peer_id in self._records:
            if not liveness.is_proved(peer_id, now) and (sender is not None or not liveness.is_untried(peer_id, now)):
                del self._records[peer_id]
                return True
        return False

    def _holds(self, info: PeerInfo, now: float) -> bool:
        # Asked each time: a removal, an expired invite or an earlier claim takes effect at once.
        return info.expires > now and info.phase not in _GONE and not self.admission.barred(info.peer_id, now)

    def _remember(self, digest: bytes) -> None:
        self._heard[digest] = None
        if len(self._heard) > _REMEMBERED:
            self._heard.popitem(last=False)

    def _sweep(self, now: float) -> None:
        if abs(now - self._swept) < SWEEP_EVERY:
            return  # thousands of records may come at once
        self._swept = now
        # A record is kept until no older one can be valid any more, which would bring back a peer
        # that has left; in a full roster only until it expires.
        full = len(self._records) >= MAX_PEERS
        ends = {peer: info.expires if full else info.issued + MAX_LIFE for peer, info in self._records.items()}
        for peer_id in [peer_id for peer_id, end in ends.items() if end <= now]:
            del self._records[peer_id]
