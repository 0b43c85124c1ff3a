"""One exchange of one fragment in a group: reduce-scatter and all-gather over direct streams.

    GATHERING, AGREEING   ``agreeing.py``
    CAPTURING   the fragment is cut in one shard a member, in sorted order; our contribution is
                captured and coded
    REDUCING    everybody sends every member its contribution to the shard that this member owns
    AVERAGING   every owner sends all the mean of its shard
    CONFIRMING  everybody tells all the digests of the means that it holds (held)
    COMMITTING  everybody tells all which shards it would apply, and whose digests it has heard
                of (commit)
    APPLIED     the shards that most would apply are applied
    ENDED       nothing is applied, training goes on

What one stream carries:

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── roll ───────────────► both              "I hold streams with these peers"
    both   ── members ────────────► both              "the members are"; a lower list may follow
    donor  ── content, chunk* ────► receiver          outer steps that the receiver lacks, if any
    both   ── content, chunk* ────► both              our contribution to the shard of the other
    both   ── content, chunk* ────► both              the mean of our shard
    both   ── held ───────────────► both              "I hold the means with these digests"
    both   ── commit ─────────────► both              "I would apply these shards; helds I heard"

A member that is lost costs its own shard, and no more. ``tally.py`` decides which shards are
applied. We are in doubt if votes are missing that could decide, if others apply a shard that we
lack, or if a member did not answer our commit. Where all must hold the same slow weights, a member
that lacks such a shard applies nothing but the steps that it has taken over: so what it holds is
what others held before, and they can hand over the rest.
"""

from dataclasses import dataclass
from typing import ClassVar

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.agreeing import AgreeingExchange, GroupInput, GroupState
from lowcomm_protocol.exchange.base import DONE, no_partner
from lowcomm_protocol.exchange.events import Cause, Effect, PeerEvent, Stage
from lowcomm_protocol.exchange.tally import DIGEST_BYTES
from lowcomm_protocol.matching import Refusal

HAVE_GIVEN = frozenset({GroupState.GIVEN, GroupState.AVERAGED, GroupState.TOLD, DONE})
"""States in which their contribution to our shard may be used."""
NOT_TOLD = (GroupState.MEMBER, GroupState.GIVEN, GroupState.AVERAGED)
"""States of members that have not said which means they hold."""
VOIDED = 2
"""Shards of others that a member must leave out, and all others apply, until it is a stumble: one
may be missing because a stream broke, or because its owner lied to this member alone."""
SILENT = 2
"""Looks at who holds up the others after which those that have committed go on."""
OUTVOTE = 4
"""Members from which on a group keeps one whose contribution can't be used: a group that lost it
would be outvoted. Of fewer, its mean is worth less than the shard that is lost with it."""


@dataclass
class GroupExchange(AgreeingExchange):
    """An exchange of a group."""

    DOUBTFUL: ClassVar[Stage] = Stage.COMMITTING

    _receivers: tuple[str, ...] = ()
    """Members that we hand over what they have missed."""
    _donor: str = ""
    """The member that hands over what we have missed, until that has come."""
    _took_over: bool = False
    _equal: bool = False
    """Whether all must hold the same slow weights."""
    _stranded: bool = False
    """Whether ours are others than those of most, and nobody can hand over the steps between."""
    _reduce_closed: bool = False
    _unanswered: bool = False
    """Whether a member was lost that has not answered our commit."""

    def _on_own(self, event: PeerEvent) -> list[Effect]:
        match event:
            case events.Roll(peer=peer, roll=roll):
                return self._on_roll(peer, roll)
            case events.Members(peer=peer, members=members):
                return self._on_members(peer, members)
            case events.AgreeingClosed():
                if self.stage is Stage.AGREEING:
                    return self._on_agreeing_closed()
                if self.stage is Stage.COMMITTING:
                    self._waited += 1
                    if self._waited >= SILENT and self.tally.outcome().is_certain:
                        return self._go_on_without_silent()
            case events.Equal(least=least):
                self._equal, self._least = True, least
            case events.Missed(receivers=receivers, donor=donor, stranded=stranded):
                self._receivers, self._donor, self._stranded = receivers, donor, stranded
            case events.MissedSteps(peer=peer):
                return self._on_missed(peer)
            case events.Shard(peer=peer):
                self._advance(peer, GroupInput.SHARD)
                return self._settle()
            case events.ReduceClosed():
                self._reduce_closed = True
                return self._settle()
            case events.Reduced(digest=digest):
                return self._on_reduced(digest)
            case events.ShardMean(peer=peer, digest=digest):
                return self._on_mean(peer, digest)
            case events.Holdings(peer=peer, held=held):
                if self._next_state(peer, GroupInput.HELD) is not None:
                    self.tally.add_held(peer, held)
                    self._advance(peer, GroupInput.HELD)
                    return self._settle()
            case events.ConfirmingClosed():
                if self.stage is Stage.CONFIRMING:
                    why = "did not tell in time what it holds"
                    return self._give_up(self._in(*NOT_TOLD), why, Cause.LATE) + self._go_on()
            case events.Commit(peer=peer, shards=shards, heard=heard):
                if self._next_state(peer, GroupInput.COMMIT) is not None:
                    self.tally.add_commit(peer, shards, heard)
                    self._advance(peer, GroupInput.COMMIT)
                    return self._settle()
            case _:
                pass
        return []

    # CAPTURING, REDUCING, AVERAGING

    def _on_captured(self) -> list[Effect]:
        self.stage = Stage.REDUCING
        here = [peer for peer in self._receivers if peer in self.partners]
        missed = [events.MissedSteps(peer=peer) for peer in here]
        return [*missed, *self._to_all(events.Shard), *self._settle()]

    def _on_missed(self, peer: str) -> list[Effect]:
        if self._next_state(peer, GroupInput.MISSED) is None:
            return []
        if peer != self._donor:
            # A third may have offered the two of us different slow weights.
            why = "handed over steps that we do not wait for"
            return self._give_up([peer], why, Cause.DISAGREED) + self._go_on()
        self._donor, self._took_over = "", True
        return self._settle()

    def _on_reduced(self, digest: bytes) -> list[Effect]:
        if self.me in self.tally.helds:
            return []  # We have said that we do not hold it: it comes too late.
        expected = self.stage is Stage.AVERAGING and self.me not in self.tally.means
        if not expected or len(digest) != DIGEST_BYTES:
            raise ProtocolViolation(f"A mean of ours is not expected while {self.stage.value}.")
        self.tally.means[self.me] = digest
        return [*self._to_all(events.ShardMean, digest=digest), *self._settle()]

    def _on_mean(self, peer: str, digest: bytes) -> list[Effect]:
        if self._next_state(peer, GroupInput.MEAN) is None:
            return []
        if len(digest) != DIGEST_BYTES:
            raise ProtocolViolation(
                f"The mean of {peer} has a digest of {len(digest)} bytes, not {DIGEST_BYTES}."
            )
        self._advance(peer, GroupInput.MEAN)
        self.tally.means[peer] = digest
        return self._settle()

    # From stage to stage: as far as what has come allows

    def _settle(self) -> list[Effect]:
        effects: list[Effect] = []
        # One event may complete several stages, such as the loss of the member that all wait for.
        if self.stage is Stage.REDUCING and (
            self._reduce_closed or not self._in(GroupState.MEMBER)
        ):
            self.stage = Stage.AVERAGING
            contributors = tuple(sorted([self.me, *self._in(*HAVE_GIVEN)]))
            effects.append(events.Reduce(contributors=contributors))
        if self.stage in (Stage.REDUCING, Stage.AVERAGING) and not (
            self._donor or self.tally.awaits((self.me, *self.partners))
        ):
            effects += self._confirm()
        if self.stage is Stage.CONFIRMING and not self._in(*NOT_TOLD):
            self.stage, self._waited = Stage.COMMITTING, 0
            shards, heard = self.tally.commit()
            effects += self._to_all(events.Commit, shards=shards, heard=heard)
        if self.stage is Stage.COMMITTING and not self._in(GroupState.TOLD):
            effects += self._conclude()
        return effects

    def _confirm(self) -> list[Effect]:
        self.stage, held = Stage.CONFIRMING, self.tally.hold()
        return [*self._to_all(events.Holdings, held=held)]

    def _conclude(self) -> list[Effect]:
        result = self.tally.outcome()
        behind = result.is_outvoted and self._equal
        doubt = self._unanswered or result.is_outvoted or not result.is_certain
        voids = self.tally.voids(result.applied)
        voiding = [peer for peer, count in voids.items() if count >= VOIDED]
        left_out = "left out means that most others hold and apply"
        effects: list[Effect] = [events.Stumbled(peer=peer, reason=left_out) for peer in voiding]
        shards = (False,) * len(self.members) if behind else result.applied
        why = ""
        if self._stranded:
            why = "our slow weights are others than those of most, which nobody can hand over"
        elif not any(shards) and not self._took_over:
            why = "most apply means that we lack" if behind else "too few hold the same mean"
        if why:
            return [*effects, *self._end(why, Cause.DISAGREED, in_doubt=doubt)]
        self.stage, self.in_doubt = Stage.APPLIED, doubt
        swarm_step = max(offer.swarm_step for offer in self.offers(self.partners).values())
        return [*effects, events.Apply(members=self.members, swarm_step=swarm_step, shards=shards)]

    def _go_on_without_silent(self) -> list[Effect]:
        silent, why = self._in(GroupState.TOLD), "did not commit in time"
        return self._give_up(silent, why, Cause.LATE) + self._go_on()

    # any stage

    def _on_lost(self, peer: str, reason: str, cause: Cause | Refusal) -> list[Effect]:
        self._lose(peer, reason, cause)
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        if self.stage in (Stage.GATHERING, Stage.AGREEING):
            return super()._go_on()
        if not self.partners:
            why = f"nobody else is left of the group: {no_partner(self.refusals)}"
            return self._give_in(why, self._common_cause())
        if self._donor and self._donor not in self.partners:
            # What the others agree on means nothing to us without the steps before it.
            return self._give_in("what we had missed does not come", Cause.LOST)
        return self._settle()

    def _lose(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        # Its commit may be lost on the way: then it has applied what we do not.
        is_due = self.stage is Stage.COMMITTING and peer in self._in(GroupState.TOLD)
        self._unanswered = self._unanswered or is_due
        super()._lose(peer, reason, cause)

    def _on_deadline(self, *, first: bool) -> list[Effect]:
        if self._donor:
            return self._give_in("what we had missed did not come in time", Cause.LATE)
        if self.stage in (Stage.REDUCING, Stage.AVERAGING):
            if not set(self.tally.means) - {self.me}:
                # To say that we hold nothing would keep everybody from applying what they all hold.
                why = "no mean of another member came before its deadline"
                return self._give_in(why, Cause.LATE)
            return self._confirm() + self._settle()
        if self.stage in (Stage.CONFIRMING, Stage.COMMITTING) and first:
            return []  # What others tell may be on its way.
        if self.stage is Stage.COMMITTING:
            # Those that have committed apply what we know of, most likely: they are more, and so we
            # go with them.
            return self._go_on_without_silent()
        return self._give_in("ran past its deadline", Cause.LATE)
