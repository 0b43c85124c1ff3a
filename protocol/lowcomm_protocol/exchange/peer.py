"""One peer as a pure machine: what is due, who takes part, who is trusted, how long it may take, what is told.

    Stepped ─► due? ─► an exchange of our own ──┐
    Called ─► consider ─► one of ours, or new ──┴─► Do(...) ─► driver ─► In(...) ─► ... ─► Over

Events go in with the time, effects come out; ``events.py`` has both. The machine reads no clock and does
no I/O. What it may look up is in `Surroundings`. The daemon, the simulator and the tests drive it: they
carry out effects and report what comes of them. When the time of ``next_timer`` has come they tell `Tick`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from operator import itemgetter
from statistics import median
from typing import Any

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base, events, story
from lowcomm_protocol.exchange.drift import Drift
from lowcomm_protocol.exchange.events import Event, Outcome, Surroundings
from lowcomm_protocol.exchange.kinds import HELLO_DEADLINE, kind_of
from lowcomm_protocol.exchange.needs import STEPS, Needs, Recent
from lowcomm_protocol.exchange.own_line import OwnLine
from lowcomm_protocol.peers.trust import Trust
from lowcomm_protocol.plan.clock import is_supported, largest_jump
from lowcomm_protocol.plan.matching import (
    Offer,
    Readiness,
    Refusal,
    candidates,
    consider,
    keeps_momentum,
    must_realign,
    steps_ahead,
    wins_crossing,
)
from lowcomm_protocol.plan.schedule import SyncSchedule
from lowcomm_protocol.spec.run import RunSpec

SLACK = 1.5
"""Times as long as contents take at the allowed rates: other exchanges begin meanwhile, and take their share."""
FIRST_DEADLINE = 60.0
"""Seconds for an exchange beyond what both ends need, while none has gone well yet that could tell."""
LONGEST_STORY = 512
"""Events of an exchange that are remembered; one that goes well takes fewer than a hundred."""
_LEAVES_US_OUT = (Refusal.NOT_TRUSTED, Refusal.IMPLAUSIBLE_STEP)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Deadlines, in seconds."""

    longest: float = 300.0
    """An exchange may take so long, as the owner says."""
    first: float = FIRST_DEADLINE
    hello: float = HELLO_DEADLINE
    learns: bool = True
    """Whether exchanges that went well shorten the deadline."""


@dataclass
class Underway:
    """One exchange of this peer."""

    number: int
    machine: base.Gathering
    offer: Offer
    """What we bring."""
    called: bool
    """Whether a call of a peer began it, not our own schedule."""
    place: str
    """Where that call came from."""
    began: float
    deadline: float = 0.0
    """Seconds from then on."""
    calling: set[str] = field(default_factory=set[str])
    """Peers that we called and that have not answered."""
    members: tuple[str, ...] = ()
    """Whose contributions are captured and coded, ours included; sorted. Empty while that is not known."""
    realign: bool = False
    """Whether slow weights travel whole in fp32, because those of the members differ."""
    keep_momentum: bool = False
    ahead: int = 0
    """How many inner steps longer than we the other members claim to have trained."""
    decided: float | None = None
    """When it was known that it is applied."""
    come: set[str] = field(default_factory=set[str])
    """Peers whose contributions have arrived whole."""
    timers: list[tuple[float, Any]] = field(default_factory=list[tuple[float, Any]])
    """What is told when, the next one first."""
    told: Counter[type] = field(default_factory=Counter[type])
    """What of the timetable was told, by kind of event."""
    story: list[tuple[float, Any]] = field(default_factory=list[tuple[float, Any]])
    """What its machine was told, and how many seconds after it began."""

    caller: str = ""
    """The peer whose call began it, if one did."""

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.offer.fragment

    @property
    def partners(self) -> tuple[str, ...]:
        """The peers that take part with us so far, sorted."""
        return self.machine.partners


class Peer:
    """Every exchange of one peer."""

    def __init__(
        self, me: str, spec: RunSpec, run_id: str, surroundings: Surroundings, deadlines: Deadlines | None = None
    ) -> None:
        self.me = me
        self.spec = spec
        self.run_id = run_id
        self.deadlines = deadlines or Deadlines()
        self.kind = kind_of(spec.sync)
        self.trust = Trust(spec.sync.interval)
        self.drift = Drift(spec.sync.interval)
        self.own_line = OwnLine()
        self.open = False
        """Whether we exchange now: training, and not leaving."""
        self.ready: events.TrainerReady | None = None
        self.schedule = SyncSchedule(spec.sync.interval, [])
        self.swarm_step = 0
        self.steps = 0
        self.tokens = 0
        self.running: dict[int, Underway] = {}
        """By fragment."""
        self._around = surroundings
        self._slow_digests: list[bytes] = []
        self._momentum_digests: list[bytes] = []
        self._pace: deque[float] = deque(maxlen=STEPS)
        """Seconds of the last inner steps."""
        self._work = Recent()
        """Seconds that the trainer took for an exchange."""
        self._rates = Recent()
        """Bytes a second at which contents came, the slowest of each exchange."""
        self._durations: deque[float] = deque(maxlen=16)
        """Seconds after which the last exchanges that were applied had all they needed."""
        self._refused: Needs | None = None
        """Of the exchange that was not begun of late, as it would take too long."""
        self._closing: set[int] = set()
        """Exchanges that are over, and whose memory is not free yet."""
        self._number = 0
        self._now = 0.0
        self._effects: list[base.Effect] = []

    # events in, effects out

    def handle(self, now: float, event: Event) -> list[base.Effect]:
        """Take in an event at a time, in seconds of a clock that never goes back; what to carry out, in this order."""
        self._now = now
        self._take_in(event)
        effects = self._effects
        self._effects = []
        return effects

    @property
    def next_timer(self) -> float | None:
        """When to tell `Tick`; None while nothing is to be told."""
        return min((one.timers[0][0] for one in self.running.values() if one.timers), default=None)

    def _take_in(self, event: Event) -> None:
        match event:
            case events.TrainerReady():
                self._take_over(event)
            case events.Stepped():
                self._on_step(event)
            case events.Opened():
                self.open = True
            case events.Closed():
                self.open = False
                self.drift.forget()
            case events.GaveUpAll(reason=reason):
                for one in list(self.running.values()):
                    self._tell(one, base.GaveUp(reason=reason))
            case events.Called():
                self._on_call(event)
            case events.Misbehaved(peer=peer, deed=deed, reason=reason):
                self._hold(peer, deed, reason)
            case events.StateCopied(seconds=seconds):
                self.drift.rest.copied(seconds, self._now)
            case events.DriftEndured():
                self.drift.endure(self.steps)
            case events.Tick():
                self._on_tick()
            case events.Released(exchange=number):
                self._closing.discard(number)
            case _:
                one = self.exchange(event.exchange)
                if one is not None:  # or it was over before
                    self._take_in_exchange(one, event)

    def _take_in_exchange(self, one: Underway, event: Any) -> None:
        match event:
            case events.Answered(peer=peer, offer=offer):
                self._on_answer(one, peer, offer)
            case events.OfferRefused(peer=peer, reason=reason, detail=detail):
                one.calling.discard(peer)
                if reason in _LEAVES_US_OUT:
                    self.drift.left_out(peer)
                self._tell(one, base.Refused(peer=peer, reason=reason, detail=detail))
            case events.Failed():
                self._on_failed(one, event)
            case events.ContentCame(peer=peer):
                one.come.add(peer)
                self.own_line.came()
            case events.Merged():
                self._on_merged(one, event)
            case events.Dropped(reason=reason, measured=measured):
                self._finish(one, Outcome.FAILED if one.members else Outcome.NO_PARTNER, reason, measured)
            case _:
                self._tell(one, event.event)

    def _take_over(self, ready: events.TrainerReady) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state."""
        self.ready = ready
        self.drift.restart()
        self._closing.clear()  # they keep to the memory that they began with
        self._pace.clear()
        self.swarm_step = ready.swarm_step
        self.steps = ready.steps
        self.tokens = ready.tokens
        self.schedule = SyncSchedule(self.spec.sync.interval, ready.progress)
        self._slow_digests = list(ready.slow_digests)
        self._momentum_digests = list(ready.momentum_digests)

    # what is due

    def _on_step(self, step: events.Stepped) -> None:
        self.swarm_step = step.swarm_step
        self.steps = step.steps
        self.tokens = step.tokens
        self._pace.append(step.seconds)
        if not self.open or self.kind is None:
            return
        for fragment in self.schedule.due(self.swarm_step):
            if fragment not in self.running:
                self._begin(fragment)

    def _begin(self, fragment: int) -> None:
        if self.has_drifted(self._now):
            self._effects.append(events.Drifted())
            return  # what others bring would look like lies to us
        if self._free <= 0 or not self._has_memory:
            return  # as many are under way as fit; it stays due
        needs = self._needs(fragment, self._streams(fragment), self._now)
        self._refused = needs if needs.least > self.deadlines.longest else None
        if self._refused is not None:
            return  # it could only fail; ``hindrance`` tells
        offer = self._offer(fragment, self.schedule.round_of(fragment, self.swarm_step))
        one = self._new(offer, self._candidates(offer))
        self._carry_out(one, one.machine.start())

    def _new(self, offer: Offer, peers: Sequence[str], called: bool = False, place: str = "") -> Underway:
        assert self.kind is not None
        self._number += 1
        machine = self.kind.machine(self.me, peers, self.spec.sync.group)
        one = Underway(self._number, machine, offer, called, place, self._now)
        self.running[offer.fragment] = one
        self._set_timers(one, self.deadline_for(offer.seconds))
        self._effects.append(events.Began(exchange=one.number))
        return one

    def story(self, one: Underway) -> dict[str, Any]:
        """How an exchange began and what its machine was told, as JSON; ``story.replay`` decides the same again."""
        assert self.kind is not None
        return story.tell(self.kind.name, one.machine, [one.caller] if one.caller else [], one.story)

    def exchange(self, number: int) -> Underway | None:
        """An exchange that is under way."""
        return next((one for one in self.running.values() if one.number == number), None)

    def _candidates(self, offer: Offer) -> Sequence[str]:
        trusted = [peer for peer in self._around.partners() if self.trusts(peer)]
        sync, seed = self.spec.sync, self.spec.run.seed
        return candidates(seed, offer.fragment, offer.round, self.me, trusted, sync.group, sync.pairing)

    def _offer(self, fragment: int, number: int) -> Offer:
        assert self.ready is not None
        progress, by_digest = self.schedule[fragment], self.spec.sync.consensus == 0
        return Offer(
            protocol=PROTOCOL_VERSION,
            run_id=self.run_id,
            plan=self.ready.plan,
            codec=self.spec.sync.codec,
            fragment=fragment,
            stage=0,
            round=number,
            swarm_step=self.swarm_step,
            steps=self.steps - progress.merged_steps,
            tokens=self.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=self._slow_digests[fragment] if by_digest else b"",
            momentum_digest=self._momentum_digests[fragment] if by_digest else b"",
            seconds=self._needs(fragment, self._streams(fragment), self._now).told(self.deadlines.longest),
        )

    # room and time

    @property
    def _free(self) -> int:
        """How many exchanges may begin beside those that run."""
        return (self.ready.exchanges if self.ready else 0) - len(self.running)

    @property
    def _has_memory(self) -> bool:
        return self._free > len(self._closing)

    def _has_room_for(self, place: str) -> bool:
        callers = [one.place for one in self.running.values() if one.called]
        return self._free > 0 and self._has_memory and self._around.has_room_for(place, callers, self._free)

    def _streams(self, fragment: int) -> int:
        """How many share the line while a fragment is exchanged."""
        return len(self.running | {fragment: None}) + self._around.sharing()

    @property
    def deadline(self) -> float:
        """Seconds that an exchange may take: learned from those that went well, within the owner's bound."""
        usual = median(self._durations) if self._durations and self.deadlines.learns else None
        return min(self.deadlines.longest, self.deadlines.first if usual is None else 10.0 + 4 * usual)

    def deadline_for(self, seconds: float) -> float:
        """The same where a member needs so many seconds, as its offer tells."""
        return min(self.deadlines.longest, self.deadline + seconds)

    @property
    def step_seconds(self) -> float:
        """How long a capture may wait for the end of a step; 0 while there was none."""
        return max(self._pace, default=0.0)

    def _needs(self, fragment: int, streams: int, now: float) -> Needs:
        """What an exchange needs here, while so many share the line."""
        assert self.ready is not None
        assert self.kind is not None
        size = self.kind.contents * self.ready.sizes[fragment][1]
        allowed, rate = ceil(SLACK * self._around.transfer_seconds(size, streams)), self._rates.usual(now)
        return Needs(
            limits=allowed,
            step=self.step_seconds,
            work=max(0.0, (self._work.usual(now) or 0.0) - self.step_seconds),
            line=max(0.0, size / rate - allowed) if rate else 0.0,
            streams=streams,
        )

    def hindrance(self, now: float) -> str | None:
        """Why no exchange can begin within the limits of our owner; None if one can."""
        if self.ready is None or self.kind is None:
            return None
        needs = [self._needs(fragment, 1, now) for fragment in range(len(self.schedule))]
        needs += [self._refused] if self._refused is not None else []
        return max(needs, key=lambda one: one.least).hindrance(self.deadlines.longest)

    def _set_timers(self, one: Underway, deadline: float) -> None:
        """Count the seconds of an exchange; again with more of them, where a member needs those."""
        assert self.kind is not None
        one.deadline = deadline
        told = Counter(one.told)
        one.timers = []
        for after, event in sorted(self.kind.timetable(self.deadlines.hello, deadline), key=itemgetter(0)):
            if told[type(event)]:
                told[type(event)] -= 1
            else:  # what is due by now is told at the next tick
                one.timers.append((one.began + after, event))

    def _allow(self, one: Underway, seconds: float) -> None:
        """Wait as long as a member needs, within what our owner allows."""
        deadline = self.deadline_for(seconds)
        if deadline > one.deadline:
            self._set_timers(one, deadline)

    def _on_tick(self) -> None:
        for one in list(self.running.values()):
            while one.timers and one.timers[0][0] <= self._now:
                _, event = one.timers.pop(0)
                one.told[type(event)] += 1
                if isinstance(event, base.DeadlinePassed) and not one.machine.over:
                    self._on_deadline(one)
                self._tell(one, event)

    def _on_deadline(self, one: Underway) -> None:
        self._effects.append(events.RanLate(exchange=one.number))
        if one.machine.stage is base.Stage.TRADING:
            for peer in one.partners:
                if peer not in one.come:
                    self._hold_stall(peer, "was too slow for the deadline")

    # calls of others

    def _on_call(self, call: events.Called) -> None:
        peer, theirs = call.peer, call.offer
        refusal = self._consider(peer, theirs, call.place)
        if refusal is not None:
            self._effects.append(events.Refuse(call=call.call, peer=peer, reason=refusal))
            return
        one = self._exchange_for(peer, theirs, call.place)
        self._allow(one, theirs.seconds)
        self._effects.append(events.Accept(exchange=one.number, call=call.call, peer=peer, offer=one.offer))
        self._tell(one, base.Accepted(peer=peer, offer=theirs, called_us=True))

    def _consider(self, peer: str, theirs: Offer, place: str) -> Refusal | None:
        if self.ready is None or self.kind is None:
            return Refusal.NOT_TRAINING
        one = self.running.get(theirs.fragment)
        if one is not None and one.machine.is_calling(peer) and wins_crossing(self.me, peer):
            return Refusal.CROSSED
        if not self.trusts(peer):
            return Refusal.NOT_TRUSTED
        fragment = theirs.fragment if theirs.fragment < len(self.schedule) else 0  # one that is unknown is refused
        ready = Readiness(
            training=self.open,
            busy=one is not None and not one.machine.has_room_for(peer),
            has_room=one is not None or self._has_room_for(place),
            # A peer that waits for this very one takes part, however few steps ago it merged.
            min_steps=0 if one is not None else self.schedule.least_steps(fragment, self.spec.sync.min_steps),
            step_is_supported=self.supports(peer, theirs.swarm_step),
            fragment_count=len(self.schedule),
            longest=self.deadlines.longest,
        )
        refusal = consider(theirs, self._offer(fragment, theirs.round), ready)
        return refusal or (None if self._around.knows(peer) else Refusal.NOT_ALLOWED)

    def _exchange_for(self, peer: str, theirs: Offer, place: str) -> Underway:
        one = self.running.get(theirs.fragment)
        if one is not None:
            if peer in one.calling:
                one.calling.discard(peer)  # calls crossed, and theirs goes on
                self._effects.append(events.CancelCall(exchange=one.number, peer=peer))
            return one
        assert self.kind is not None
        offer = self._offer(theirs.fragment, theirs.round)
        one = self._new(offer, self._candidates(offer) if self.kind.all_call else [], called=True, place=place)
        one.caller = peer
        one.machine.expect(peer)
        if self.kind.all_call:
            self._carry_out(one, one.machine.start())
        return one

    def supports(self, peer: str, swarm_step: int) -> bool:
        """Whether what we and others know makes a swarm step plausible that a peer claims."""
        most = largest_jump(self.spec.sync.interval, self.schedule.steps_alone(self.steps))
        return is_supported(swarm_step, self.swarm_step, [self._around.furthest(but=peer)], most)

    # within an exchange

    def _tell(self, one: Underway, event: Any) -> None:
        """Tell an exchange what happened. A peer that does what it must not is lost to it."""
        if one.machine.over:
            return
        if len(one.story) < LONGEST_STORY:
            one.story.append((self._now - one.began, event))
        try:
            effects = one.machine.handle(event)
        except ProtocolViolation as error:
            self._fail(one, getattr(event, "peer", ""), str(error), Deed.HEAVY)
            return
        self._carry_out(one, effects)
        if one.machine.over:
            one.timers = []

    def _carry_out(self, one: Underway, effects: list[base.Effect]) -> None:
        for effect in effects:
            match effect:
                case base.Dial(peer=peer):
                    one.calling.add(peer)
                case base.Capture(members=members):
                    self._prepare(one, members)
                case base.Abandon(peer=peer, reason=reason):
                    if peer in one.calling and reason == base.UNANSWERED:
                        self._effects.append(events.Unanswered(peer=peer))
                    one.calling.discard(peer)
                case base.Apply():
                    one.decided = self._now
                case _:
                    pass
            self._effects.append(events.Do(exchange=one.number, effect=effect))

    def _prepare(self, one: Underway, members: tuple[str, ...]) -> None:
        """The members are known, and so is what each brings."""
        assert self.ready is not None
        others = one.machine.offers(members)
        one.members = members
        # Slow weights that should be equal and are not (somebody has applied more): everybody sees it in the offers.
        one.realign = must_realign(one.offer, others)
        one.keep_momentum = one.realign and keeps_momentum(one.offer, others)
        one.ahead = steps_ahead(one.offer, others, self.spec.sync.interval)
        if one.realign:  # in fp32, which takes longer
            larger = self.ready.realign_sizes[one.fragment] / self.ready.sizes[one.fragment][1]
            self._allow(one, larger * max(offer.seconds for offer in (one.offer, *others)))

    def _on_answer(self, one: Underway, peer: str, theirs: Offer) -> None:
        one.calling.discard(peer)
        if (theirs.fragment, theirs.plan, theirs.codec) != (one.fragment, one.offer.plan, one.offer.codec):
            self._fail(one, peer, "accepted something else than we offered", Deed.HEAVY)
            return
        if not self.supports(peer, theirs.swarm_step):
            # Of two that were parted nobody can say who is right: it is not held against the other.
            self._decline(one, peer, f"nobody else supports swarm step {theirs.swarm_step}")
            self._fail(one, peer, f"claims swarm step {theirs.swarm_step}, which nobody else supports")
            return
        if theirs.seconds > self.deadlines.longest:
            self._fail(
                one,
                peer,
                f"needs {theirs.seconds} s for its steps and contents, and --exchange-deadline allows "
                f"{self.deadlines.longest:.0f} s here: raise it to exchange with such peers",
            )
            return
        self._allow(one, theirs.seconds)
        self._tell(one, base.Accepted(peer=peer, offer=theirs))

    def _decline(self, one: Underway, peer: str, reason: str) -> None:
        self._effects.append(events.Decline(exchange=one.number, peer=peer, reason=reason))

    def _fail(self, one: Underway, peer: str, reason: str, deed: Deed | None = None) -> None:
        self._on_failed(one, events.Failed(exchange=one.number, peer=peer, reason=reason, deed=deed))

    def _on_failed(self, one: Underway, failed: events.Failed) -> None:
        """Go on without a peer, if anything was still to come from it; what no honest peer does is held against it."""
        peer, reason, deed = failed.peer, failed.reason, failed.deed
        if peer in one.calling:
            one.calling.discard(peer)
            self._effects.append(events.Unanswered(peer=peer))
        if deed is not None:
            self._hold(peer, deed, reason)
        if one.machine.is_open(peer):
            # Only a peer that has a place in it, memory and a stream has cost us anything.
            if failed.broke and one.members and peer in one.partners:
                self._hold_stall(peer, reason)
            cut = events.CutOff(exchange=one.number, peer=peer, reason=reason, tells=failed.stands)
            self._effects.append(cut)
        self._tell(one, base.Lost(peer=peer, reason=reason))

    # the end of an exchange

    def _on_merged(self, one: Underway, merged: events.Merged) -> None:
        for peer in one.partners:
            self.trust.thank(peer, self.steps, one.realign)
        self.swarm_step = max(self.swarm_step, merged.swarm_step)
        self.schedule.merged(one.fragment, merged.swarm_step, merged.steps, merged.tokens)
        self._slow_digests[one.fragment] = merged.slow_digest
        self._momentum_digests[one.fragment] = merged.momentum_digest
        self._durations.append((self._now if one.decided is None else one.decided) - one.began)
        self.drift.forget()
        self._finish(one, Outcome.APPLIED, merged.detail, merged.measured)

    def _finish(self, one: Underway, outcome: Outcome, reason: str, measured: events.Measured) -> None:
        if outcome is not Outcome.APPLIED and not one.called:
            self.schedule.skip(one.fragment, self.swarm_step)
        # Learned also from those that failed: the next ones then get as long as it takes.
        if measured.work:
            self._work.add(measured.work, self._now)
        if measured.rate is not None:
            self._rates.add(measured.rate, self._now)
        del self.running[one.fragment]
        self._closing.add(one.number)
        self._effects.append(events.Over(exchange=one.number, outcome=outcome, reason=reason))
        if self.has_drifted(self._now):
            self._effects.append(events.Drifted())

    # trust and drift

    def _hold(self, peer: str, deed: Deed, reason: str) -> None:
        """Hold against a peer what it did; it may be left out for a while."""
        if deed is Deed.STUMBLE:
            if not self.trust.stumbled(peer):
                self._effects.append(events.Held(peer=peer, deed=deed, reason=reason, score=1.0, forgiven=True))
                return
            deed = Deed.LIGHT
        standing = self.trust.hold(peer, deed, self.steps, reason)
        self._effects.append(
            events.Held(peer=peer, deed=deed, reason=standing.reason, score=round(1.0 - standing.missing, 2))
        )

    def _hold_stall(self, peer: str, reason: str) -> None:
        """Hold against a peer that its contents did not come, unless our own line is to blame."""
        if self.own_line.stalled(peer):
            self._hold(peer, Deed.STUMBLE, reason)

    def trusts(self, peer: str) -> bool:
        """Whether a peer may take part now: be called, accepted, and hand over its state."""
        return self.trust.trusts(peer, self.steps)

    def has_drifted(self, now: float) -> bool:
        """Whether to copy the state of others: exchanges can't bring us back to most of them."""
        return self.ready is not None and self.drift.must_copy(now, self.steps, self._is_far)

    def resting(self, now: float) -> str | None:
        """Why we train on though we are far from most peers."""
        return self.drift.resting(now, self._is_far) if self.ready is not None else None

    def _is_far(self) -> bool:
        far = self.swarm_step + largest_jump(self.spec.sync.interval)
        if not self.drift.is_suspected and self._around.furthest(but=self.me) <= far:
            return False
        training = self._around.training()
        ahead = sum(step > far and self.supports(peer, step) for peer, step in training)
        return self.drift.is_far(training, ahead, self.schedule.steps_alone(self.steps))
