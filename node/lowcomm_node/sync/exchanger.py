"""Every exchange of this node: what is due, what is under way, who is accepted.

    step of the trainer ─► due? ─► a round of our own ───┐
    call of a peer ─► consider ─► a round, ours or new ──┴─► Round (sync/driver.py) ─► ended: counters, history, slots back

``matching.consider`` decides on calls, and ``Exchange`` or ``GroupExchange`` on everything in a round; nothing in this file
does. The trainer captures and applies; the daemon only passes slot numbers on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from time import monotonic, time
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.state_transfer.rest import Rest
from lowcomm_node.sync import offers
from lowcomm_node.sync.driver import ABANDON_DEADLINE, HELLO_DEADLINE, Round, answer_in_time
from lowcomm_node.sync.group_driver import GroupRound
from lowcomm_node.sync.history import History, Outcome
from lowcomm_node.sync.needs import STEPS, Needs
from lowcomm_node.sync.own_line import OwnLine
from lowcomm_node.sync.pair_driver import PairRound
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import OF_FEW, Shares
from lowcomm_node.trainer.arena import Arena, slots_each
from lowcomm_node.trainer.messages import Merged, Ready
from lowcomm_node.trainer.process import Trainer
from lowcomm_node.transport.bandwidth import Bandwidth
from lowcomm_node.transport.channels import Channels
from lowcomm_node.transport.stream import CalleeStream, CallerStream
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.peers.records import Phase
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.peers.trust import Trust
from lowcomm_protocol.plan.clock import is_supported, largest_jump
from lowcomm_protocol.plan.matching import Offer, Readiness, Refusal, candidates, consider, wins_crossing
from lowcomm_protocol.plan.schedule import FragmentProgress, SyncSchedule
from lowcomm_protocol.spec.run import RunSpec

SLACK = 1.5
"""Times as long as contents take at the allowed rates: other exchanges begin meanwhile, and take their share."""
FIRST_DEADLINE = 60.0
"""Seconds for an exchange beyond what both ends need, while none has gone well yet that could tell."""

WITNESSES = 2
"""Peers that must leave us out before we believe that it is we who are wrong: one alone could be a liar, or as wrong as we."""
DRIFTED = 2
"""Intervals without an exchange after which peers that leave us out are believed."""
ENDURED = 50
"""Intervals of training before we look again whether we have drifted, where nobody could hand over a state."""


class Exchanger:
    """Begins, accepts and carries out exchanges."""

    def __init__(
        self,
        *,
        peer_id: str,
        spec: RunSpec,
        ready: Ready | None = None,
        trainer: Trainer | None = None,
        roster: Roster,
        channels: Channels,
        deadline: float,
        tell: Callable[[dict[str, Any]], None],
        bandwidth: Bandwidth | None = None,
    ) -> None:
        """Without ``ready`` and ``trainer`` every call is refused, until ``take_over`` brings them."""
        self.peer_id, self.spec, self.roster = peer_id, spec, roster
        self.bandwidth = bandwidth or Bandwidth()
        self.channels = channels
        self._ready: Ready | None = None
        self._trainer: Trainer | None = None
        self.swarm_step = self.steps = self.tokens = 0
        self._pace: deque[float] = deque(maxlen=STEPS)
        """Seconds of the last inner steps."""
        self.history, self.own_line = History(), OwnLine()
        self.running: dict[int, Round] = {}
        self.open = False
        """Whether we exchange now: training, and not leaving."""
        self.longest = deadline
        """Seconds that an exchange may take, as our owner says."""
        self.joiners: Callable[[], int] = lambda: 0
        """How many peers copy our state now: they share the link."""
        self._tell = tell
        self._refused: Needs | None = None
        """Of the exchange that was not begun of late, as it would take too long."""
        self._endured_until = 0
        """Own steps until which a drift is none of our business."""
        self.rest = Rest()
        """After a copy that was to bring us back."""
        self.drifted = asyncio.Event()
        """Set when an exchange is due, or has ended, while ``has_drifted``."""
        self._closing: set[asyncio.Task[None]] = set()
        self.trust = Trust(spec.sync.interval)
        if ready is not None and trainer is not None:
            self.take_over(ready, trainer)

    def take_over(self, ready: Ready, trainer: Trainer) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state.

        Exchanges that still end keep to the trainer and the memory that they began with.
        """
        self.ready, self._trainer = ready, trainer
        self.history.left_out_by.clear()
        self._endured_until = 0
        self.drifted.clear()
        self._pace.clear()
        self.swarm_step, self.steps, self.tokens = ready.swarm_step, ready.steps, ready.tokens
        progress = [FragmentProgress(**counters) for counters in ready.progress]
        self.schedule = SyncSchedule(self.spec.sync.interval, progress)
        self._slow_digests = [bytes.fromhex(digest) for digest in ready.slow_digests]
        self._momentum_digests = [bytes.fromhex(digest) for digest in ready.momentum_digests or ("",) * len(progress)]

    @property
    def ready(self) -> Ready:
        """What the trainer told of itself."""
        assert self._ready is not None
        return self._ready

    @ready.setter
    def ready(self, ready: Ready) -> None:
        self._ready = ready

    @property
    def trainer(self) -> Trainer:
        """Who captures and applies."""
        assert self._trainer is not None
        return self._trainer

    # what is due

    def on_step(self, swarm_step: int, steps: int, tokens: int, seconds: float = 0.0) -> None:
        """Take in one inner step, which took so many seconds, and begin the exchanges that are due."""
        self.swarm_step, self.steps, self.tokens = swarm_step, steps, tokens
        self._pace.append(seconds)
        if not self.open or self.spec.sync.group == 1:
            return
        for fragment in self.schedule.due(swarm_step):
            if fragment not in self.running:
                self._begin(fragment)

    def _begin(self, fragment: int) -> None:
        if self.has_drifted:
            self.drifted.set()
            return  # what they bring would look like lies to us
        if not self._has_room:
            return  # as many are under way as fit; it stays due
        needs = self._needs(fragment, self._streams(fragment))
        self._refused = needs if needs.least > self.longest else None
        if self._refused is not None:
            return  # it could only fail; ``hindrance`` tells
        offer = self._offer(fragment, self.schedule.round_of(fragment, self.swarm_step))
        self._new_round(offer, self._candidates(offer), called=False).start()

    def _candidates(self, offer: Offer) -> Sequence[str]:
        training = [info.peer_id for info in self.roster.partners(time()) if self.trusts(info.peer_id)]
        seed, group, pairing = self.spec.run.seed, self.spec.sync.group, self.spec.sync.pairing
        return candidates(seed, offer.fragment, offer.round, self.peer_id, training, group, pairing)

    def met(self, peer: str) -> None:
        """A peer has answered an offer, or has made one."""
        self.roster.liveness.met(peer, time())

    def missed(self, peer: str) -> None:
        """A peer has not answered an offer; after some in a row it is left out for a while."""
        self.roster.liveness.missed(peer, time())

    def _new_round(self, offer: Offer, peers: Sequence[str], called: bool, place: str = "") -> Round:
        kind = GroupRound if self.spec.sync.group > 2 else PairRound
        round_ = kind(self, offer, peers, self.arena.take(self._slots_each), called)
        round_.place = place
        self.running[offer.fragment] = round_
        round_.set_timers(self.deadline_for(offer.seconds))
        return round_

    def _offer(self, fragment: int, number: int) -> Offer:
        progress = self.schedule[fragment]
        return Offer(
            protocol=PROTOCOL_VERSION,
            run_id=self.roster.run_id,
            plan=self.ready.plan,
            codec=self.spec.sync.codec,
            fragment=fragment,
            stage=0,
            round=number,
            swarm_step=self.swarm_step,
            steps=self.steps - progress.merged_steps,
            tokens=self.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=self._slow_digests[fragment] if self.spec.sync.consensus == 0 else b"",
            momentum_digest=self._momentum_digests[fragment] if self.spec.sync.consensus == 0 else b"",
            seconds=self._needs(fragment, self._streams(fragment)).told(self.longest),
        )

    def _streams(self, fragment: int) -> int:
        """How many share the link while a fragment is exchanged."""
        return len(self.running | {fragment: None}) + self.joiners()

    @property
    def deadline(self) -> float:
        """Seconds that an exchange may take: learned from those that went well, within the owner's bound."""
        usual = self.history.usual_seconds()
        return min(self.longest, FIRST_DEADLINE if usual is None else 10.0 + 4 * usual)

    def deadline_for(self, seconds: float) -> float:
        """The same where a member needs so many seconds, as its offer tells."""
        return min(self.longest, self.deadline + seconds)

    @property
    def step_seconds(self) -> float:
        """How long a capture may wait for the end of a step; 0 while there was none."""
        return max(self._pace, default=0.0)

    @property
    def hindrance(self) -> str | None:
        """Why no exchange can be begun within the limits of our owner; None if one can."""
        if self._ready is None:
            return None
        if self.spec.sync.group == 1:
            return None
        needs = [self._needs(fragment, 1) for fragment in range(len(self.schedule))]
        needs += [self._refused] if self._refused is not None else []
        return max(needs, key=lambda one: one.least).hindrance(self.longest)

    @property
    def has_drifted(self) -> bool:
        """Whether to copy the state of others: exchanges can't bring us back to most of them, and no copy was made a moment ago."""
        return self.steps >= self._endured_until and not self.rest.left(monotonic()) and self._is_far

    @property
    def resting(self) -> str | None:
        """Why we train on though we are far from most peers; None if we are not, or are about to copy their state."""
        seconds = self.rest.left(monotonic())
        if not seconds or not self._is_far:
            return None
        return f"still far from most peers, whose state was copied of late: it is copied again in {ceil(seconds)} s at the earliest"

    @property
    def _is_far(self) -> bool:
        """Whether we are too far from most peers for exchanges to bring us back.

        Either they leave us out, and have for a while: what we bring is implausible, and the more so the longer we train
        alone, or they do not believe our swarm step. Or they are far ahead, as they confirm each other, for this machine
        slept: what they bring is implausible to us.
        """
        if self._ready is None:
            return False
        training = self.roster.in_phase(Phase.TRAINING, time())
        far = self.swarm_step + largest_jump(self.spec.sync.interval)
        ahead = [one for one in training if one.swarm_step > far and self.supports(one.peer_id, one.swarm_step)]
        left_out = [info for info in training if info.peer_id in self.history.left_out_by]
        if self.schedule.steps_alone(self.steps) < DRIFTED * self.spec.sync.interval:
            left_out = []
        if len(left_out) < WITNESSES:
            left_out = []
        return 2 * max(len(ahead), len(left_out)) > len(training)

    def endure_drift(self) -> None:
        """Nobody could hand over a state: train on as we are, or we would ask again and again instead of training."""
        self._endured_until = self.steps + ENDURED * self.spec.sync.interval
        self.drifted.clear()

    def _needs(self, fragment: int, streams: int) -> Needs:
        """What an exchange needs here, while so many share the link."""
        most, now = self.ready.sizes[fragment][1], monotonic()
        size = most if self.spec.sync.group == 2 else 2 * most
        limits, rate = ceil(SLACK * self.bandwidth.seconds(size, streams)), self.history.rates.usual(now)
        return Needs(
            limits=limits,
            step=self.step_seconds,
            work=max(0.0, (self.history.work.usual(now) or 0.0) - self.step_seconds),
            line=max(0.0, size / rate - limits) if rate else 0.0,
            streams=streams,
        )

    # calls of other peers

    async def serve(self, peer: str, stream: CalleeStream) -> None:
        """Answer one call of an authenticated peer; returns when its stream is done."""
        try:
            async with asyncio.timeout(HELLO_DEADLINE):
                frame = await stream.receive()
        except TimeoutError:
            self.hold(peer, Deed.STUMBLE, "called without saying hello in time")
            raise LinkLost("called without saying hello in time") from None
        if frame is None:  # it has dropped its call: calls cross, and exchanges end before they begin
            raise LinkLost("called, and ended the stream before it said hello")
        try:
            if frame.WhichOneof("kind") != "hello":
                raise ProtocolViolation("called without saying hello")
            theirs = offers.from_message(frame.hello)
        except ProtocolViolation as error:
            self.hold(peer, Deed.HEAVY, str(error))
            raise
        self.met(peer)
        refusal = self._consider(peer, theirs, stream.place)
        if refusal is not None:
            self.history.we_refused(peer, refusal)
            await answer_in_time(stream, offers.refuse(refusal))
            return
        await self._round_for(peer, theirs, stream.place).answer(peer, theirs, stream)

    def _consider(self, peer: str, theirs: Offer, place: str) -> Refusal | None:
        if self._ready is None:
            return Refusal.NOT_TRAINING
        round_ = self.running.get(theirs.fragment)
        if round_ is not None and round_.exchange.is_calling(peer) and wins_crossing(self.peer_id, peer):
            return Refusal.CROSSED
        if not self.trusts(peer):
            return Refusal.NOT_TRUSTED
        fragment = theirs.fragment if theirs.fragment < len(self.schedule) else 0  # one that is unknown is refused
        ready = Readiness(
            training=self.open and self.spec.sync.group > 1,
            busy=round_ is not None and not round_.exchange.has_room_for(peer),
            has_room=round_ is not None or self._has_room_for(place),
            # Whoever waits for this very peer takes part, however few steps ago it merged.
            min_steps=0 if round_ is not None else self.schedule.least_steps(fragment, self.spec.sync.min_steps),
            step_is_supported=self.supports(peer, theirs.swarm_step),
            fragment_count=len(self.schedule),
            longest=self.longest,
        )
        ours = self._offer(fragment, theirs.round)
        refusal = consider(theirs, ours, ready)
        if refusal is None and self.roster.get(peer, time()) is None:
            return Refusal.NOT_ALLOWED
        return refusal

    def _round_for(self, peer: str, theirs: Offer, place: str) -> Round:
        round_ = self.running.get(theirs.fragment)
        if round_ is not None:
            call = round_.calls.pop(peer, None)
            if call is not None:
                call.cancel()  # calls crossed, and theirs goes on
            return round_
        offer = self._offer(theirs.fragment, theirs.round)
        pairs = self.spec.sync.group == 2
        round_ = self._new_round(offer, [] if pairs else self._candidates(offer), called=True, place=place)
        round_.exchange.expect(peer)
        if not pairs:
            round_.start()
        return round_

    # what a round asks for

    @property
    def arena(self) -> Arena:
        """The slots of contributions."""
        assert self.trainer.arena is not None
        return self.trainer.arena

    async def call(self, peer: str) -> CallerStream:
        """Open a stream to a peer. Raises LinkLost."""
        info = self.roster.get(peer, time())
        if info is None:
            raise LinkLost("has left")
        stub = await self.channels.stub(info)
        return CallerStream(stub.Swap(metadata=self.channels.metadata(peer), timeout=2 * self.longest + 60))

    def supports(self, peer: str, swarm_step: int) -> bool:
        """Whether what we and others know makes a swarm step plausible that a peer claims."""
        others = (info.swarm_step for info in self.roster.alive(time()) if info.peer_id != peer)
        most = largest_jump(self.spec.sync.interval, self.schedule.steps_alone(self.steps))
        return is_supported(swarm_step, self.swarm_step, others, most)

    def hold(self, peer: str, deed: Deed, reason: str) -> None:
        """Hold against a peer what it did; it may be left out for a while."""
        if deed is Deed.STUMBLE:
            if not self.trust.stumbled(peer):
                log.info("peer.stumbled", peer=peer, reason=reason)
                return
            deed = Deed.LIGHT
        standing = self.trust.hold(peer, deed, self.steps, reason)
        told = log.warning if deed is Deed.HEAVY else log.info
        told("peer.held", peer=peer, deed=deed.value, reason=standing.reason, score=round(1.0 - standing.missing, 2))

    def hold_stall(self, peer: str, reason: str) -> None:
        """Hold against a peer that its contents did not come, unless our own line is to blame."""
        if self.own_line.stalled(peer):
            self.hold(peer, Deed.STUMBLE, reason)

    def trusts(self, peer: str) -> bool:
        """Whether a peer may take part now: be called, accepted, and hand over its state."""
        return self.trust.trusts(peer, self.steps)

    def standing(self, peer: str) -> dict[str, Any]:
        """What ``peers`` shows of how we judge a peer."""
        return {
            "score": round(self.trust.score(peer, self.steps), 2),
            "left_out": not self.trusts(peer),
            "held_against": self.trust.reason(peer),
        }

    def take_in(self, round_: Round, merged: Merged) -> None:
        """Count an outer step that was taken."""
        for peer in round_.exchange.partners:
            self.trust.thank(peer, self.steps, round_.realign)
        self.swarm_step = max(self.swarm_step, merged.swarm_step)
        self.schedule.merged(round_.fragment, merged.swarm_step, merged.merged_steps, merged.merged_tokens)
        self._slow_digests[round_.fragment] = bytes.fromhex(merged.slow_digest)
        self._momentum_digests[round_.fragment] = bytes.fromhex(merged.momentum_digest)

    def ended(self, round_: Round, outcome: Outcome, reason: str) -> None:
        """Count an exchange that is over, and clean up after it."""
        if outcome is not Outcome.APPLIED and not round_.called:
            self.schedule.skip(round_.fragment, self.swarm_step)
        del self.running[round_.fragment]
        entry = self.history.record(round_, outcome, reason, self.swarm_step)
        if self.has_drifted:
            self.drifted.set()
        self._tell({"event": f"exchange.{outcome.value}", **entry})
        task = asyncio.create_task(self._close(round_))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, round_: Round) -> None:
        await round_.close()
        for slot in round_.slots:
            round_.arena.give_back(slot)

    async def close(self, reason: str, patience: float | None = None) -> None:
        """Take part in no more exchanges; those under way may end within their deadline, then they are given up.

        ``patience``: seconds that they get at most.
        """
        self.open = False
        self.history.left_out_by.clear()
        self.drifted.clear()
        latest = max((round_.deadline for round_ in self.running.values()), default=0.0)
        try:
            async with asyncio.timeout(min(latest, self.longest, latest if patience is None else patience)):
                while self.running:
                    await next(iter(self.running.values())).done.wait()
            last_words = HELLO_DEADLINE + 1
        except TimeoutError:
            for round_ in list(self.running.values()):
                round_.handle(base.GaveUp(reason=reason))
            last_words = ABANDON_DEADLINE + 1
        with suppress(TimeoutError):
            async with asyncio.timeout(last_words):
                while self.running or self._closing:  # one that is given up ends, and then closes its streams
                    ending = [asyncio.create_task(round_.done.wait()) for round_ in self.running.values()]
                    try:
                        await asyncio.wait([*ending, *self._closing], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for task in ending:
                            task.cancel()

    @property
    def _slots_each(self) -> int:
        return slots_each(self.spec.sync.group)

    @property
    def _free(self) -> int:
        """How many exchanges may be begun beside those that run."""
        return max(1, self.ready.slots // self._slots_each) - len(self.running)

    @property
    def _has_room(self) -> bool:
        return self._free > 0 and self.arena.free >= self._slots_each

    def _has_room_for(self, place: str) -> bool:
        """Whether a call from an address may begin an exchange: no address takes all of them."""
        shares = Shares(OF_FEW)
        for round_ in self.running.values():
            if round_.called:
                shares.take(round_.place)
        return self._has_room and shares.has_room(place, self._free)
