"""Peers with a quadratic model: no trainer, but the production machine, a thousand in one process.

Each minimizes ``sum(a * (w - 1)**2) / 2`` by SGD with noisy gradients, and exchanges ``w`` as a
real peer does: in fp32, by the outer rule of its run, over the virtual network. After any number of
inner steps ``w`` is normally distributed, and it is drawn at once. So a run costs what its
exchanges cost.

Left out are codecs, checks of what others bring, records and probes. All peers know each other.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from heapq import nlargest
from itertools import count
from math import inf
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.gossip import ROUND, Gossip, Member
from helpers.stimuli import FreeView
from helpers.volunteers import HomeNetwork, can_meet, stay, uplink
from lowcomm_node.simulation.driver import PeerDriver, SimulatedExchange
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_node.simulation.swarm import RECORD_LIFETIME
from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange import outer_kernels as kernels
from lowcomm_protocol.exchange.outer import normalized, token_weights
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.run import RunSpec

Doubles = npt.NDArray[np.float64]
CURVATURE: Doubles = np.geomspace(0.01, 1.0, 8)
"""``a``, one for each weight."""
RATE = 1e-3
NOISE = 1.0
"""Standard deviation of each gradient."""
STEP = 1.0
"""Seconds of an inner step."""
TOKENS = 512
"""Seconds of an inner step."""
SIZE = 2_000_000
"""Bytes of a contribution on the network: 0.8 s at its usual bandwidth."""
RUN_ID, PLAN = "00" * 32, "11" * 32


def spec_of(method: str, seed: int = 0, **sync: Any) -> RunSpec:
    """A run by a method whose slow weights have a consensus term: no realignments are simulated."""
    settings = {"run": {"name": "quadratic", "seed": seed}, "sync": {"method": method} | sync}
    spec = RunSpec.model_validate(settings)
    assert spec.sync.consensus, f"{method} realigns, which is not simulated here"
    assert spec.sync.fragments == 1
    return spec


@lru_cache(maxsize=4096)
def _steps(count: int) -> tuple[Doubles, Doubles]:
    """What ``count`` inner steps leave of ``w - 1``, and the standard deviation of what they
    add."""
    kept = (1.0 - RATE * CURVATURE) ** count
    once = (1.0 - RATE * CURVATURE) ** 2
    return kept, RATE * NOISE * np.sqrt((1.0 - kept**2) / (1.0 - once))


class Weights:
    """The weights of one peer."""

    def __init__(self, seed: str) -> None:
        self.steps = 0
        self.theta, self.phi, self.delta = np.zeros((3, len(CURVATURE)), np.float32)
        self._random = np.random.default_rng(list(sha256(seed.encode()).digest()))

    def train(self, steps: int) -> None:
        """Take inner steps until there are ``steps``."""
        if steps > self.steps:
            kept, spread = _steps(steps - self.steps)
            noise = spread * self._random.standard_normal(len(CURVATURE))
            self.theta[:] = 1.0 + kept * (self.theta - 1.0) + noise
            self.steps = steps


class Records:
    """What all peers know of each other, as signed records do."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.version = 0
        """How often peers have come or gone."""
        self._first = self._second = (0, "")
        """The two highest swarm steps, and whose they are."""

    def add(self, peer: str) -> None:
        """A peer trains."""
        self.steps[peer], self.version = 0, self.version + 1

    def remove(self, peer: str) -> None:
        """A peer has gone."""
        del self.steps[peer]
        self.version += 1

    def tell(self, peer: str, swarm_step: int) -> None:
        """Take in the swarm step of a peer, which never goes back."""
        self.steps[peer] = swarm_step
        if peer == self._first[1] or swarm_step > self._first[0]:
            if peer != self._first[1]:
                self._second = self._first
            self._first = (swarm_step, peer)
        elif swarm_step > self._second[0]:
            self._second = (swarm_step, peer)

    def furthest(self, but: str) -> int:
        """The highest swarm step that any other peer has."""
        return self._second[0] if self._first[1] == but else self._first[0]


class Known(FreeView):
    """What one peer may look up; see ``events.PeerView``."""

    def __init__(self, records: Records, me: str) -> None:
        self._records, self._me = records, me
        self._others: list[str] = []
        self._version = 0

    def partners(self) -> list[str]:
        if self._version != self._records.version:
            self._version = self._records.version
            self._others = sorted(self._records.steps.keys() - {self._me})
        return self._others

    def training(self) -> list[tuple[str, int]]:
        return [(peer, self._records.steps[peer]) for peer in self.partners()]

    def furthest(self, but: str) -> int:
        return self._records.furthest(but)

    def knows(self, peer: str) -> bool:
        return peer in self._records.steps


class Linked(Known):
    """What one peer may look up that knows others by its view."""

    def __init__(self, records: Records, member: Member) -> None:
        super().__init__(records, member.name)
        self._member, self._view = member, member.view
        self._furthest: tuple[float, list[tuple[int, str]]] = (-ROUND, [])

    def partners(self) -> list[str]:
        return list(self._view.active)

    def training(self) -> list[tuple[str, int]]:
        steps = self._records.steps  # as their pulses say
        return [(peer, steps[peer]) for peer in self._view.active if peer in steps]

    def furthest(self, but: str) -> int:
        at, two = self._furthest
        if self._member.now - at >= ROUND:
            two = nlargest(2, [(step, peer) for peer, step in self.training()])
            self._furthest = self._member.now, two
        return next((step for step, peer in two if peer != but), 0)


class QuadraticPeer(PeerDriver):
    """One peer, which trains from ``began`` until the swarm ends."""

    def __init__(self, swarm: "Swarm", name: str, began: float) -> None:
        self.member = Member(swarm.gossip, name) if swarm.gossip else None
        known = Linked(swarm.records, self.member) if self.member else Known(swarm.records, name)
        super().__init__(swarm.network, Peer(name, swarm.spec, RUN_ID, known))
        self.swarm = swarm
        self.began = began
        self.weights = Weights(f"{swarm.spec.run.seed}/{name}")
        self._next_step = 0.0
        """When the next step ends that is not reported yet."""
        self._due: int | None = None
        """The inner step after which to look what is due."""

    @property
    def steps(self) -> int:
        """Inner steps so far."""
        now = min(self.network.now, self.swarm.seconds)
        return int((now - self.began) / STEP + 1e-6)

    def start(self, like: "QuadraticPeer | None" = None) -> None:
        """Begin to train, from a copy of the state of another peer if there is one."""
        swarm_step, progress = 0, FragmentProgress()
        if like is not None:
            position, weights = like.machine.position, self.weights
            swarm_step = position.swarm_step
            progress = FragmentProgress(version=1, synced=position.schedule[0].synced)
            weights.theta[:], weights.phi[:] = like.weights.theta, like.weights.phi
            weights.delta[:] = like.weights.delta
        ready = events.TrainerReady(
            plan=PLAN,
            sizes=((SIZE, SIZE),),
            realign_sizes=(SIZE,),
            exchanges=4,
            swarm_step=swarm_step,
            steps=0,
            tokens=0,
            progress=(progress,),
            slow_digests=(b"",),
            momentum_digests=(b"",),
        )
        self.stimulate(ready)
        self.stimulate(events.Opened())
        self._wait_for_due()

    def stimulate(self, event: events.PeerEvent) -> None:
        """See PeerDriver. Steps that were passed over come first."""
        if self.network.now >= self._next_step:
            self.report_steps()
        super().stimulate(event)

    def report_steps(self) -> None:
        """Report the inner steps that were passed over."""
        steps, machine = self.steps, self.machine
        self._next_step = self.began + (steps + 1) * STEP - 1e-6
        if steps > machine.position.steps:
            swarm_step = machine.position.swarm_step + steps - machine.position.steps
            self.swarm.records.tell(self.name, swarm_step)
            counts = {"swarm_step": swarm_step, "steps": steps, "tokens": TOKENS * steps}
            super().stimulate(events.Stepped(**counts, seconds=STEP))

    def _next_due(self) -> int | None:
        """The swarm step from which on an exchange is due; no step before it begins one."""
        machine = self.machine
        if not machine.open or machine.kind is None:
            return None
        schedule = machine.position.schedule
        waiting = [fragment for fragment in range(len(schedule)) if fragment not in machine.running]
        return min((schedule.due_from(fragment) for fragment in waiting), default=None)

    def _wait_for_due(self) -> None:
        due = self._next_due()
        if due is None:
            return
        step = self.steps + max(1, due - self.machine.position.swarm_step)
        if self._due is None or step < self._due:
            self._due = step
            self.network.at(self.began + step * STEP, self._on_due, step)

    def _on_due(self, step: int) -> None:
        if step == self._due and not self.over:
            self._due = None
            self.report_steps()
            self._wait_for_due()

    def at_boundary(self, action: Callable[[], None]) -> None:
        """Do something at the end of the inner step that goes on now."""
        boundary = self.began + (self.steps + 1) * STEP
        self.network.at(boundary, lambda: None if self.over else action())

    def leave(self, *, dies: bool) -> None:
        """End: with a word to the partners, or none."""
        if not dies:
            self.stimulate(events.GaveUp(reason="leaves"))
        self.over = True
        for stream in list(self.by_stream):
            self.network.break_(stream)

    def new_exchange(self, one: Underway) -> SimulatedExchange:
        """See PeerDriver."""
        assert self.machine.kind is not None
        return DRIVERS[self.machine.kind.name](self, one)

    def heard(self, peer: str) -> None:
        """See PeerDriver."""
        if self.member is not None:
            self.member.heard[peer] = self.network.now

    def on_effect(self, effect: events.Effect) -> None:
        """See PeerDriver."""
        self.swarm.effects[type(effect).__name__] += 1
        if isinstance(effect, events.Unanswered) and self.member is not None:
            self.member.on_silent(effect.peer)
        if isinstance(effect, events.Over):
            self.swarm.story.append((self.network.now, self.name, effect.outcome, effect.reason))
            self._wait_for_due()


class Numbers(SimulatedExchange):
    """What all kinds share: numbers that travel as they are."""

    peer: QuadraticPeer

    def __init__(self, peer: QuadraticPeer, one: Underway) -> None:
        super().__init__(peer, one)
        self.outer = peer.swarm.spec.sync.outer_settings
        self.weights = peer.weights
        self.received: dict[str, Vector] = {}
        self.steps = 0
        """Inner steps at the capture."""
        self.captured_theta = self.sent = np.empty(0, np.float32)

    def carry_out(self, effect: events.Effect) -> None:
        """See SimulatedExchange."""
        if isinstance(effect, events.Dial):
            self.peer.swarm.effects["Dial"] += 1
        super().carry_out(effect)

    def capture(self, members: tuple[str, ...]) -> None:
        self.peer.at_boundary(self._capture)

    def _capture(self) -> None:
        if self.one.machine.over:
            return
        weights = self.weights
        weights.train(self.peer.steps)
        self.steps = weights.steps
        self.captured_theta, self.sent = weights.theta.copy(), np.empty_like(weights.phi)
        gain, pull = np.float32(self.outer.gain), np.float32(self.outer.consensus)
        kernels.contributed(weights.theta, weights.phi, gain, pull, self.sent)
        self.captured()

    def mean_of(self, peers: Sequence[str], part: slice) -> Vector:
        """The mean of what these have brought to a part of the vector, weighted by tokens."""
        machine, own = self.one.machine, self.one.offer
        tokens = [(machine.offer_of(peer) or own).tokens for peer in peers]
        shares = normalized(token_weights(tokens), len(peers))
        total = np.empty_like(self.sent[part])
        for place, (peer, share) in enumerate(zip(peers, shares, strict=True)):
            add = kernels.add_scaled if place else kernels.scaled
            add(total, self.received.get(peer, self.sent[part]), np.float32(share))
        return total

    def apply(self, effect: events.Apply) -> None:
        self.peer.at_boundary(lambda: self._merge(effect))

    def _merge(self, effect: events.Apply) -> None:
        self.peer.report_steps()
        self.weights.train(self.peer.steps)
        self.pool(effect)
        swarm_step = max(self.peer.machine.position.swarm_step, effect.swarm_step)
        merged = events.Merged(
            exchange=self.one.number,
            swarm_step=swarm_step,
            steps=self.steps,
            tokens=TOKENS * self.steps,
            slow_digest=b"",
            momentum_digest=b"",
        )
        self.peer.stimulate(merged)

    @abstractmethod
    def pool(self, effect: events.Apply) -> None:
        """Take the outer step and merge it."""

    def drop(self) -> None:
        """Keep nothing."""

    def say(self, other: str, kind: str, payload: Any, size: int = 0) -> None:
        """Send something to a peer that takes part."""
        self.network.send(self.links[other], self.peer.name, kind, payload, size)


class PairNumbers(Numbers):
    """Two peers send each other all they have."""

    CONTENTS = WHOLE = frozenset({"content"})

    def use(self, other: str, kind: str, payload: Any) -> None:
        self.received[other] = payload
        self.tell(events.WholeContribution(peer=other))

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.WholeContribution(peer=other):
                self.say(other, "content", self.sent, SIZE)
            case _:
                super().effect(effect)

    def pool(self, effect: events.Apply) -> None:
        """See Numbers."""
        weights, mean = self.weights, self.mean_of(effect.members, slice(None))
        progress, pooled = self.captured_theta - weights.phi, np.empty_like(mean)
        kernels.pooled_of_own(progress, self.sent, mean, np.float32(self.outer.gain), pooled)
        self.outer.rule.step(self.outer, weights.phi, weights.delta, pooled)
        kernels.shifted(weights.theta, weights.phi, self.captured_theta)


class GroupNumbers(Numbers):
    """Every member averages one shard."""

    CONTENTS = WHOLE = frozenset({"shard", "mean"})

    def __init__(self, peer: QuadraticPeer, one: Underway) -> None:
        super().__init__(peer, one)
        self.means: dict[str, Vector] = {}
        """Mean of each shard, by its owner."""

    def shard(self, owner: str) -> slice:
        """Slice of the weights in a member's shard."""
        place, count = self.one.members.index(owner), len(self.one.members)
        return slice(place * len(CURVATURE) // count, (place + 1) * len(CURVATURE) // count)

    def use(self, other: str, kind: str, payload: Any) -> None:
        if kind == "shard":
            self.received[other] = payload
            self.tell(events.Shard(peer=other))
        else:
            self.means[other] = payload
            self.tell(events.ShardMean(peer=other, digest=digest(payload)))

    def effect(self, effect: events.Effect) -> None:
        size = SIZE // len(self.one.members or (1,))
        match effect:
            case events.Shard(peer=other):
                self.say(other, "shard", self.sent[self.shard(other)], size)
            case events.Reduce(contributors=contributors):
                me = self.peer.name
                self.means[me] = self.mean_of(contributors, self.shard(me))
                self.tell(events.Reduced(digest=digest(self.means[me])))
            case events.ShardMean(peer=other):
                self.say(other, "mean", self.means[self.peer.name], size)
            case _:
                super().effect(effect)

    def pool(self, effect: events.Apply) -> None:
        """See Numbers."""
        weights, pull = self.weights, np.float32(self.outer.consensus)
        phi, delta, theta = weights.phi.copy(), weights.delta.copy(), weights.theta.copy()
        # A mean that leaves everything as it is stands for one that is missing.
        means = [self.means.get(owner, phi[self.shard(owner)]) for owner in effect.members]
        pooled = np.empty_like(phi)
        kernels.pooled_of_mean(np.concatenate(means), phi, pull, pooled)
        self.outer.rule.step(self.outer, phi, delta, pooled)
        kernels.shifted(theta, phi, self.captured_theta)
        for owner, applied in zip(effect.members, effect.shards, strict=True):
            if applied:
                part = self.shard(owner)
                weights.phi[part], weights.delta[part] = phi[part], delta[part]
                weights.theta[part] = theta[part]


DRIVERS: dict[str, type[Numbers]] = {"pair": PairNumbers, "group": GroupNumbers}
"""By the name of the kind."""


def digest(vector: Vector) -> bytes:
    """SHA-256 of a vector."""
    return sha256(vector.tobytes()).digest()


@dataclass
class Swarm:
    """Peers that train for some virtual seconds, and as many that never exchange."""

    spec: RunSpec
    count: int
    seconds: float
    conditions: Conditions = field(default_factory=Conditions)
    churn: float = 0.0
    """Peers that go in an hour, and as many that come, in those that there are."""
    homes: bool = False
    """Whether peers have the lines and NATs of volunteers."""
    views: bool = False
    """Whether peers know each other by their views, or each knows all."""
    effects: Counter[str] = field(default_factory=Counter[str])
    """Effects that are only to be known, by name."""
    story: list[tuple[float, str, events.Outcome, str]] = field(default_factory=list)
    """How each exchange ended at each peer, and when."""

    def __post_init__(self) -> None:
        seed = self.spec.run.seed
        self.records = Records()
        self._rates = dict(self.conditions.rates)
        self.conditions = replace(self.conditions, rates=self._rates)
        self.network = (HomeNetwork if self.homes else Network)(seed, self.conditions)
        reaches = can_meet if self.homes else lambda one, other: True
        self.gossip = Gossip(self.network, self.count, reaches) if self.views else None
        self._random = Random(f"swarm:{seed}")
        self._coming = count(self.count)
        self.peers: list[QuadraticPeer] = []
        """Those that are there."""
        for number in range(self.count):
            stays = stay(self._random, self.churn, is_there=True) if self.churn else inf
            self._join(f"peer-{number}", self._random.uniform(0.0, STEP), stays)
        self.alone = [Weights(f"{seed}/alone-{number}") for number in range(self.count)]

    def _join(self, name: str, began: float, stays: float) -> None:
        if self.homes:
            self._rates[name] = uplink(name)
        peer = QuadraticPeer(self, name, began)
        self.peers.append(peer)
        self.records.add(name)
        self.network.peers[name] = peer
        others = [other for other in self.peers if other.machine.open]
        self.network.at(began, peer.start, self._random.choice(others) if others else None)
        if self.gossip is not None and peer.member is not None:
            number = int(name.removeprefix("peer-"))
            self.gossip.join(peer.member, (f"10.{number >> 8}.{number & 255}.0/24",))
        if began + stays < self.seconds:
            self.network.at(began + stays, self._replace, peer)

    def _replace(self, peer: QuadraticPeer) -> None:
        dies = self._random.random() < 0.5
        peer.leave(dies=dies)
        if self.gossip is not None:
            self.gossip.remove(peer.name, dies=dies)
        self.peers.remove(peer)
        del self.network.peers[peer.name]
        if dies:
            self.network.after(RECORD_LIFETIME, self.records.remove, peer.name)
        else:
            self.records.remove(peer.name)
        name = f"peer-{next(self._coming)}"
        if self.network.now + STEP < self.seconds:
            self._join(name, self.network.now + STEP, stay(self._random, self.churn))

    def run(self) -> "Swarm":
        """Until the time is over, and all exchanges that have begun are."""
        self.network.at(self.seconds, self._close)
        self.network.run()
        for peer in self.peers:
            peer.weights.train(peer.steps)
        for weights in self.alone:
            weights.train(int(self.seconds / STEP))
        return self

    def _close(self) -> None:
        for peer in self.peers:
            peer.stimulate(events.Closed())
            if self.gossip is not None:
                del self.gossip.members[peer.name]

    @property
    def outcomes(self) -> Counter[events.Outcome]:
        """How exchanges ended, of all peers together."""
        return Counter(outcome for _, _, outcome, _ in self.story)

    @property
    def spread(self) -> float:
        """Root mean square of the standard deviation of weights across peers."""
        return spread([peer.weights for peer in self.peers])

    @property
    def spread_alone(self) -> float:
        """The same of those that never exchange."""
        return spread(self.alone)


def spread(peers: Sequence[Weights]) -> float:
    """Root mean square of the standard deviation of weights across peers."""
    return float(np.sqrt(np.stack([one.theta for one in peers]).var(0).mean()))
