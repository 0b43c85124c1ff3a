"""The production engine without tensors, in virtual time, with members that die and return.

Each peer drives the machine of a peer (``exchange/peer.py``) as a node does; steps, captures and
merges take their time, contents have their sizes, and nothing is computed. So a day of a swarm
takes seconds. Two measurements use it: how long peers wait for each other where steps vary, and the
goodput of members that fail at random.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import exp, inf
from random import Random
from types import SimpleNamespace
from typing import Any

from published.latency import MU, STEPS, VARIANCE
from published.timeline import bits

from lowcomm_node.simulation.driver import SimulatedExchange
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_node.simulation.peer import PeerDriver, SimulatedPeer
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.plan import FragmentProgress, SwarmClock, SyncSchedule
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.run import RunSpec

RECORD_LIFETIME = 30.0
"""Seconds that others still believe in a peer that died."""


class Replica:
    """Counters in place of weights."""

    def __init__(self, spec: RunSpec, name: str, values: int) -> None:
        self.spec = spec
        self.run_id = "00" * 32
        self.course = SpecTimeline(spec)
        each = values // spec.sync.fragments
        self.plan = SimpleNamespace(
            digest="11" * 32,
            fragments=[SimpleNamespace(numel=each) for _ in range(spec.sync.fragments)],
        )
        self.clock = SwarmClock()
        self.steps = 0
        self.tokens = 0
        self.begun = 0
        """Steps that it had when it was last started."""
        self.histories = [b"start"] * spec.sync.fragments
        """What the slow weights of each fragment have been through: equal ones are equal."""
        self.schedule = SyncSchedule(
            spec.sync.interval, [FragmentProgress() for _ in self.histories]
        )

    def inner_step(self) -> float:
        """Count a step."""
        self.clock.tick()
        self.steps += 1
        self.tokens += 1
        return 0.0

    def slow_digest(self, fragment: int) -> str:
        """Of what it has been through."""
        return sha256(self.histories[fragment]).hexdigest()

    def momentum_digest(self, fragment: int) -> str:
        """Likewise."""
        return self.slow_digest(fragment)

    def copy(self, other: "Replica") -> None:
        """Take over another's state."""
        self.clock.step = other.clock.step
        self.histories = list(other.histories)
        for fragment in range(len(self.histories)):
            self.schedule.merged(fragment, self.clock.step, self.steps, self.tokens)


class Contents(SimulatedExchange):
    """Names and sizes in place of contents."""

    WHOLE = frozenset({"content", "shard", "mean"})
    CONTENTS = WHOLE | {"missed"}
    peer: "HollowPeer"

    def __init__(self, peer: "HollowPeer", one: Underway) -> None:
        super().__init__(peer, one)
        self.replica = peer.replica
        self.at = 0
        """Steps that its contribution is of."""
        numel = self.replica.plan.fragments[one.fragment].numel
        self.size = 4 * numel if one.realign else peer.content_sizes()[one.fragment][0]

    def capture(self, members: tuple[str, ...]) -> None:
        """At the end of the step."""
        self.peer.at_boundary.append(self._captured)

    def _captured(self) -> None:
        if not self.one.machine.over:
            self.at = self.replica.steps
            self.captured()

    def use(self, other: str, kind: str, payload: Any) -> None:
        self.tell(replace(payload, peer=other))

    def effect(self, effect: events.Effect) -> None:
        share = self.size // max(1, len(self.one.members) or 1)
        match effect:
            case events.WholeContribution(peer=other):
                self._send(other, "content", effect, self.size)
            case events.MissedSteps(peer=other):
                assert self.one.lacking is not None
                self._send(other, "missed", effect, self.one.lacking.steps[other] * self.size)
            case events.Shard(peer=other):
                self._send(other, "shard", effect, share)
            case events.Reduce(contributors=contributors):
                mean = sha256(f"{self.peer.name}{contributors}{self.one.number}".encode())
                self.tell(events.Reduced(digest=mean.digest()))
            case events.ShardMean(peer=other):
                self._send(other, "mean", effect, share)
            case _:
                super().effect(effect)

    def _send(self, other: str, kind: str, message: events.MemberMessage, size: int) -> None:
        self.peer.bytes_sent += size
        self.network.send(self.links[other], self.peer.name, kind, message, size)

    def apply(self, effect: events.Apply) -> None:
        """Merge after the overlap."""
        ripe = self.at + self.replica.spec.sync.overlap
        self.peer.ripening.append((ripe, lambda: self._merge(effect)))

    def _merge(self, effect: events.Apply) -> None:
        replica, fragment = self.replica, self.one.fragment
        # Rounds that members count may differ; what they call the exchange does not.
        replica.histories[fragment] = f"{self.one.id}{effect.shards}".encode()
        replica.clock.observe(effect.swarm_step)
        shares = sum(effect.shards) / len(effect.shards) if effect.shards else 1.0
        since = max(replica.schedule[fragment].merged_steps, replica.begun)
        self.peer.merged += shares * max(0, self.at - since) / len(replica.histories)
        self.peer.applied += 1
        self.peer.realigned += self.one.realign
        progress = replica.schedule.merged(fragment, replica.clock.step, self.at, self.at)
        self.peer.stimulate(
            events.Merged(
                exchange=self.one.number,
                swarm_step=replica.clock.step,
                steps=progress.merged_steps,
                tokens=progress.merged_tokens,
                slow_digest=bytes.fromhex(replica.slow_digest(fragment)),
                momentum_digest=bytes.fromhex(replica.momentum_digest(fragment)),
            )
        )

    def drop(self) -> None:
        self.peer.failed += 1
        if self.one.call is None:
            self.replica.schedule.skip(self.one.fragment, self.replica.clock.step)


class HollowPeer(SimulatedPeer):
    """A peer that counts."""

    replica: Replica  # type: ignore[assignment]

    def __init__(self, world: "World", name: str, values: int) -> None:
        super().__init__(world, name, Replica(world.spec, name, values), 1.0)
        self.merged = 0.0
        """Steps whose progress has been merged with that of others."""
        self.stepped = 0.0
        """Seconds of its steps."""
        self.finished = 0.0
        """When the last of them ended."""

    def new_exchange(self, one: Underway) -> Contents:
        return Contents(self, one)

    def step_seconds(self) -> float:
        seconds = self.world.step_seconds()
        self.stepped += seconds
        return seconds

    def content_sizes(self) -> tuple[tuple[int, int], ...]:
        """Nothing is sent again."""
        each = bits(self.sync) / 8
        sizes = (round(fragment.numel * each) for fragment in self.replica.plan.fragments)
        return tuple((size, size) for size in sizes)

    def transfer_seconds(self, size: int) -> float:
        return size / self.world.uplink


@dataclass(frozen=True)
class Failures:
    """How members fail: times between are exponential."""

    between: float
    """Mean seconds between two failures of one member."""
    restart: float
    """Seconds until it trains again, copying the state included."""


@dataclass(frozen=True)
class Count:
    """What came of a run, of all members together."""

    stepped: float
    """Seconds of steps, of all members."""
    merged: float
    """Steps that were merged with those of others."""
    steps: float
    applied: int
    failed: int
    realigned: int


class World:
    """The members of a run."""

    def __init__(
        self,
        spec: RunSpec,
        values: int,
        members: int,
        conditions: Conditions,
        step: Callable[[Random], float],
        failures: Failures | None = None,
        until: float = float("inf"),
        uplink: float = float("inf"),
    ) -> None:
        """``step`` draws the seconds of an inner step; ``until``: nobody takes a step later;
        ``uplink``: bytes a second that a member knows to have."""
        self.spec = spec
        self.values = values
        self.network = Network(spec.run.seed, conditions)
        self.failures = failures
        self.until = until
        self.uplink = uplink
        self._step = step
        self._random = Random(f"hollow:{spec.run.seed}")
        self._gone: dict[str, float] = {}
        self.alive: dict[str, HollowPeer] = {}
        self.all: list[HollowPeer] = []
        for number in range(members):
            self._start(f"peer-{number}")

    def run(self) -> Count:
        """Until the run is over."""
        network = self.network
        if self.until < float("inf"):
            network.at(self.until, self._stop)
        network.run()
        return Count(
            stepped=sum(one.stepped for one in self.all),
            merged=sum(one.merged for one in self.all),
            steps=sum(one.replica.steps for one in self.all),
            applied=sum(one.applied for one in self.all),
            failed=sum(one.failed for one in self.all),
            realigned=sum(one.realigned for one in self.all),
        )

    def _stop(self) -> None:
        for peer in list(self.alive.values()):
            peer.over = True
        self.alive.clear()
        self.failures = None

    def step_seconds(self) -> float:
        """Of the next step of any member."""
        return self._step(self._random)

    def _start(self, name: str, copies: bool = False) -> None:
        if self.network.now >= self.until:
            return
        peer = HollowPeer(self, name, self.values)
        if copies:
            self.copy_state(peer)
        self.alive[name] = self.network.peers[name] = peer  # type: ignore[assignment]
        self.all.append(peer)
        peer.start()
        if self.failures is not None:
            after = self._random.expovariate(1.0 / self.failures.between)
            self.network.after(after, lambda: self._fail(peer))

    def _fail(self, peer: HollowPeer) -> None:
        if peer.over or self.failures is None:
            return
        peer.die()
        del self.alive[peer.name]
        self.network.peers.pop(peer.name, None)
        self._gone[peer.name] = self.network.now + RECORD_LIFETIME
        self.network.after(self.failures.restart, lambda: self._start(peer.name, copies=True))

    # what peers know of each other

    def training(self) -> Sequence[str]:
        now = self.network.now
        gone = [name for name, until in self._gone.items() if until > now]
        return sorted({*self.alive, *gone})

    def others(self, *but: Any) -> Iterable[HollowPeer]:
        return [
            one
            for one in self.alive.values()
            if one.training and one not in but and one.name not in but
        ]

    def on_step(self, peer: PeerDriver) -> None:
        peer.finished = self.network.now  # type: ignore[attr-defined]

    def copy_state(self, peer: SimulatedPeer) -> bool:
        """From the one that is furthest."""
        there = list(self.others(peer))
        if there:
            furthest = max(there, key=lambda one: one.replica.clock.step)
            peer.replica.copy(furthest.replica)  # type: ignore[attr-defined]
        return bool(there)


# How long peers wait: never. The price is rounds in which a peer finds no partner.

PEERS = (16, 64)
INTERVAL = 20
ROUNDS = 20
"""Of `STEPS` inner steps of the paper make one round of ours."""


def waiting() -> dict[str, dict[str, float]]:
    """By number of peers, for pairs that are drawn again each time."""
    return {str(peers): _wait(peers) for peers in PEERS}


def _wait(peers: int) -> dict[str, float]:
    spec = RunSpec.model_validate(
        {
            "run": {"name": "papers", "steps": ROUNDS * INTERVAL},
            "sync": {"method": "noloco", "interval": INTERVAL},
        }
    )

    def step(random: Random) -> float:
        """Several of the paper's steps, so that a round takes as many of them."""
        return sum(random.lognormvariate(MU, VARIANCE**0.5) for _ in range(STEPS // INTERVAL))

    world = World(spec, 10**6, peers, Conditions(), step)
    count = world.run()
    waited = sum(peer.finished - peer.stepped for peer in world.all)
    return {
        "waited": waited / count.stepped,
        "alone": count.failed / (count.failed + count.applied),
        "steps": count.steps / peers,
    }


# Goodput beside barriers. The scene follows Covenant-72B: 72B parameters, and a barrier every 30
# steps with 70 s of communication that computes 94.5 % of the time, which makes 40 s a step. The
# line is assumed; intervals of ours are those that it carries. Goodput is the share of the members'
# time whose steps were merged with those of others. It leaves out what a failure loses, and
# the time until a member is back.

VALUES, STEP, UPLINK = 72 * 10**9, 40.0, 110e6 / 8
MEMBERS = 8
WINDOW, BARRIER = 30, 70.0
"""Steps between two barriers, and seconds of communication at each."""
RESTART = 300.0
"""Seconds until a member trains again."""
HOURS = 12.0
BETWEEN = {"never": inf, "24 h": 24.0, "6 h": 6.0, "2 h": 2.0, "1 h": 1.0, "20 min": 1 / 3}
"""Hours between two failures of one member."""
FELL_TO = 0.27
"""Goodput of data-parallel training in the paper of Decoupled DiLoCo, which keeps 88 % itself."""
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "groups": ("streaming-diloco", {"interval": 36, "fragments": 16}, MEMBERS - 1),
    "pairs": ("lowcomm", {"interval": 52, "fragments": 16, "codec": "mod3"}, 1),
}
"""Preset, settings, and how many streams share the line."""


def barrier(window: int, talk: float, hours: float) -> float:
    """Share of the time that counts where all wait for all every ``window`` steps, and a failure of
    any member costs all what came since, and the restart."""
    computes, whole = window * STEP, window * STEP + talk
    if hours == inf:
        return computes / whole
    rate = MEMBERS / (3600 * hours)
    return computes / ((1 / rate + RESTART) * (exp(rate * whole) - 1))


def hours_at(share: float) -> float:
    """Between two failures of a member where a barrier at every step leaves such a share."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if barrier(1, 0.0, middle) < share else (low, middle)
    return low


def engine(method: str, hours: float) -> dict[str, float]:
    """Shares of the members' time: of steps, and of steps that were merged."""
    preset, sync, streams = METHODS[method]
    spec = RunSpec.model_validate(
        {"run": {"name": "papers", "steps": 10**8}, "sync": {"method": preset} | sync}
    )
    failures = None if hours == inf else Failures(3600 * hours, RESTART)
    conditions = Conditions(bandwidth=UPLINK / streams)
    until = 3600 * HOURS
    world = World(spec, VALUES, MEMBERS, conditions, lambda random: STEP, failures, until, UPLINK)
    count = world.run()
    time = MEMBERS * until
    return {
        "steps": count.steps * STEP / time,
        "merged": count.merged * STEP / time,
        "applied": count.applied,
        "failed": count.failed,
        "realigned": count.realigned,
    }


WHERE = f"where that is {FELL_TO:.0%}".replace("%", " %")
SCENES = ("6 h", *(name for name in BETWEEN if name != "6 h"), WHERE)
"""By time between failures, in the order in which they are measured."""


def goodput(scene: str) -> dict[str, Any]:
    """What each method keeps."""
    hours = hours_at(FELL_TO) if scene == WHERE else BETWEEN[scene]
    return {
        "minutes": None if hours == inf else 60 * hours,
        "every step": barrier(1, 0.0, hours),
        "every window": barrier(WINDOW, BARRIER, hours),
        **{method: engine(method, hours) for method in METHODS},
    }
