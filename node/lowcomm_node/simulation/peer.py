"""One simulated peer: a real replica, real exchanges, and virtual time.

What ``daemon.py``, ``sync/exchanger.py`` and ``trainer/loop.py`` do with sockets, clocks and threads happens here as
events: steps take ``1 / speed`` seconds, captures and merges wait for step boundaries, contributions travel as bytes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lowcomm_node.simulation.network import Stream
from lowcomm_node.simulation.rounds import GroupRound, PairRound, Round
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.exchange.base import Accepted, GaveUp
from lowcomm_protocol.peers.liveness import PROBE_EVERY, Liveness
from lowcomm_protocol.peers.trust import Trust
from lowcomm_protocol.plan.clock import is_supported, largest_jump
from lowcomm_protocol.plan.matching import Offer, Readiness, Refusal, candidates, consider, wins_crossing

if TYPE_CHECKING:
    from lowcomm_node.simulation.swarm import Swarm


AHEAD = 10**9
"""Swarm steps that a liar claims too many."""


class Peer:
    """A replica that trains and exchanges until the run is over, it leaves or dies."""

    def __init__(self, swarm: "Swarm", name: str, replica: Replica, speed: float) -> None:
        self.swarm, self.name, self.replica = swarm, name, replica
        self.sync, self.speed = replica.spec.sync, speed
        self.training = self.over = False
        self.delay = 0.0
        self.pauses: tuple[tuple[float, float], ...] = ()
        self.bytes_sent = 0
        self.applied = self.failed = self.refused = self.implausible = self.realigned = 0
        self.trust = Trust(self.sync.interval)
        self.deeds: list[tuple[str, Deed, str]] = []
        """What it has held against others: who, how heavy, and why."""
        self.liveness = Liveness(name)
        self.losses: list[float] = []
        """Loss of every inner step, nats a token."""
        self.running: dict[int, Round] = {}
        self.by_stream: dict[Stream, Round] = {}
        self.at_boundary: list[Callable[[], None]] = []
        self.ripening: list[tuple[int, Callable[[], None]]] = []

    def hold(self, peer: str, deed: Deed, reason: str) -> None:
        """Hold a deed against another peer."""
        if deed is Deed.STUMBLE:
            if not self.trust.stumbled(peer):
                return
            deed = Deed.LIGHT
        self.trust.hold(peer, deed, self.replica.steps, reason)
        self.deeds.append((peer, deed, reason))

    # inner steps

    def start(self) -> None:
        """Begin to train."""
        self.training = True
        self.after(1.0 / self.speed, self._step)
        self._probe()

    def leave(self) -> None:
        """Say goodbye: exchanges under way are given up, and others hear of it."""
        for round_ in list(self.running.values()):
            round_.handle(GaveUp(reason="leaves"))
        self.training, self.over = False, True

    def die(self) -> None:
        """End without a word; whoever is connected notices."""
        self.training, self.over = False, True
        for stream in self.by_stream:
            self.swarm.network.break_(stream)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, once the machine runs."""
        self.swarm.network.after(seconds, lambda: self._when_awake(action))

    def _when_awake(self, action: Callable[[], None]) -> None:
        now = self.swarm.network.now
        until = max((start + length for start, length in self.pauses if start <= now < start + length), default=now)
        if until > now:
            self.swarm.network.at(until, lambda: self._when_awake(action))
        elif not self.over:
            action()

    def _step(self) -> None:
        self.losses.append(self.replica.inner_step())
        self._pass_boundary()
        self.swarm.on_step(self)
        for fragment in self.replica.schedule.due(self.replica.clock.step) if self.sync.group > 1 else ():
            if fragment not in self.running:
                self._begin(fragment)
        if not self.replica.course.is_over(self.replica.clock.step):
            self.after(1.0 / self.speed, self._step)
        else:
            self._finish()

    def _finish(self) -> None:
        """The run is over: merge what has arrived, begin nothing new."""
        self.training = False
        for round_ in list(self.running.values()):
            round_.handle(GaveUp(reason="the run is over"))
        for _, merge in self.ripening:
            merge()
        self.ripening.clear()
        self.over = True

    def _pass_boundary(self) -> None:
        actions, self.at_boundary = self.at_boundary, []
        for action in actions:
            action()
        ripe = [entry for entry in self.ripening if entry[0] <= self.replica.steps]
        self.ripening = [entry for entry in self.ripening if entry not in ripe]
        for _, merge in ripe:
            merge()

    # what is due, and calls of others

    def _begin(self, fragment: int) -> None:
        offer = self._offer(fragment, self.replica.schedule.round_of(fragment, self.replica.clock.step))
        self._new(offer, self._candidates(offer), called=False).start()

    def _probe(self) -> None:
        """Call some of the peers that records name and of which there was no sign of life of late."""
        known = ((peer, self.swarm.places(peer)) for peer in self.swarm.training() if peer != self.name)
        for peer in self.liveness.due(known, self.swarm.network.now, self.swarm.connected(self)):
            self.swarm.probe(self, peer)
        self.after(PROBE_EVERY, self._probe)

    def _candidates(self, offer: Offer) -> Sequence[str]:
        now, steps = self.swarm.network.now, self.replica.steps
        alive = [peer for peer in self.swarm.training() if self.liveness.is_alive(peer, now)]
        there = [peer for peer in alive if self.trust.trusts(peer, steps)]
        seed, group, pairing = self.replica.spec.run.seed, self.sync.group, self.sync.pairing
        return candidates(seed, offer.fragment, offer.round, self.name, there, group, pairing)

    def _new(self, offer: Offer, peers: Sequence[str], called: bool) -> Round:
        kind = PairRound if self.sync.group == 2 else GroupRound
        round_ = self.running[offer.fragment] = kind(self, offer, peers, called)
        return round_

    def _offer(self, fragment: int, number: int) -> Offer:
        replica, progress = self.replica, self.replica.schedule[fragment]
        ahead = AHEAD if self.swarm.lie(self) == "clock" else 0
        return Offer(
            protocol=PROTOCOL_VERSION,
            run_id=replica.run_id,
            plan=replica.plan.digest,
            codec=self.sync.codec,
            fragment=fragment,
            stage=0,
            round=number,
            swarm_step=replica.clock.step + ahead,
            steps=replica.steps - progress.merged_steps,
            tokens=replica.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=bytes.fromhex(replica.slow_digest(fragment)) if self.sync.consensus == 0 else b"",
            momentum_digest=bytes.fromhex(replica.momentum_digest(fragment)) if self.sync.consensus == 0 else b"",
        )

    def _consider(self, peer: str, theirs: Offer) -> Refusal | None:
        round_, replica = self.running.get(theirs.fragment), self.replica
        if round_ is not None and round_.exchange.is_calling(peer) and wins_crossing(self.name, peer):
            return Refusal.CROSSED
        if not self.trust.trusts(peer, replica.steps):
            return Refusal.NOT_TRUSTED
        ready = Readiness(
            training=self.training,
            busy=round_ is not None and not round_.exchange.has_room_for(peer),
            has_room=True,
            min_steps=0 if round_ is not None else replica.schedule.least_steps(theirs.fragment, self.sync.min_steps),
            step_is_supported=self.supports(peer, theirs.swarm_step),
            fragment_count=len(replica.schedule),
        )
        return consider(theirs, self._offer(theirs.fragment, theirs.round), ready)

    def supports(self, peer: str, swarm_step: int) -> bool:
        """Whether what we and others know makes a swarm step plausible that a peer claims."""
        others = (one.replica.clock.step for one in self.swarm.others(self, peer))
        most = largest_jump(self.sync.interval, self.replica.schedule.steps_alone(self.replica.steps))
        return is_supported(swarm_step, self.replica.clock.step, others, most)

    # messages

    def receive(self, stream: Stream, kind: str, payload: Any) -> None:
        """Take in a message, once the machine runs."""
        if self.pauses and not self.over:
            self._when_awake(lambda: self._take_in(stream, kind, payload))
        else:
            self._take_in(stream, kind, payload)

    def _take_in(self, stream: Stream, kind: str, payload: Any) -> None:
        if self.over:
            if kind != "closed":
                self.swarm.network.break_(stream)
        elif kind == "hello":
            self._answer(stream, payload)
        elif (round_ := self.by_stream.get(stream)) is not None:
            round_.receive(stream, stream.other(self.name), kind, payload)

    def _answer(self, stream: Stream, theirs: Offer) -> None:
        peer = stream.other(self.name)
        self.liveness.met(peer, self.swarm.network.now)
        refusal = self._consider(peer, theirs)
        if refusal is not None:
            self.swarm.network.send(stream, self.name, "refuse", refusal)
            return
        round_ = self.running.get(theirs.fragment)
        if round_ is None:
            offer, pairs = self._offer(theirs.fragment, theirs.round), self.sync.group == 2
            round_ = self._new(offer, [] if pairs else self._candidates(offer), called=True)
            round_.exchange.expect(peer)
            if not pairs:
                round_.start()
        crossed = round_.calls.pop(peer, None)
        if crossed is not None:
            self.swarm.network.close(crossed, self.name)
        round_.link(peer, stream)
        self.swarm.network.send(stream, self.name, "accept", round_.offer)
        round_.handle(Accepted(peer=peer, offer=theirs, called_us=True))
