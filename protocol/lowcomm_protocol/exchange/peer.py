"""One peer as a pure machine: what is due, who takes part, who is trusted, and for how long.

    Stepped ─► due? ─► an exchange of our own ──┐
    Called ─► consider ─► one of ours, or new ──┴─► effects ─► driver ─► events ─► ... ─► Over

Events go in with the time, effects come out; ``events.py`` has both. The machine reads no clock and
does no I/O. What it may look up is in `PeerView`. The daemon, the simulator and the tests drive
it: they carry out effects and report what comes of them as events, and send `Tick` when the time of
``next_timer`` has come."""

from collections import Counter
from collections.abc import Sequence

from lowcomm_protocol.errors import Offence, ProtocolViolation
from lowcomm_protocol.exchange import base, events
from lowcomm_protocol.exchange.budget import Budget, Deadlines
from lowcomm_protocol.exchange.events import Cause, Effect, Outcome, PeerEvent, PeerView, Stage
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.exchange.position import Drift, OwnLine, Position, RecentPartners
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import Offer, Refusal, candidates, consider, lot, wins_crossing
from lowcomm_protocol.peers.trust import Trust
from lowcomm_protocol.spec.run import RunSpec

PATIENCE = 2
"""Exchanges of a fragment in a row that are left to a larger part of the group."""
MANY = 16
"""Peers that meet others, after which a fragment is tried again before its next sync. In a small
swarm with an odd number of peers one is left over each time."""
HURRY = 2
"""Usual times that a group gets whose members include a peer that has kept us waiting."""
_TAKEN = (Refusal.BUSY, Refusal.TOO_SOON)
# Refusals by which a peer says that we are wrong. Enough of them, and we copy a state (`Drift`).
_LEAVES_US_OUT = (Refusal.NOT_TRUSTED, Refusal.IMPLAUSIBLE_STEP)


class Peer:
    """Every exchange of one peer."""

    def __init__(
        self,
        me: str,
        spec: RunSpec,
        run_id: str,
        surroundings: PeerView,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.me = me
        self.spec = spec
        self.kind = kind_of(spec.sync)
        self.trust = Trust(spec.sync.interval)
        self.own_line = OwnLine()
        self.position = Position(me, spec, run_id, surroundings)
        self.drift = Drift(self.position, surroundings)
        self.recent = RecentPartners()
        self.open = False
        """Whether we exchange now: training, and not leaving."""
        self.running: dict[int, Underway] = {}
        """By fragment."""
        where = self.position, surroundings, self.running
        self.budget = Budget(deadlines or Deadlines(), self.kind, *where)
        self.muted: set[str] = set()
        """Peers that we do not trust, though most others of a group take part with them. So do we,
        but we use no contribution of theirs: else a peer that lies to us alone would part us from
        the group."""
        self._minority: Counter[int] = Counter()
        """Exchanges of a fragment in a row that had too few members."""
        self._around = surroundings
        self._number = 0
        self._now = 0.0
        self._effects: list[Effect] = []

    # events in, effects out

    def handle(self, now: float, event: PeerEvent) -> list[Effect]:
        """Take in an event at a time, in seconds of a clock that never goes back; what to carry
        out, in this order."""
        self._now = now
        self._take_in(event)
        effects, self._effects = self._effects, []
        return effects

    @property
    def next_timer(self) -> float | None:
        """When `Tick` is due; None while it is not."""
        first: float | None = None
        for one in self.running.values():  # asked for after each event
            if one.timers and (first is None or one.timers[0][0] < first):
                first = one.timers[0][0]
        return first

    def _take_in(self, event: PeerEvent) -> None:
        if event.exchange and not isinstance(event, events.Released):
            one = self.exchange(event.exchange)
            if one is not None:  # or it was over before
                self._take_in_exchange(one, event)
            return
        match event:
            case events.TrainerReady():
                self.position.take_over(event)
                self.drift.restart()
                self.recent = RecentPartners()
                self.budget.pace.clear()
                self.budget.closing.clear()  # they keep to the memory that they began with
            case events.Stepped():
                self._on_step(event)
            case events.Opened():
                self.open = True
            case events.Closed():
                self.open = False
                self.drift.left_out_by.clear()
            case events.GaveUp():
                for one in list(self.running.values()):
                    self._tell(one, event)
            case events.Called():
                self._on_call(event)
            case events.CallDropped(call=call):
                self._on_call_dropped(call)
            case events.Misbehaved(peer=peer, deed=deed, reason=reason):
                self._hold(peer, deed, reason)
            case events.StateCopied(seconds=seconds):
                self.drift.rest.copied(seconds, self._now)
            case events.DriftEndured():
                self.drift.endure()
            case events.Tick():
                self._on_tick()
            case events.Released(exchange=number):
                self.budget.closing.discard(number)
            case _:
                pass  # of an exchange, but without its number

    def _take_in_exchange(self, one: Underway, event: PeerEvent) -> None:
        match event:
            case events.MemberMessage():  # most events are
                self._tell(one, event)
            case events.Accepted(peer=peer):
                self._on_answer(one, peer, event)
            case events.Refused(peer=peer, reason=reason):
                one.calling.discard(peer)
                if reason in _LEAVES_US_OUT:
                    self.drift.left_out(peer)
                self._tell(one, event)
            case events.Lost():
                self._on_lost(one, event)
            case events.Unused(peer=peer, deed=deed, reason=reason):
                one.muted |= {peer}
                if deed is not None:
                    self._hold(peer, deed, reason)
            case events.Coming(seconds=seconds):
                most = self.budget.deadline_for(one.fragment, one.asked, self._now)
                self._extend(one, min(seconds * one.kind.contents, most))
            case events.ContentCame(peer=peer, line=line):
                one.come.setdefault(peer, self._now - one.began)
                self.own_line.stalled_peers.clear()
                self.budget.came(line, self._now)
            case events.Merged():
                self._on_merged(one, event)
            case events.Dropped(reason=reason, measured=measured):
                outcome = Outcome.FAILED if one.members else Outcome.NO_PARTNER
                self._finish(one, outcome, reason, measured)
            case _:
                self._tell(one, event)

    # what is due

    def _on_step(self, step: events.Stepped) -> None:
        self.position.stepped(step)
        self.budget.pace.append(step.seconds)
        if not self.open or self.kind is None:
            return
        for fragment in self.position.schedule.due(self.position.swarm_step):
            if (one := self.running.get(fragment)) is None:
                self._begin(fragment)
            elif one.call is not None:
                self._wait_for(one)

    def _wait_for(self, one: Underway) -> None:
        """One of our own waits for the exchange of a caller, which gives way if it takes longer
        than usual."""
        one.due = self._now if one.due is None else one.due
        if self.budget.gives_way(one, self._now):
            assert one.call is not None
            if self._now > one.due and one.call.peer not in one.come:
                self._hold_stall(one, one.call.peer, "kept one of our own waiting", one.due)
            self._give_way(one)

    def _give_way(self, one: Underway) -> None:
        why = "took longer than usual, and one of our own was due"
        self._tell(one, events.GaveUp(reason=why, cause=Cause.GAVE_WAY))

    def _begin(self, fragment: int) -> None:
        if self.drift.must_copy(self._now):
            self._effects.append(events.Drifted())
            return  # what others bring would look like lies to us
        # Callers alone, who may be slow on purpose, never keep us from one of our own.
        own = any(one.call is None and one.decided is None for one in self.running.values())
        if not self.budget.has_memory:
            late = [one for one in self.running.values() if self.budget.gives_way(one, self._now)]
            if late and not self.budget.closing:
                self._give_way(late[0])
            return  # as many are under way as fit; it stays due
        if own and self.budget.fills_line(self._now):
            return
        # It stays due, too. ``hindrance`` tells the owner which limit to raise.
        if not self.budget.allows(self.budget.needs_now(fragment, self._now)):
            return
        offer = self._offer(
            fragment, self.position.schedule.round_of(fragment, self.position.swarm_step)
        )
        one = self._new(offer, self._candidates(fragment, offer.round))
        self._carry_out(one, one.machine.start())

    def _new(
        self, offer: Offer, peers: Sequence[str], call: events.Called | None = None
    ) -> Underway:
        assert self.kind is not None
        self._number += 1
        machine = self.kind.machine(self.me, peers, self.spec.sync.group)
        one = Underway(self._number, self.kind, machine, offer, self._now, call)
        self.running[offer.fragment] = one
        one.needs = self.budget.needed(offer.fragment, offer.seconds, self._now)
        one.usual = self.budget.deadline_for(offer.fragment, offer.seconds, self._now)
        one.set_timers(self.budget.deadlines.hello, one.usual)
        self._effects.append(events.Began(exchange=one.number))
        if self.spec.sync.consensus == 0:
            # Peers that refuse on purpose do not hold up a group for long.
            patient = self._minority[offer.fragment] < PATIENCE
            # When a run begins not all know each other yet.
            begins = offer.version == 0
            together = min(self.spec.run.start_peers, self.spec.sync.group) if begins else 1
            self._tell(one, events.Equal(least=together // 2 + 1 if patient else None))
        return one

    def exchange(self, number: int) -> Underway | None:
        """An exchange that is under way."""
        for one in self.running.values():
            if one.number == number:
                return one
        return None

    def _candidates(self, fragment: int, round_: int) -> Sequence[str]:
        # Few, of what may be thousands.
        left_out = set(self.trust.left_out(self.position.steps)) - self.muted
        trusted = [peer for peer in self._around.partners() if peer not in left_out]
        seed, sync = self.spec.run.seed, self.spec.sync
        return candidates(seed, fragment, round_, self.me, trusted, sync.group, sync.pairing)

    def _offer(self, fragment: int, number: int) -> Offer:
        needs, longest = self.budget.needs_now(fragment, self._now), self.budget.deadlines.longest
        return self.position.offer(fragment, number, needs.offered(longest))

    # room and time

    def _has_room_for(self, call: events.Called, fragment: int) -> bool:
        assert self.kind is not None
        if self.kind.all_call:
            # A group would do without us, and slow weights that must be equal would part.
            return self.budget.has_memory
        if not self.budget.has_memory or self.budget.fills_line(self._now):
            return False
        if self.budget.has_place_for(call.place):
            return True
        # Whom we would call ourselves takes no more than we would give it. The round is ours: a
        # caller could choose one that suits it.
        now = self.position.schedule.round_of(fragment, self.position.swarm_step)
        rounds = (now, now + 1)
        return any(call.peer == next(iter(self._candidates(fragment, one)), None) for one in rounds)

    def _allow(self, one: Underway, longer: float = 1.0) -> None:
        """Wait as long as the members need, as far as we know that, and within what our owner
        allows; ``longer``: times as long as they say."""
        peers = {*one.partners, *one.members} - {self.me}
        offers = {peer: offer.seconds for peer, offer in one.machine.offers(peers).items()}
        asked = longer * max([one.offer.seconds, *offers.values()])
        one.asked = max(one.asked, asked)
        # A peer that called gives way to our own: it holds up nobody.
        caller = one.call.peer if one.call is not None and not one.kind.all_call else None
        granted = [
            seconds if peer == caller else self.budget.granted(peer, seconds)
            for peer, seconds in offers.items()
        ]
        seconds = longer * max([one.offer.seconds, *granted])
        self._extend(one, self.budget.deadline_for(one.fragment, seconds, self._now))

    def _extend(self, one: Underway, deadline: float) -> None:
        # Never shorter: another member may need what was set before.
        if deadline > one.deadline and not one.machine.over:
            one.set_timers(self.budget.deadlines.hello, deadline)

    def _on_tick(self) -> None:
        for one in list(self.running.values()):
            while (event := one.next_event(self._now)) is not None:
                if isinstance(event, events.DeadlinePassed) and not one.machine.over:
                    self._on_deadline(one)
                self._tell(one, event)

    def _on_deadline(self, one: Underway) -> None:
        self._effects.append(events.RanLate(exchange=one.number))
        # Only in pairs: a group goes on without what comes late.
        if one.kind.all_call:
            return
        for peer in one.partners:
            if one.machine.stage is Stage.TRADING and peer not in one.come:
                self._hold_stall(one, peer, "was too slow for the deadline", one.began)
            elif one.machine.stage is Stage.CONFIRMING and not one.timers:
                self._hold_stall(one, peer, "did not confirm in time", one.began)

    # calls of others

    def _on_call(self, call: events.Called) -> None:
        peer, theirs = call.peer, call.offer
        refusal = self._consider(call)
        if refusal is not None:
            self._effects.append(events.Refuse(call=call.call, peer=peer, reason=refusal))
            if refusal is Refusal.CROSSED:
                self._tell(self.running[theirs.fragment], events.Crossed(peer=peer))
            return
        one = self._exchange_for(call)
        if one.machine.has_room_for(peer):
            self._accept(one, call)
        else:
            one.waiting = call
            self._tell(one, events.Knocked(peer=peer))

    def _accept(self, one: Underway, call: events.Called) -> None:
        peer, theirs = call.peer, call.offer
        self._effects.append(
            events.Accept(exchange=one.number, call=call.call, peer=peer, offer=one.offer)
        )
        self._tell(one, events.Accepted(peer=peer, offer=theirs, called_us=True))
        self._allow(one)

    def _on_call_dropped(self, call: int) -> None:
        for one in self.running.values():
            if one.waiting is not None and one.waiting.call == call:
                peer, one.waiting = one.waiting.peer, None
                self._tell(one, events.WentAway(peer=peer))

    def _may_wait(self, one: Underway, call: events.Called) -> bool:
        """Whether a call may wait for the answer to ours: that of whom we would meet first, and of
        a peer that lots put behind us. So no ring of peers waits for each other."""
        if one.kind.all_call or one.machine.stage is not Stage.GATHERING or one.waiting is not None:
            return False
        where, peer = f"{call.offer.fragment}/{call.offer.round}", call.peer
        is_first = peer == next(iter(one.machine.candidates), None)
        return is_first or lot(where, self.me) < lot(where, peer)

    def _consider(self, call: events.Called) -> Refusal | None:
        peer, theirs = call.peer, call.offer
        if self.position.ready is None or self.kind is None:
            return Refusal.NOT_TRAINING
        one = self.running.get(theirs.fragment)
        if one is not None and one.machine.is_calling(peer) and wins_crossing(self.me, peer):
            return Refusal.CROSSED
        if not self.trusts(peer) and peer not in self.muted:
            return Refusal.NOT_TRUSTED
        schedule = self.position.schedule
        # One that is unknown is refused.
        fragment = theirs.fragment if theirs.fragment < len(schedule) else 0
        ours, longest = self._offer(fragment, theirs.round), self.budget.deadlines.longest
        takes_it = one is None or one.machine.has_room_for(peer) or self._may_wait(one, call)
        # A peer that waits for this very one takes part, however few steps ago it merged.
        least = 0 if one else schedule.least_steps(fragment, self.spec.sync.min_steps)
        hindrances = (
            (not self.open, Refusal.NOT_TRAINING),
            (not self.position.supports(peer, theirs.swarm_step), Refusal.IMPLAUSIBLE_STEP),
            (not takes_it, Refusal.BUSY),
            (ours.steps < least, Refusal.TOO_SOON),
            (one is None and not self._has_room_for(call, fragment), Refusal.FULL),
            (max(theirs.seconds, ours.seconds) > longest, Refusal.TOO_SLOW),
            (not self._around.knows(peer), Refusal.NOT_ALLOWED),
        )
        return consider(theirs, ours, len(schedule), hindrances)

    def _exchange_for(self, call: events.Called) -> Underway:
        peer, theirs = call.peer, call.offer
        one = self.running.get(theirs.fragment)
        if one is not None:
            if peer in one.calling:
                one.calling.discard(peer)  # calls crossed, and theirs goes on
                self._effects.append(events.CancelCall(exchange=one.number, peer=peer))
            return one
        assert self.kind is not None
        offer = self._offer(theirs.fragment, theirs.round)
        # In a pair the caller is the partner. In a group everybody calls the rest of the slice.
        others: Sequence[str] = []
        if self.kind.all_call:
            others = self._candidates(offer.fragment, offer.round)
        one = self._new(offer, others, call)
        one.machine.expect(peer)
        if self.kind.all_call:
            self._carry_out(one, one.machine.start())
        return one

    # within an exchange

    def _tell(self, one: Underway, event: PeerEvent) -> None:
        """Give an event to an exchange. A peer that does what it must not is lost to it."""
        if one.machine.over:
            return
        try:
            effects = one.machine.handle(event)
        except ProtocolViolation as error:
            peer = getattr(event, "peer", "")
            lost = events.Lost(
                peer=peer, reason=str(error), cause=Cause.VIOLATED, deed=Offence.HEAVY
            )
            self._on_lost(one, lost)
            return
        self._carry_out(one, effects)
        if one.machine.stage is not Stage.GATHERING and one.waiting is not None:
            call, one.waiting = one.waiting, None
            refuse = events.Refuse(call=call.call, peer=call.peer, reason=Refusal.BUSY)
            self._effects.append(refuse)
        if one.machine.over:
            one.timers = []

    def _carry_out(self, one: Underway, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case events.MemberMessage():
                    pass
                case events.Dial(peer=peer):
                    one.calling.add(peer)
                case events.Capture(members=members):
                    self._prepare(one, members)
                case events.Abandon(peer=peer, reason=reason):
                    if peer in one.calling and reason == base.UNANSWERED:
                        self._effects.append(events.Unanswered(peer=peer))
                    one.calling.discard(peer)
                    if one.kind.all_call and one.machine.causes.get(peer) is Cause.LATE:
                        one.stalled = True
                        self._hold_stall(one, peer, reason, one.began)
                case events.Admit():
                    call, one.waiting = one.waiting, None
                    if call is not None:
                        self._accept(one, call)
                    continue
                case events.Stumbled(peer=peer, reason=reason):
                    one.stumbled.add(peer)
                    self._hold(peer, Offence.STUMBLE, reason)
                    continue
                case events.Apply():
                    one.decided = self._now
                case _:
                    pass
            self._effects.append(effect.of(exchange=one.number))

    def _prepare(self, one: Underway, members: tuple[str, ...]) -> None:
        """The members are known, and so is what each brings."""
        assert self.position.ready is not None
        # In a swarm that is larger than a group, others come from other groups.
        is_whole = len(self._around.partners()) < self.spec.sync.group
        one.begin_capture(members, self.spec.sync.interval, is_whole=is_whole)
        one.muted = frozenset(peer for peer in one.partners if not self.trusts(peer))
        if self.spec.sync.consensus and len(members) == 2:
            (partner,) = one.partners
            one.apart = self.recent.apart(one.fragment, partner)
        if one.lacking is not None:
            missed = events.Missed(
                receivers=one.lacking.receivers(self.me),
                donor=one.lacking.donors.get(self.me, ""),
                stranded=self.me in one.lacking.stranded,
            )
            self._tell(one, missed)
            # All wait for the members that take them over first.
            self._allow(one, 1 + max(one.lacking.steps.values(), default=0))
        if one.realign:  # in fp32, which takes longer
            ready = self.position.ready
            most = ready.sizes[one.fragment][1]
            larger = ready.realign_sizes[one.fragment] / self.budget.bytes_in(most, self._now)
            self._allow(one, larger)
        self._hurry(one)

    def _hurry(self, one: Underway) -> None:
        """Wait no longer than usual for a group in which a member has kept us waiting lately."""
        usual = max(self.budget.usual(peer, one.needs) for peer in one.partners)
        if one.kind.all_call and any(self.trust.lost(peer) > usual for peer in one.partners):
            deadline = self._now - one.began + HURRY * usual
            if deadline < one.deadline:
                one.set_timers(min(usual, self.budget.deadlines.hello), deadline)

    def _on_answer(self, one: Underway, peer: str, accepted: events.Accepted) -> None:
        theirs, ours, longest = accepted.offer, one.offer, self.budget.deadlines.longest
        one.calling.discard(peer)
        # An honest peer refuses an offer that it can't take as it stands.
        if (theirs.fragment, theirs.plan, theirs.codec) != (ours.fragment, ours.plan, ours.codec):
            why = "accepted something else than we offered"
            lost = events.Lost(peer=peer, reason=why, cause=Cause.VIOLATED, deed=Offence.HEAVY)
        elif not self.position.supports(peer, theirs.swarm_step):
            # Of two that were parted nobody can say who is right: it is not held against the other,
            # which hears why.
            why = f"claims swarm step {theirs.swarm_step}, which nobody else supports"
            cause = Refusal.IMPLAUSIBLE_STEP
            lost = events.Lost(peer=peer, reason=why, cause=cause, stands=True)
        elif theirs.seconds > longest:
            why = f"needs {theirs.seconds} s for its steps and contents, where an exchange may "
            why += f"take {longest:.0f} s"
            lost = events.Lost(peer=peer, reason=why, cause=Refusal.TOO_SLOW)
        else:
            self._tell(one, accepted)
            self._allow(one)
            return
        self._on_lost(one, lost)

    def _on_lost(self, one: Underway, lost: events.Lost) -> None:
        """Go on without a peer, if anything was still to come from it; what no honest peer does is
        held against it."""
        peer, reason = lost.peer, lost.reason
        if peer in one.calling:
            one.calling.discard(peer)
            self._effects.append(events.Unanswered(peer=peer))
        if lost.deed is not None:
            self._hold(peer, lost.deed, reason)
        if one.machine.is_open(peer):
            # Only a peer that has a place in it, memory and a stream has cost us anything.
            if lost.broke and one.members and peer in one.partners:
                one.stalled = True
                self._hold_stall(one, peer, reason, one.began)
            effect = events.CutOff(peer=peer, reason=reason, tells=lost.stands, cause=lost.cause)
            self._effects.append(effect.of(exchange=one.number))
        self._tell(one, lost)

    # the end of an exchange

    def _on_merged(self, one: Underway, merged: events.Merged) -> None:
        for peer in set(one.partners) - one.stumbled - one.muted:
            self.trust.thank(peer, self.position.steps, one.realign)
            if peer in one.come:
                self.budget.took(peer, one.come[peer])
        if len(one.partners) == 1:
            self.recent.merged(one.fragment, one.partners[0], merged.steps)
        took = one.lacking if one.lacks(self.me) else None
        self.position.merged(one.fragment, merged, one.realign, took)
        if not one.stalled:  # or who stalls would teach us to wait for it
            self.budget.durations.append(
                (self._now if one.decided is None else one.decided) - one.began
            )
        self.drift.left_out_by.clear()
        self._finish(one, Outcome.APPLIED, merged.detail, merged.measured)

    def _finish(
        self, one: Underway, outcome: Outcome, reason: str, measured: events.Measured
    ) -> None:
        # Where the call of a peer began it, our own attempt is still due.
        if outcome is not Outcome.APPLIED and one.call is None:
            schedule, swarm_step = self.position.schedule, self.position.swarm_step
            meet_others = [cause in _TAKEN for cause in one.machine.causes.values()]
            if one.kind.all_call or sum(meet_others) < MANY:
                schedule.skip(one.fragment, swarm_step)
            else:  # after these steps they accept calls again
                schedule.wait(one.fragment, swarm_step, self.spec.sync.min_steps)
        is_minority = one.machine.cause is Cause.MINORITY
        self._minority[one.fragment] = self._minority[one.fragment] + 1 if is_minority else 0
        if outcome is not Outcome.APPLIED and one.lacks(self.me):
            self.position.failed_to_take_over(one.fragment)
        if one.lacking is not None and self.me in one.lacking.stranded:
            self.drift.stranded = True
        for peer in self.trust.left_out(self.position.steps):
            takes_part = one.machine.takes_part(peer)
            if takes_part is False:
                self.muted.discard(peer)
            elif takes_part and outcome is not Outcome.APPLIED:
                self.muted.add(peer)
        self.budget.measured(measured, self._now)
        del self.running[one.fragment]
        # Its tasks may still write to its slots.
        self.budget.closing.add(one.number)
        self._effects.append(events.Over(exchange=one.number, outcome=outcome, reason=reason))
        if self.drift.must_copy(self._now):
            self._effects.append(events.Drifted())

    # trust

    def _hold(
        self, peer: str, deed: Offence, reason: str, seconds: float = 0.0, usual: float = 1.0
    ) -> None:
        """Hold against a peer what it did; it may be left out for a while. ``seconds``: that it
        has kept us waiting, where ``usual`` are expected."""
        if deed is Offence.STUMBLE:
            # Lines of honest peers break as well: only a series of stumbles is a deed.
            if not self.trust.stumbled(peer, seconds, usual, self._now):
                self._effects.append(
                    events.Penalty(peer=peer, deed=deed, reason=reason, score=1.0, forgiven=True)
                )
                return
            deed = Offence.LIGHT
            if seconds:
                reason += f"; such waits have cost {self.trust.lost(peer):.0f} s"
        standing = self.trust.hold(
            peer, deed, self.position.steps, reason, self.budget.mean_step_seconds
        )
        self._effects.append(
            events.Penalty(
                peer=peer, deed=deed, reason=standing.reason, score=round(1.0 - standing.missing, 2)
            )
        )

    def _hold_stall(self, one: Underway, peer: str, reason: str, since: float) -> None:
        """Hold against a peer that its contents did not come, unless our own line is to blame;
        ``since``: when we began to wait for them."""
        if self.own_line.stalled(peer):
            usual = self.budget.usual(peer, one.needs)
            self._hold(peer, Offence.STUMBLE, reason, self._now - since, usual)

    def trusts(self, peer: str) -> bool:
        """Whether a peer may take part now: be called, accepted, and hand over its state."""
        return self.trust.trusts(peer, self.position.steps)
