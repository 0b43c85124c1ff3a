"""Admission to a run, as its specification says: any peer, the peers that it names, or peers with a
claim on an invite of its creator. The creator is always admitted, removed peers never are.

**The uses of an invite** can't be counted by a single peer, so all follow one rule: of all known
claims on an invite, the earliest count, by (time of claim, peer id), as many as it has uses. So
peers that have heard the same claims decide the same. The holder of a token chooses the time of its
claim, so it can displace others who came by *the same* invite, but never members that came by
another (docs/run.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import AdmissionError, LowcommError, Reason
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.invites import Claim, Invite, Removals, read_claim, read_removals
from lowcomm_protocol.peers.records import MAX_CLOCK_SKEW
from lowcomm_protocol.spec.run import RunSpec, SignedRun

MAX_CLAIMS = 4096
"""Claims of one run that are kept, over all invites."""
MAX_PEER_ID = 64
"""Characters of a peer id, at most."""
MAX_TOLD = 32
"""Uses in one Introduction."""


@dataclass(frozen=True)
class Rules:
    """A specification's rules of admission. They need no memory, so any DHT peer can apply them."""

    run_id: str
    creator: str
    admission: Literal["open", "invite", "list"] = "open"
    members: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: SignedRun, spec: RunSpec | None = None) -> "Rules":
        """The rules of a run; ``spec``: its amended settings, if any."""
        settings = (spec or run.spec).run
        return cls(run.run_id, run.creator, settings.admission, frozenset(settings.members))

    def check(self, peer_id: str, claim: bytes, now: float) -> Claim | None:
        """The claim by which a peer may join at ``now``, if it needs one. Raises AdmissionError."""
        if self.admission == "open" or peer_id == self.creator:
            return None
        if self.admission == "list":
            if peer_id not in self.members:
                raise AdmissionError(
                    f"{peer_id} is not on the list of this run's members: its creator "
                    f"({self.creator}) would have to publish a run that names it.",
                    reason=Reason.NOT_LISTED,
                )
            return None
        if not claim:
            raise AdmissionError(
                f"This run takes invited peers only, and {peer_id} shows no invite: ask the run's "
                "creator for one."
            )
        read = read_claim(claim, peer_id)
        read.invite.check_for(self.run_id, peer_id, now)
        if read.claimed_ms / 1000 > min(read.invite.expires, now + MAX_CLOCK_SKEW):
            raise AdmissionError(
                "A claim from the future is refused: set both clocks right.",
                reason=Reason.FROM_FUTURE,
            )
        return read


class Admission:
    """One peer's knowledge of admission to its run. ``MAX_CLAIMS`` bounds its memory."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.removals = Removals()
        self._uses: dict[bytes, dict[str, Claim]] = {}
        """By the key of the invite: the claims that count, by peer id."""
        self._came_by: dict[str, Claim] = {}
        """The valid claim that each peer has shown last."""
        self._told = 0

    def check(self, peer_id: str, claim: bytes, now: float) -> None:
        """Admit a peer that shows ``claim``, maybe empty. Raises AdmissionError, SignatureError."""
        known = self._known(peer_id)
        if known is not None and known.data == claim:
            self._check_known(known, now)
        else:
            read = self.rules.check(peer_id, claim, now)
            if read is not None:
                self._take(read, now, shown=True)
                self._check_invite(read.invite)
        # Last, because a removed peer has used up its invite all the same.
        self._check_removed(peer_id)

    def barred(self, peer_id: str, now: float) -> bool:
        """Whether a peer may not take part any more, or was never admitted."""
        try:
            self._check_removed(peer_id)
            if (known := self._known(peer_id)) is not None:
                self._check_known(known, now)
            else:
                self.rules.check(peer_id, b"", now)
        except AdmissionError:
            return True
        return False

    def hear_removals(self, data: bytes) -> bool:
        """Take in a removal list; whether it is newer. Raises RecordError or SignatureError."""
        if data == self.removals.data:
            return False
        heard = read_removals(data, self.rules.creator)
        if heard.run_id != self.rules.run_id or heard.order <= self.removals.order:
            return False
        self.removals = heard
        return True

    # uses that were made, told to those who have not met who made them

    def hear_uses(self, uses: Iterable[pb.Use], now: float) -> None:
        """Take in claims that another peer reports, up to one that no honest peer would report."""
        for use in list(uses)[:MAX_TOLD]:
            if len(use.peer_id) > MAX_PEER_ID or self.rules.admission != "invite":
                return
            known = self._known(use.peer_id)
            if known is not None and known.data == use.claim:
                continue
            try:
                read = self.rules.check(use.peer_id, use.claim, now)
                if read is not None:
                    self._take(read, now, shown=False)
            except LowcommError as error:
                if error.reason not in (Reason.INVITE_USED_UP, Reason.INVITE_EXPIRED):
                    return

    def uses_to_tell(self, alive: frozenset[str]) -> list[pb.Use]:
        """Some claims of absent peers, others each time; alive peers have theirs in records."""
        absent = [claim for claim in self._claims() if claim.peer_id not in alive]
        start = self._told % len(absent) if absent else 0
        self._told += MAX_TOLD
        return _in_messages((absent[start:] + absent[:start])[:MAX_TOLD])

    def to_bytes(self) -> bytes:
        """All claims that count, for the disk."""
        return pb.Uses(uses=_in_messages(self._claims())).SerializeToString()

    def load(self, data: bytes, now: float) -> None:
        """The counterpart of ``to_bytes``. Damaged and expired claims are skipped."""
        try:
            uses = pb.Uses.FromString(data).uses
        except DecodeError:
            return
        for use in uses:
            self.hear_uses([use], now)

    # the rule

    def _take(self, claim: Claim, now: float, *, shown: bool) -> None:
        """Verify a claim and keep it if it is among the earliest.

        ``shown``: by the peer itself. Reports of others never replace a shown claim: the holder of
        an invite can claim it in any peer's name. Raises AdmissionError, SignatureError.
        """
        uses = self._uses.get(claim.invite.key, {})
        earlier = sum(
            other.rank < claim.rank for other in uses.values() if other.peer_id != claim.peer_id
        )
        if earlier >= claim.invite.uses:
            # Checked before signatures, so that a leaked invite costs us little.
            raise AdmissionError(
                f"All {claim.invite.uses} uses of the invite {claim.invite.invite_id} were "
                f"claimed before {claim.peer_id} came: ask the run's creator for another invite.",
                reason=Reason.INVITE_USED_UP,
            )
        claim.verify(self.rules.creator)
        mine = uses.get(claim.peer_id)
        if mine is None and len(self._claims()) >= MAX_CLAIMS:
            self._forget_expired(now)
            if len(self._claims()) >= MAX_CLAIMS:
                raise AdmissionError(
                    f"More than {MAX_CLAIMS} peers came by invites of this run: no more are taken.",
                    reason=Reason.TOO_MANY,
                )
        if mine is None or claim.rank < mine.rank:
            uses = self._uses.setdefault(claim.invite.key, {})
            uses[claim.peer_id] = claim
            while len(uses) > claim.invite.uses:
                latest = max(uses.values(), key=lambda other: other.rank)
                del uses[latest.peer_id]
                if self._came_by.get(latest.peer_id) == latest:
                    del self._came_by[latest.peer_id]
            mine = claim
        known = self._came_by.get(claim.peer_id)
        if shown or known is None or known.invite.key == claim.invite.key:
            self._came_by[claim.peer_id] = mine

    def _known(self, peer_id: str) -> Claim | None:
        """The claim by which a peer was admitted."""
        return self._came_by.get(peer_id) if self.rules.admission == "invite" else None

    def _check_known(self, known: Claim, now: float) -> None:
        known.invite.check_for(self.rules.run_id, known.peer_id, now)
        self._check_invite(known.invite)

    def _check_removed(self, peer_id: str) -> None:
        if peer_id in self.removals.ids and peer_id != self.rules.creator:
            raise AdmissionError(
                f"{peer_id} was removed from this run by its creator.", reason=Reason.REMOVED
            )

    def _check_invite(self, invite: Invite) -> None:
        if self.removals.ids and invite.invite_id in self.removals.ids:
            raise AdmissionError(
                f"The invite {invite.invite_id} was taken back by the run's creator: ask for "
                "another.",
                reason=Reason.REMOVED,
            )

    def _claims(self) -> list[Claim]:
        return [claim for uses in self._uses.values() for claim in uses.values()]

    def _forget_expired(self, now: float) -> None:
        for key, uses in list(self._uses.items()):
            if all(claim.invite.expires <= now for claim in uses.values()):
                del self._uses[key]
        self._came_by = {
            peer: claim for peer, claim in self._came_by.items() if claim.invite.expires > now
        }


def _in_messages(claims: Iterable[Claim]) -> list[pb.Use]:
    return [pb.Use(peer_id=claim.peer_id, claim=claim.data) for claim in claims]
