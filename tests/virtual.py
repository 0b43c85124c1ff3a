"""A swarm of virtual peers: an exchange each, over the seeded network and in the virtual time of the simulation.

Peers behave as the node does: they dial, refuse, capture, send and close what `Exchange` or `GroupExchange` tells them
to. Streams break, contributions stall, trainers fail; peers die with or without anybody noticing. The same seed gives
the same story, to the event. What travels are names: a mean is the digest of whose mean it is.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

from lowcomm_node.simulation.network import Conditions, Network, Stream
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.group import machine as groups
from lowcomm_protocol.exchange.pair import machine as pairs
from lowcomm_protocol.plan.matching import Offer, Refusal, candidates, wins_crossing

HELLO = 10.0
"""Seconds: for an answer to a call, for gathering, and for confirmations after the deadline."""
DEADLINE = 60.0

OFFER = Offer(
    protocol=1,
    run_id="00" * 32,
    plan="11" * 32,
    codec="fp32",
    fragment=0,
    stage=0,
    round=0,
    swarm_step=40,
    steps=20,
    tokens=10_240,
    version=2,
    slow_digest=b"",
)


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
    """A peer does not know of another."""
    idle: float = 0.0
    """A peer does not begin, but accepts calls; of half of them none."""
    unready: float = 0.0
    """A peer refuses every call until it begins itself."""

    @property
    def conditions(self) -> Conditions:
        """What of it the network brings about."""
        latency, notice = (0.0, self.delay), (0.0, 1.0)
        return Conditions(latency=latency, notice=notice, loss=self.breaks, loss_within=DEADLINE / 2)


CALM = Weather()
STORM = Weather(transfer=30.0, breaks=0.15, deaths=0.1, stalls=0.05, fails=0.05, blind=0.1, idle=0.2, unready=0.1)


class Swarm(Network):
    """The peers, and the network that they share."""

    peers: "dict[str, Peer]"

    def __init__(self, seed: int, size: int, group: int, weather: Weather) -> None:
        super().__init__(seed, weather.conditions)
        self.group, self.weather = group, weather
        self.story = f"seed {seed}: Swarm({seed}, {size}, {group}, {weather})"
        self.violations: list[str] = []
        names = [f"peer{number:03d}" for number in range(size)]
        kind = Peer if group == 2 else GroupPeer
        self.peers |= {name: kind(self, name) for name in names}
        for peer in self.peers.values():
            view = [name for name in names if not self.happens(weather.blind)]
            peer.candidates = candidates(seed, 0, 0, peer.name, view, group)
            peer.idle = self.happens(weather.idle)
            peer.willing = self.happens(0.5) if peer.idle else not self.happens(weather.unready)
            if not peer.idle:
                self.after(self.upto(weather.skew), peer.begin)
            if self.happens(weather.deaths):
                self.after(self.upto(DEADLINE / 2), peer.die)

    def run(self) -> "Swarm":
        super().run()
        return self

    def send(self, stream: Stream, sender: str, kind: str, payload: object = None, seconds: float = 0.0) -> None:
        """Send what takes ``seconds`` beside the latency."""
        super().send(stream, sender, kind, payload, size=round(seconds * self.conditions.bandwidth))

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def upto(self, seconds: float) -> float:
        return self.random.uniform(0.0, seconds)


class Peer:
    """One peer in one round, in pairs."""

    TIMERS: ClassVar[list[tuple[float, pairs.Event | groups.Event]]] = [
        (HELLO, base.GatheringClosed()),
        (DEADLINE, base.DeadlinePassed()),
        (DEADLINE + HELLO, base.DeadlinePassed()),
    ]

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.swarm, self.name = swarm, name
        self.candidates: list[str] = []
        self.idle, self.willing, self.dead = False, True, False
        self.exchange: base.Gathering | None = None
        self.began = self.ended = 0.0
        self.applied: tuple[str, ...] | None = None
        self.captured = False
        self.links: dict[str, Stream] = {}
        self.calls: dict[str, Stream] = {}
        self.arrived: list[str] = []
        self.before: Callable[[base.Effect], None] = lambda effect: None
        """Told each effect before it is carried out: here a test breaks things."""

    def begin(self) -> None:
        if self.exchange is None and not self.dead:
            self.carry_out(self.new_exchange(self.candidates).start())

    def new_exchange(self, peers: list[str]) -> base.Gathering:
        self.exchange = self.make_exchange(peers)
        self.began = self.swarm.now
        for seconds, event in self.TIMERS:
            self.after(seconds, lambda event=event: self.handle(event))
        if self.swarm.happens(self.swarm.weather.fails):
            self.after(self.swarm.upto(DEADLINE), lambda: self.handle(base.GaveUp(reason="the trainer failed")))
        return self.exchange

    def make_exchange(self, peers: list[str]) -> base.Gathering:
        return pairs.Exchange(me=self.name, candidates=peers)

    def die(self, noticed: bool | None = None) -> None:
        self.dead = True
        for stream in [*self.links.values(), *self.calls.values()]:
            if self.swarm.happens(0.5) if noticed is None else noticed:
                self.swarm.break_(stream)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.swarm.after(seconds, lambda: None if self.dead else action())

    # messages

    def receive(self, stream: Stream, kind: str, payload: object) -> None:
        if self.dead:
            return
        other = stream.other(self.name)
        if kind == "hello":
            self.answer(other, stream)
        elif kind in ("accept", "refuse") and self.calls.get(other) is stream:
            del self.calls[other]
            self.on_answer(other, stream, payload)
        elif kind == "closed" and stream in (self.calls.get(other), self.links.get(other)):
            self.calls.pop(other, None)
            self.handle(base.Lost(peer=other, reason="ended the stream"))
        elif kind not in ("accept", "refuse", "closed") and self.links.get(other) is stream:
            self.take_in(other, stream, kind, payload)

    def take_in(self, other: str, stream: Stream, kind: str, payload: object) -> None:
        if kind == "content":
            self.arrived.append(other)
            if self.captured:
                self.verify(other)
        else:
            assert isinstance(payload, bytes)
            self.handle(pairs.Confirmed(peer=other, members=payload))

    def answer(self, other: str, stream: Stream) -> None:
        refusal = self.consider(other)
        if refusal is not None:
            self.swarm.send(stream, self.name, "refuse", refusal)
            return
        call = self.calls.pop(other, None)
        if call is not None:
            self.swarm.close(call, self.name)
        self.links[other] = stream
        if self.exchange is None:
            pairs = self.swarm.group == 2
            exchange = self.new_exchange([] if pairs else self.candidates)
            exchange.expect(other)
            if not pairs:
                self.carry_out(exchange.start())
        effects = self.decide(base.Accepted(peer=other, offer=OFFER, called_us=True))
        self.swarm.send(stream, self.name, "accept", OFFER)
        self.carry_out(effects)

    def consider(self, other: str) -> Refusal | None:
        if self.exchange is None:
            return None if self.willing else Refusal.NOT_TRAINING
        if self.exchange.over:
            return Refusal.TOO_SOON
        if self.exchange.is_calling(other) and wins_crossing(self.name, other):
            return Refusal.CROSSED
        return None if self.exchange.has_room_for(other) else Refusal.BUSY

    def on_answer(self, other: str, stream: Stream, payload: object) -> None:
        if isinstance(payload, Offer):
            self.links[other] = stream
            self.handle(base.Accepted(peer=other, offer=payload))
            return
        assert isinstance(payload, Refusal)
        self.swarm.close(stream, self.name)
        self.handle(base.Refused(peer=other, reason=payload, detail=payload.value))

    # effects

    def handle(self, event: pairs.Event | groups.Event) -> None:
        self.carry_out(self.decide(event))

    def decide(self, event: pairs.Event | groups.Event) -> list[base.Effect]:
        assert self.exchange is not None
        was_over = self.exchange.over
        try:
            effects = self.exchange.handle(event)
        except ProtocolViolation as error:
            self.swarm.violations.append(f"{self.name}: {error}")
            effects = self.exchange.handle(base.Lost(peer=getattr(event, "peer", ""), reason=str(error)))
        assert not (was_over and effects), "effects after the exchange was over"
        return effects

    def carry_out(self, effects: list[base.Effect]) -> None:
        for effect in effects:
            self.before(effect)
            if self.dead:
                return
            self.do(effect)

    def do(self, effect: base.Effect) -> None:
        match effect:
            case base.Dial(peer=peer):
                self.dial(peer)
            case base.Capture():
                self.after(self.swarm.upto(1.0), self.capture)
            case pairs.SendContent(peer=peer):
                self.send_content(peer, "content")
            case pairs.SendConfirm(peer=peer, members=members):
                self.swarm.send(self.links[peer], self.name, "confirm", members)
            case base.Abandon(peer=peer):
                self.abandon(peer)
            case base.Apply(members=members):
                self.applied, self.ended = members, self.swarm.now
                for stream in self.links.values():
                    self.swarm.close(stream, self.name)
            case base.End():
                self.ended = self.swarm.now
            case _:
                raise AssertionError(f"nobody carries out {effect}")

    def dial(self, peer: str) -> None:
        stream = self.calls[peer] = self.swarm.open(self.name, peer)
        self.swarm.send(stream, self.name, "hello")

        def give_up() -> None:
            if self.calls.get(peer) is stream:
                self.swarm.close(self.calls.pop(peer), self.name)
                self.handle(base.Lost(peer=peer, reason="did not answer in time"))

        self.after(HELLO, give_up)

    def send_content(self, peer: str, kind: str, payload: object = None) -> None:
        weather = self.swarm.weather
        stalls = self.swarm.happens(weather.stalls)
        seconds = 2 * DEADLINE if stalls else self.swarm.upto(weather.transfer)
        self.swarm.send(self.links[peer], self.name, kind, payload, seconds=seconds)

    def capture(self) -> None:
        self.captured = True
        self.handle(base.Captured())
        for peer in self.arrived:
            self.verify(peer)

    def verify(self, peer: str) -> None:
        self.after(self.swarm.upto(0.5), lambda: self.handle(pairs.Verified(peer=peer)))

    def abandon(self, peer: str) -> None:
        for stream in (self.calls.pop(peer, None), self.links.get(peer)):
            if stream is not None:
                self.swarm.close(stream, self.name)


class GroupPeer(Peer):
    """One peer in one round, in a group. It reads a stream in order, and contents only once it has captured."""

    TIMERS: ClassVar[list[tuple[float, pairs.Event | groups.Event]]] = [
        *Peer.TIMERS,
        *((HELLO * times, groups.AgreeingClosed()) for times in (2.0, 2.5, 3.0, 3.5)),
        (DEADLINE * 3 / 4, groups.ReduceClosed()),
        (DEADLINE + HELLO / 2, groups.ConfirmingClosed()),
    ]

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm, name)
        self.shards: tuple[bool, ...] = ()
        self.inbox: defaultdict[Stream, deque[tuple[str, object]]] = defaultdict(deque)
        self.decoding: set[Stream] = set()
        self.averaged: tuple[str, ...] = ()

    @property
    def group(self) -> groups.GroupExchange:
        assert isinstance(self.exchange, groups.GroupExchange)
        return self.exchange

    @property
    def outcome(self) -> tuple[tuple[str, ...], tuple[bytes, ...]] | None:
        """What it has applied: the members, and for each the digest of its shard, empty where it was left out."""
        if self.applied is None:
            return None
        shards = zip(self.applied, self.shards, strict=True)
        return self.applied, tuple(self.group.tally.digest_of(peer) if shard else b"" for peer, shard in shards)

    def make_exchange(self, peers: list[str]) -> base.Gathering:
        return groups.GroupExchange(me=self.name, candidates=peers, group=self.swarm.group)

    def take_in(self, other: str, stream: Stream, kind: str, payload: object) -> None:
        self.inbox[stream].append((kind, payload))
        self.read(other, stream)

    def read(self, other: str, stream: Stream) -> None:
        inbox = self.inbox[stream]
        while inbox and stream not in self.decoding:
            if inbox[0][0] not in ("shard", "mean"):
                self.hear(other, *inbox.popleft())
            elif not self.captured:
                return
            else:
                self.decoding.add(stream)
                self.after(self.swarm.upto(0.5), lambda: self.decoded(other, stream))

    def decoded(self, other: str, stream: Stream) -> None:
        self.decoding.discard(stream)
        self.hear(other, *self.inbox[stream].popleft())
        self.read(other, stream)

    def hear(self, other: str, kind: str, payload: object) -> None:
        if kind == "shard":
            self.handle(groups.ShardVerified(peer=other))
        elif kind == "mean":
            assert isinstance(payload, bytes)
            self.handle(groups.MeanVerified(peer=other, digest=payload))
        else:
            assert isinstance(payload, Callable)
            self.handle(payload(other))

    def do(self, effect: base.Effect) -> None:
        match effect:
            case groups.SendRoll(peer=peer, roll=roll):
                self.tell(peer, "roll", lambda sender: groups.RollCame(peer=sender, roll=roll))
            case groups.SendMembers(peer=peer, members=members):
                self.tell(peer, "members", lambda sender: groups.MembersCame(peer=sender, members=members))
            case groups.SendShard(peer=peer):
                self.send_content(peer, "shard")
            case groups.Reduce(contributors=contributors):
                self.averaged = contributors
                self.after(self.swarm.upto(1.0), lambda: self.handle(groups.Reduced(digest=self.mean())))
            case groups.SendMean(peer=peer):
                self.send_content(peer, "mean", self.mean_for(peer))
            case groups.SendHeld(peer=peer, held=held):
                self.tell(peer, "held", lambda sender: groups.HeldCame(peer=sender, held=held))
            case groups.SendCommit(peer=peer, shards=shards, heard=heard):
                self.tell(peer, "commit", lambda sender: groups.CommitCame(peer=sender, shards=shards, heard=heard))
            case base.Apply(shards=shards):
                self.shards = shards
                super().do(effect)
            case _:
                super().do(effect)

    def tell(self, peer: str, kind: str, event: Callable[[str], groups.Event]) -> None:
        self.swarm.send(self.links[peer], self.name, kind, event)

    def capture(self) -> None:
        super().capture()
        for other, stream in list(self.links.items()):
            self.read(other, stream)

    def mean(self) -> bytes:
        return sha256(f"{self.group.members} {self.name} {self.averaged}".encode()).digest()

    def mean_for(self, peer: str) -> bytes:
        """What we send a member as the mean of our shard: an honest peer sends all the same."""
        return self.mean()


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
            if isinstance(peer, GroupPeer):
                check_applied_in_group(swarm, peer)
            else:
                check_applied(swarm, peer, peer.applied)
        if peer.dead or exchange is None:
            continue
        assert exchange.over, f"{peer.name} never ended: {exchange}"
        assert peer.ended - peer.began <= DEADLINE + HELLO, f"{peer.name} was over too late"
        assert exchange.stage is base.Stage.APPLIED or exchange.reason, f"{peer.name} ended without a reason"


def check_members(swarm: Swarm, peer: Peer, members: tuple[str, ...]) -> None:
    assert peer.name in members
    assert list(members) == sorted(set(members))
    assert 1 < len(members) <= swarm.group, f"{peer.name} applied a group of {len(members)}"


def check_applied(swarm: Swarm, peer: Peer, members: tuple[str, ...]) -> None:
    for other in (swarm.peers[name] for name in members):
        if other.applied is not None:
            assert other.applied == members, f"{peer.name} and {other.name} applied different groups"
        else:
            doubts = other.exchange is not None and other.exchange.in_doubt
            assert doubts or other.dead, f"{peer.name} applied with {other.name}, which did not and has no doubt"


def check_applied_in_group(swarm: Swarm, peer: GroupPeer) -> None:
    """Whose commit counts for a peer that is in no doubt applied exactly the same, or is in doubt itself, or dead."""
    tally = peer.group.tally
    assert any(peer.shards)
    assert all(tally.digest_of(name) for name, shard in zip(tally.members, peer.shards, strict=True) if shard)
    assert len(tally.commits) > 1, f"{peer.name} applied alone"
    for name in tally.commits:
        other = swarm.peers[name]
        assert isinstance(other, GroupPeer)
        assert other.group.members == peer.applied, f"{peer.name} and {name} count on each other in different groups"
        if not (peer.group.in_doubt or other.group.in_doubt or other.dead):
            assert other.outcome == peer.outcome, f"{peer.name} and {name} applied different shards without doubt"
