"""The roster: peers with a valid signed record, and which of them have proved to be alive."""

from collections import OrderedDict
from hashlib import sha256
from math import inf

from lowcomm_protocol.errors import LowcommError, RecordError
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.liveness import Liveness
from lowcomm_protocol.peers.records import (
    MAX_LIFE,
    MAX_RECORD_BYTES,
    PeerInfo,
    Phase,
    is_from_future,
    read_record,
)
from lowcomm_protocol.refusals import Reason, Refusals, What

MAX_PEERS = 4096
SWEEP_EVERY = 5.0
"""Seconds between two sweeps of useless records."""
_REMEMBERED = 2 * MAX_PEERS


class Roster:
    """The peers of one run that may take part in it, without our own.

    Holds at most ``MAX_PEERS`` records.
    """

    def __init__(
        self,
        own_peer_id: str,
        run_id: str,
        admission: Admission | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        self.own_peer_id = own_peer_id
        self.run_id = run_id
        self.admission = admission or Admission(Rules(run_id, creator=""))
        """Without one any peer may take part."""
        self.liveness = Liveness(own_peer_id)
        """Signs of life. A record costs its writer nothing, and proves nothing."""
        self._refusals = refusals or Refusals()
        self._records: dict[str, PeerInfo] = {}
        self._swept = float("-inf")
        self._heard: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Digests of records, and the times from and to which there is no need to look again."""

    def hear(self, data: bytes, now: float, sender: str | None = None) -> PeerInfo | None:
        """Take in a serialized signed record. Returns its contents if they are new and valid, else
        None.

        With a ``sender`` only its own record is believed. Refusals are counted, the same bytes
        once.
        """
        digest = sha256(data).digest() if len(data) <= MAX_RECORD_BYTES else b""
        since, until = self._heard.get(digest, (inf, -inf))
        if since <= now <= until:
            return None  # the DHT repeats the same records
        try:
            info = self._read(data, now, sender)
        except LowcommError as error:
            if digest not in self._heard:
                self._refusals.count(What.RECORD, error.reason)
            # A misplaced record may be valid in its place, and one that is too long is not hashed.
            if error.reason not in (Reason.MISPLACED, Reason.TOO_LARGE):
                # A clock that is set right may bear out what it was against.
                since = now if error.reason is Reason.EXPIRED else -inf
                until = now if error.reason is Reason.FROM_FUTURE else inf
                self._remember(digest, since, until)
            return None
        known = self._records.get(info.peer_id)
        if known is not None and is_from_future(known.issued, now):
            known = None  # both clocks were ahead when it came
        if info.peer_id == self.own_peer_id or (known is not None and info.issued <= known.issued):
            self._remember(digest)
            return None
        self._sweep(now)
        is_full = info.peer_id not in self._records and len(self._records) >= MAX_PEERS
        if is_full and not self._make_room(now, sender):
            return None
        self._remember(digest)
        self._records[info.peer_id] = info
        return info

    def get(self, peer_id: str, now: float) -> PeerInfo | None:
        """The newest valid record of a peer that may take part."""
        info = self._records.get(peer_id)
        return info if info is not None and self._holds(info, now) else None

    def known(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers with a valid record that may take part, alive or not, unordered."""
        return tuple(info for info in self._records.values() if self._holds(info, now))

    def alive(self, now: float) -> tuple[PeerInfo, ...]:
        """Those of them that have answered or called us recently, ordered by id."""
        proved = (
            info for info in self._records.values() if self.liveness.is_proved(info.peer_id, now)
        )
        return tuple(
            sorted(
                (info for info in proved if self._holds(info, now)), key=lambda info: info.peer_id
            )
        )

    def in_phase(self, phase: Phase, now: float) -> tuple[PeerInfo, ...]:
        """The alive peers in one phase."""
        return tuple(info for info in self.alive(now) if info.phase is phase)

    def partners(self, now: float) -> tuple[PeerInfo, ...]:
        """The peers that train, are alive, and answer offers: candidates for exchanges."""
        return tuple(
            info
            for info in self.in_phase(Phase.TRAINING, now)
            if self.liveness.is_alive(info.peer_id, now)
        )

    def _read(self, data: bytes, now: float, sender: str | None) -> PeerInfo:
        info = read_record(data, now)
        if info.run_id != self.run_id or sender not in (None, info.peer_id):
            raise RecordError(
                f"A record of {info.peer_id} that {sender or 'somebody'} told as its own, or of "
                "another run, is refused.",
                reason=Reason.MISPLACED,
            )
        self.admission.check(info.peer_id, info.claim, now)
        return info

    def _make_room(self, now: float, sender: str | None) -> bool:
        """Evict the oldest record of a peer that has never answered, so that such records can't
        fill the roster.

        A record from the DHT replaces one that was probed in vain; a calling peer's record replaces
        any.
        """
        liveness = self.liveness
        for peer_id in self._records:
            if not liveness.is_proved(peer_id, now) and (
                sender is not None or not liveness.is_untried(peer_id, now)
            ):
                del self._records[peer_id]
                return True
        return False

    def _holds(self, info: PeerInfo, now: float) -> bool:
        # Checked each time: removals, expired invites and earlier claims take effect at once.
        return (
            info.expires > now
            and info.phase is not Phase.LEFT
            and not self.admission.barred(info.peer_id, now)
        )

    def _remember(self, digest: bytes, since: float = -inf, until: float = inf) -> None:
        self._heard[digest] = since, until
        if len(self._heard) > _REMEMBERED:
            self._heard.popitem(last=False)

    def _sweep(self, now: float) -> None:
        if abs(now - self._swept) < SWEEP_EVERY:
            return  # thousands of records may come at once
        self._swept = now
        # Keep a record until no older one can be valid any more, because that would bring back a
        # peer that has left. In a full roster, keep it only until it expires.
        full = len(self._records) >= MAX_PEERS
        ends = {
            peer: info.expires if full else info.issued + MAX_LIFE
            for peer, info in self._records.items()
        }
        for peer_id in [peer_id for peer_id, end in ends.items() if end <= now]:
            del self._records[peer_id]
