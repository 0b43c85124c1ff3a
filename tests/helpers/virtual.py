"""A swarm of virtual peers: an exchange each, over the seeded network and in the virtual time of
the simulation.

Every peer drives the machine of a peer (``exchange/peer.py``) as the simulator does, and decides
nothing. Streams break, contributions stall, trainers fail; peers die with or without anybody
noticing. The same seed gives the same story, to the event. What travels are names: a mean is the
digest of whose mean it is."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

from helpers.stimuli import FreeView
from lowcomm_node.simulation.driver import PeerDriver, SimulatedExchange
from lowcomm_node.simulation.network import Conditions, Network, SimulatedStream
from lowcomm_protocol.errors import Offence
from lowcomm_protocol.exchange import base, events, kinds
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.run import RunSpec

DEADLINE = 60.0
"""Seconds that an exchange may take, besides those for last words."""
LAST_WORDS = kinds.HELLO_DEADLINE
INTERVAL = 20

OFFER = Offer(
    protocol=1,
    run_id="00" * 32,
    plan="11" * 32,
    codec="fp32",
    fragment=0,
    round=0,
    swarm_step=2 * INTERVAL,
    steps=INTERVAL,
    tokens=10_240,
    version=2,
    slow_digest=b"",
)
"""What everybody brings, but for the number of the round."""
READY = events.TrainerReady(
    plan=OFFER.plan,
    sizes=((1, 1),),
    realign_sizes=(1,),
    exchanges=4,
    swarm_step=OFFER.swarm_step,
    steps=2 * INTERVAL,
    tokens=2 * OFFER.tokens,
    progress=(
        FragmentProgress(
            OFFER.version, merged_steps=INTERVAL, merged_tokens=OFFER.tokens, synced=1
        ),
    ),
    slow_digests=(b"",),
    momentum_digests=(b"",),
)
STEPPED = events.Stepped(swarm_step=READY.swarm_step, steps=READY.steps, tokens=READY.tokens)
"""The step at which the fragment is due."""


@dataclass(frozen=True)
class Weather:
    """What goes wrong, as probabilities, and how long things take, in seconds."""

    delay: float = 0.2
    """Longest way of one message."""
    transfer: float = 5.0
    """Longest time that a contribution travels."""
    skew: float = 2.0
    """Longest time between the first and the last peer that begins."""
    breaks: float = 0.0
    """A stream breaks."""
    deaths: float = 0.0
    """A peer dies; of half of them nobody hears."""
    stalls: float = 0.0
    """A contribution takes longer than the deadline."""
    fails: float = 0.0
    """A trainer gives up."""
    blind: float = 0.0
    """A peer does not know that another trains."""
    idle: float = 0.0
    """A peer does not begin, but accepts calls; of half of them none."""
    unready: float = 0.0
    """A peer refuses every call until it begins itself."""

    @property
    def conditions(self) -> Conditions:
        """What of it the network brings about."""
        latency, notice = (0.0, self.delay), (0.0, 1.0)
        return Conditions(
            latency=latency, notice=notice, loss=self.breaks, loss_within=DEADLINE / 2
        )


CALM = Weather()
STORM = Weather(
    transfer=30.0,
    breaks=0.15,
    deaths=0.1,
    stalls=0.05,
    fails=0.05,
    blind=0.1,
    idle=0.2,
    unready=0.1,
)


@cache
def _spec(group: int, method: str) -> RunSpec:
    sync = {
        "method": method,
        "group": group,
        "interval": INTERVAL,
        "fragments": 1,
        "codec": OFFER.codec,
    }
    return RunSpec.model_validate({"run": {"name": "virtual"}, "sync": sync})


class Swarm(Network):
    """The peers, and the network that they share."""

    peers: "dict[str, VirtualPeer]"

    def __init__(
        self, seed: int, size: int, group: int, weather: Weather, method: str = "noloco"
    ) -> None:
        super().__init__(seed, weather.conditions)
        self.group = group
        self.weather = weather
        self.story = f"seed {seed}: Swarm({seed}, {size}, {group}, {weather})"
        self.violations: list[str] = []
        spec = _spec(group, method)
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"seed": seed})})
        names = [f"peer{number:03d}" for number in range(size)]
        self.peers |= {name: VirtualPeer(self, name, spec) for name in names}
        for peer in self.peers.values():
            peer.view.others = [name for name in names if not self.happens(weather.blind)]
            idle = self.happens(weather.idle)
            if self.happens(0.5) if idle else not self.happens(weather.unready):
                peer.stimulate(events.Opened())
            if not idle:
                self.after(self.upto(weather.skew), peer.begin)
            if self.happens(weather.deaths):
                self.after(self.upto(DEADLINE / 2), peer.die)

    def run(self) -> "Swarm":
        super().run()
        return self

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def upto(self, seconds: float) -> float:
        return self.random.uniform(0.0, seconds)


class View(FreeView):
    """What a virtual peer knows of the others."""

    def __init__(self) -> None:
        self.others: list[str] = []

    def partners(self) -> Sequence[str]:
        return self.others

    def training(self) -> Sequence[tuple[str, int]]:
        return [(peer, OFFER.swarm_step) for peer in self.others]

    def furthest(self, but: str) -> int:
        return OFFER.swarm_step


class VirtualPeer(PeerDriver):
    """One peer in one round."""

    def __init__(self, swarm: Swarm, name: str, spec: RunSpec) -> None:
        self.view = View()
        super().__init__(
            swarm, Peer(name, spec, OFFER.run_id, self.view, Deadlines(first=DEADLINE))
        )
        self.swarm = swarm
        self.part: Part | None = None
        """In its exchange, once that has begun."""
        self.began = self.ended = 0.0
        self.ahead = 0.0
        """Seconds that its clock is ahead of the time of the swarm."""
        self.applied: tuple[str, ...] | None = None
        self.shards: tuple[bool, ...] = ()
        self.averaged: tuple[str, ...] = ()
        self.stumbles: list[tuple[str, str]] = []
        self.before: Callable[[events.Effect], None] = lambda effect: None
        """Told each effect of its exchange before it is carried out: here a test breaks things."""
        self.stimulate(READY)

    @property
    def dead(self) -> bool:
        return self.over

    @property
    def exchange(self) -> base.Gathering | None:
        return None if self.part is None else self.part.one.machine

    @property
    def group(self) -> groups.GroupExchange:
        assert isinstance(self.exchange, groups.GroupExchange)
        return self.exchange

    @property
    def links(self) -> dict[str, SimulatedStream]:
        return {} if self.part is None else self.part.links

    @property
    def streams(self) -> list[SimulatedStream]:
        return [] if self.part is None else [*self.part.links.values(), *self.part.calls.values()]

    @property
    def outcome(self) -> tuple[tuple[str, ...], tuple[bytes, ...]] | None:
        """What it has applied: the members, and for each the digest of its shard, empty where it
        was left out."""
        if self.applied is None:
            return None
        shards = zip(self.applied, self.shards, strict=True)
        return self.applied, tuple(
            self.group.tally.digest_of(peer) if shard else b"" for peer, shard in shards
        )

    def begin(self) -> None:
        """Come to the step at which the fragment is due."""
        if self.part is None and not self.over:
            self.stimulate(events.Opened())
            self.stimulate(STEPPED)

    def die(self, noticed: bool | None = None) -> None:
        self.over = True
        for stream in self.streams:
            if self.swarm.happens(0.5) if noticed is None else noticed:
                self.swarm.break_(stream)

    @property
    def now(self) -> float:
        return self.swarm.now + self.ahead

    def set_clock(self, seconds: float) -> None:
        """Its clock jumps forward."""
        self.ahead += seconds
        self.after(0.0, self._on_timer)

    # what the driver asks for

    def new_exchange(self, one: Underway) -> "Part":
        assert self.part is None, f"{self.name} has begun a second exchange"
        self.part = PARTS[one.kind.name](self, one)
        self.began = self.swarm.now
        if self.swarm.happens(self.swarm.weather.fails):
            self.after(self.swarm.upto(DEADLINE), lambda: self.give_up("the trainer failed"))
        return self.part

    def give_up(self, reason: str) -> None:
        if self.part is not None:
            self.part.tell(events.GaveUp(reason=reason))

    def on_effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Penalty(peer=peer, reason=reason, forgiven=True):
                self.stumbles.append((peer, reason))
            case events.Penalty(peer=peer, reason=reason):
                self.swarm.violations.append(f"{self.name} accuses {peer}: {reason}")
            case events.Drifted():
                self.swarm.violations.append(f"{self.name} believes that it has drifted")
            case events.Over():
                self.stimulate(events.Closed())  # an exchange each
            case _:
                pass

    def receive(self, stream: SimulatedStream, kind: str, payload: Any) -> None:
        if not self.over:  # of the dead nobody hears
            super().receive(stream, kind, payload)

    # contents

    def send_content(self, peer: str, kind: str, payload: object = None) -> None:
        weather = self.swarm.weather
        stalls = self.swarm.happens(weather.stalls)
        seconds = 2 * DEADLINE if stalls else self.swarm.upto(weather.transfer)
        self.swarm.send(self.links[peer], self.name, kind, payload, late=seconds)

    def mean(self) -> bytes:
        return sha256(f"{self.group.members} {self.name} {self.averaged}".encode()).digest()

    def mean_for(self, peer: str) -> bytes:
        """What we send a member as the mean of our shard: an honest peer sends all the same."""
        return self.mean()

    def held_for(self, peer: str, held: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """What we tell a member that we hold."""
        return held

    def commit_for(
        self, peer: str, shards: tuple[bool, ...], heard: tuple[bool, ...]
    ) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """What we commit to towards a member: an honest peer to the same towards all."""
        return shards, heard


class Part(SimulatedExchange):
    """One peer's part in its exchange. It reads a stream in order: what follows a content waits
    until that is decoded."""

    peer: VirtualPeer

    def __init__(self, peer: VirtualPeer, one: Underway) -> None:
        super().__init__(peer, one)
        self.inbox: defaultdict[str, deque[tuple[SimulatedStream, str, object]]] = defaultdict(
            deque
        )
        self.decoding: set[str] = set()
        self.decided = False

    # messages

    def receive(self, stream: SimulatedStream, other: str, kind: str, payload: Any) -> None:
        is_call = self.calls.get(other) is stream
        if not is_call and self.links.get(other) is not stream:
            return  # a call that was refused or dropped
        if kind in ("closed", "abandon"):
            super().receive(stream, other, kind, payload)
        elif is_call is not (kind in ("accept", "refuse")):
            self.calls.pop(other, None)
            self.fail(other, f"sent {kind!r} out of turn", deed=Offence.HEAVY)
            self.network.break_(stream)
        elif other in self.decoding:
            self.inbox[other].append((stream, kind, payload))
        else:
            if kind in self.CONTENTS:
                self.decoding.add(other)
            super().receive(stream, other, kind, payload)

    def use(self, other: str, kind: str, payload: Any) -> None:
        event = replace(payload, peer=other)
        self.peer.after(self.peer.swarm.upto(0.5), lambda: self.decoded(other, event))

    def decoded(self, other: str, event: Any) -> None:
        self.tell(event)
        self.decoding.discard(other)
        inbox = self.inbox[other]
        while inbox and other not in self.decoding:
            stream, kind, payload = inbox.popleft()
            self.receive(stream, other, kind, payload)

    # effects

    def carry_out(self, effect: events.Effect) -> None:
        assert not self.decided, "effects after the exchange was over"
        self.peer.before(effect)
        if self.peer.over:
            return
        if isinstance(effect, events.Apply | events.End):
            self.decided = True
            self.peer.ended = self.peer.swarm.now
        super().carry_out(effect)

    def capture(self, members: tuple[str, ...]) -> None:
        self.peer.after(self.peer.swarm.upto(1.0), self.captured)

    def apply(self, effect: events.Apply) -> None:
        self.peer.applied = effect.members
        self.peer.shards = effect.shards
        merged = events.Merged(
            swarm_step=effect.swarm_step,
            steps=READY.steps,
            tokens=READY.tokens,
            slow_digest=b"",
            momentum_digest=b"",
        )
        self.peer.after(self.peer.swarm.upto(1.0), lambda: self.tell(merged))

    def drop(self) -> None:
        pass


class PairPart(Part):
    """In a pair."""

    CONTENTS = WHOLE = frozenset({"content"})

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.WholeContribution(peer=peer):
                self.peer.send_content(peer, "content", effect)
            case _:
                super().effect(effect)


class GroupPart(Part):
    """In a group."""

    CONTENTS = WHOLE = frozenset({"shard", "mean"})

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Shard(peer=peer):
                self.peer.send_content(peer, "shard", effect)
            case events.Reduce(contributors=contributors):
                self.peer.averaged = contributors
                reduced = events.Reduced(digest=self.peer.mean())
                self.peer.after(self.peer.swarm.upto(1.0), lambda: self.tell(reduced))
            case events.ShardMean(peer=peer):
                mean = replace(effect, digest=self.peer.mean_for(peer))
                self.peer.send_content(peer, "mean", mean)
            case events.Holdings(peer=peer, held=held):
                super().effect(replace(effect, held=self.peer.held_for(peer, held)))
            case events.Commit(peer=peer, shards=shards, heard=heard):
                shards, heard = self.peer.commit_for(peer, shards, heard)
                super().effect(replace(effect, shards=shards, heard=heard))
            case _:
                super().effect(effect)


PARTS: dict[str, type[Part]] = {kinds.PAIR.name: PairPart, kinds.GROUP.name: GroupPart}
"""By the name of the kind."""


def stories(group: int, sizes: range, weather: Weather, count: int) -> Iterator[Swarm]:
    """Run seeded stories, check each, and name the seed of one that fails."""
    for seed in range(count):
        size = sizes[seed % len(sizes)]
        swarm = Swarm(seed, size, group, weather)
        with naming(swarm):
            check(swarm.run())
            yield swarm


@contextmanager
def naming(swarm: Swarm) -> Iterator[None]:
    """Name the story that an assertion fails in."""
    try:
        yield
    except AssertionError as error:
        error.add_note(swarm.story)
        raise


def check(swarm: Swarm) -> None:
    """What must hold for any story among honest peers."""
    assert swarm.violations == [], "an honest peer was accused"
    for peer in swarm.peers.values():
        exchange = peer.exchange
        if peer.applied is not None:
            check_members(swarm, peer, peer.applied)
            if swarm.group > 2:
                check_applied_in_group(swarm, peer)
            else:
                check_applied(swarm, peer, peer.applied)
        if peer.dead or exchange is None:
            continue
        assert exchange.over, f"{peer.name} never ended: {exchange}"
        assert not peer.machine.running, f"{peer.name} believes that its exchange still runs"
        # Rounded, as moments are sums.
        assert round(peer.ended - peer.began, 6) <= DEADLINE + LAST_WORDS, (
            f"{peer.name} was over too late"
        )
        assert exchange.stage is events.Stage.APPLIED or exchange.reason, (
            f"{peer.name} ended without a reason"
        )


def check_members(swarm: Swarm, peer: VirtualPeer, members: tuple[str, ...]) -> None:
    assert peer.name in members
    assert list(members) == sorted(set(members))
    assert 1 < len(members) <= swarm.group, f"{peer.name} applied a group of {len(members)}"


def check_applied(swarm: Swarm, peer: VirtualPeer, members: tuple[str, ...]) -> None:
    for other in (swarm.peers[name] for name in members):
        if other.applied is not None:
            assert other.applied == members, (
                f"{peer.name} and {other.name} applied different groups"
            )
        else:
            doubts = other.exchange is not None and other.exchange.in_doubt
            assert doubts or other.dead, (
                f"{peer.name} applied with {other.name}, which did not and has no doubt"
            )


def check_applied_in_group(swarm: Swarm, peer: VirtualPeer) -> None:
    """Whose commit counts for a peer that is in no doubt applied exactly the same, or is in doubt
    itself, or dead."""
    tally = peer.group.tally
    assert any(peer.shards)
    assert all(
        tally.digest_of(name)
        for name, shard in zip(tally.members, peer.shards, strict=True)
        if shard
    )
    assert len(tally.commits) > 1, f"{peer.name} applied alone"
    for name in tally.commits:
        other = swarm.peers[name]
        assert other.group.members == peer.applied, (
            f"{peer.name} and {name} count on each other in different groups"
        )
        if not (peer.group.in_doubt or other.group.in_doubt or other.dead):
            assert other.outcome == peer.outcome, (
                f"{peer.name} and {name} applied different shards without doubt"
            )
