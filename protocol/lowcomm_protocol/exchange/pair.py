"""One exchange of one fragment between two peers: who takes part, and whether it is applied.

    GATHERING   call candidates one after the other, accept a call
    CAPTURING   the partner is known; our contribution is captured at a step boundary and coded
    TRADING     both contributions travel at once
    CONFIRMING  each tells the other whose contributions it holds
    APPLIED     both said the same: the outer step is taken
    ENDED       nothing is applied, training goes on

What one stream carries:

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── content, chunk* ────► both              at once, in both directions
    both   ── confirm ────────────► both              "I hold exactly these contributions"

Only the last confirmation can leave two ends in doubt (one has applied, the other has not);
``in_doubt`` counts it, and the consensus term or a resync heals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import ClassVar

from lowcomm_protocol.exchange import base, events
from lowcomm_protocol.exchange.events import Cause, Effect, PeerEvent, Stage
from lowcomm_protocol.matching import Refusal


class PairState(StrEnum):
    """Where one stream stands, as seen from one end, besides the states of every kind."""

    AGREED = "agreed"  # accepted; our contribution is not captured yet
    RECEIVED = "received"  # as AGREED, and theirs has arrived whole
    STREAMING = "streaming"  # ours is on its way, theirs has not arrived
    PROMISED = "promised"  # as STREAMING, and they have confirmed
    HELD = "held"  # theirs has arrived whole
    READY = "ready"  # as HELD, and they have confirmed
    CONFIRMING = "confirming"  # we have confirmed, they have not


CAPTURED, VERIFIED, SETTLED, CONFIRMED = "captured", "verified", "settled", "confirmed"
"""Inputs: our contribution is coded; theirs has come; the exchange knows its members; they have
confirmed."""
HOLDING = frozenset({PairState.HELD, PairState.READY, PairState.CONFIRMING, base.DONE})
"""States in which their contribution may be used."""


def members_digest(members: Sequence[str]) -> bytes:
    """What a confirmation carries: SHA-256 over the sorted peer ids."""
    return sha256("\n".join(sorted(members)).encode()).digest()


@dataclass
class PairExchange(base.Gathering):
    """An exchange of two."""

    TRANSITIONS: ClassVar[base.Transitions] = base.with_failures(
        {
            (base.OFFERED, base.ACCEPTED_INPUT): PairState.AGREED,
            (base.OFFERED, base.REFUSED_INPUT): base.REFUSED,
            (PairState.AGREED, CAPTURED): PairState.STREAMING,
            (PairState.AGREED, VERIFIED): PairState.RECEIVED,
            (PairState.RECEIVED, CAPTURED): PairState.HELD,
            # They confirm only what they hold, so no confirmation can come before our content was
            # sent.
            (PairState.STREAMING, VERIFIED): PairState.HELD,
            (PairState.STREAMING, CONFIRMED): PairState.PROMISED,
            (PairState.PROMISED, VERIFIED): PairState.READY,
            (PairState.HELD, CONFIRMED): PairState.READY,
            (PairState.HELD, SETTLED): PairState.CONFIRMING,
            (PairState.READY, SETTLED): base.DONE,
            (PairState.CONFIRMING, CONFIRMED): base.DONE,
        }
    )

    DOUBTFUL: ClassVar[Stage] = Stage.CONFIRMING

    _next: int = 0
    _waiting: str = ""
    """The peer whose call waits."""
    _confirmed: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def _on_own(self, event: PeerEvent) -> list[Effect]:
        match event:
            case events.Knocked(peer=peer):
                self._waiting = peer
            case events.WentAway():
                self._waiting = ""
            case events.WholeContribution(peer=peer):
                self._advance(peer, VERIFIED)
                return self._settle()
            case events.Confirm(peer=peer, members=members):
                self._advance(peer, CONFIRMED)
                self._confirmed[peer] = members
                return self._conclude()
            case _:
                pass
        return []

    # GATHERING

    def _gather(self) -> list[Effect]:
        # One call at a time: a second peer that accepted would wait in vain.
        if self.partners or self._in(base.OFFERED):
            return super()._gather()
        while not self._waiting and self._next < len(self.candidates):
            peer = self.candidates[self._next]
            self._next += 1
            if peer not in self._members:
                self._members[peer] = base.ExchangeMember(base.OFFERED)
                return [events.Dial(peer=peer)]
        return self._close_gathering()

    def _close_gathering(self) -> list[Effect]:
        if self._waiting and not self.partners:
            peer, self._waiting = self._waiting, ""
            return [events.Admit(peer=peer)]
        return super()._close_gathering()

    def _begin(self) -> list[Effect]:
        self.stage = Stage.CAPTURING
        return [events.Capture(members=tuple(sorted([self.me, *self.partners])))]

    # CAPTURING, TRADING

    def _on_captured(self) -> list[Effect]:
        self.stage = Stage.TRADING
        (partner,) = self.partners
        self._advance(partner, CAPTURED)
        return [events.WholeContribution(peer=partner), *self._settle()]

    def _settle(self) -> list[Effect]:
        holders = self._in(*HOLDING)
        if self.stage is not Stage.TRADING or not holders:
            return []
        self.stage = Stage.CONFIRMING
        (partner,) = holders
        self._advance(partner, SETTLED)
        digest = members_digest([self.me, partner])
        return [events.Confirm(peer=partner, members=digest), *self._conclude()]

    # CONFIRMING

    def _conclude(self) -> list[Effect]:
        if self.stage is not Stage.CONFIRMING:
            return []
        (partner,) = self.partners
        confirmed, members = self._confirmed.get(partner), tuple(sorted([self.me, partner]))
        if confirmed is None:
            return []
        if confirmed != members_digest(members):
            # A peer that said otherwise has not applied our members, so no doubt is left.
            return self._end("the members do not hold the same contributions", Cause.DISAGREED)
        self.stage = Stage.APPLIED
        offer = self._members[partner].offer
        assert offer is not None
        return [events.Apply(members=members, swarm_step=offer.swarm_step)]

    # any stage

    def _on_lost(self, peer: str, reason: str, cause: Cause | Refusal) -> list[Effect]:
        self._lose(peer, reason, cause)
        if self.stage is Stage.CONFIRMING:
            # It may have our confirmation, and have applied.
            return self._give_in(f"{reason} before everybody had confirmed", cause)
        return self._gather() if self.stage is Stage.GATHERING else self._give_in(reason, cause)

    def _on_deadline(self, *, first: bool) -> list[Effect]:
        if self.stage is Stage.TRADING:
            reason = "was too slow for the deadline"
            effects = self._give_up(self.partners, reason, Cause.LATE)
            return effects + self._give_in(base.no_partner(self.refusals), Cause.LATE)
        if self.stage is Stage.CONFIRMING and first:
            # Their confirmation may be on its way: ending now would put both ends in doubt.
            return []
        return self._give_in("ran past its deadline", Cause.LATE)
