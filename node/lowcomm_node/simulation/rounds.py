"""One exchange of a simulated peer: the effects of its `Exchange` carried out, messages turned into events.

Contributions are coded to bytes, travel, and are decoded by the capture of the receiver's replica.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from lowcomm_node.simulation.network import Stream
from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import CodecError, ImplausibleError, LowcommError, ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.group import machine as groups
from lowcomm_protocol.exchange.pair import machine as pairs
from lowcomm_protocol.plan.matching import REFUSAL_TEXT, Offer, keeps_momentum, must_realign, steps_ahead

if TYPE_CHECKING:
    from lowcomm_node.simulation.peer import Peer

HELLO_DEADLINE, DEADLINE = 10.0, 60.0
REDUCE_DEADLINE = 40.0
PATIENCE = 3.0
"""Seconds, as in a node."""
ENDLESS = 8
"""How often a liar sends contents that have no end."""


class Round(ABC):
    """What pairs and groups share: calls, captures, the end."""

    def __init__(self, peer: "Peer", exchange: base.Gathering, offer: Offer, called: bool) -> None:
        self.peer, self.replica, self.network = peer, peer.replica, peer.swarm.network
        self.exchange, self.offer, self.called = exchange, offer, called
        self.links: dict[str, Stream] = {}
        self.calls: dict[str, Stream] = {}
        self.waiting: list[Callable[[], None]] | None = []
        """What came before our contribution was captured; None afterwards."""
        self.peer.after(HELLO_DEADLINE, lambda: self.handle(base.GatheringClosed()))
        self.peer.after(DEADLINE, lambda: self.handle(base.DeadlinePassed()))
        self.peer.after(DEADLINE + HELLO_DEADLINE, lambda: self.handle(base.DeadlinePassed()))

    @property
    def fragment(self) -> int:
        """Which fragment is exchanged."""
        return self.offer.fragment

    def start(self) -> None:
        """Call candidates."""
        self._carry_out(self.exchange.start())

    def link(self, peer: str, stream: Stream) -> None:
        """Take in the stream to a peer that takes part."""
        self.links[peer] = stream
        self.peer.by_stream[stream] = self

    def handle(self, event: Any) -> None:
        """Take in an event."""
        try:
            effects = self.exchange.handle(event)
        except ProtocolViolation as error:
            other = getattr(event, "peer", "")
            self._accuse(other, error)
            effects = self.exchange.handle(base.Lost(peer=other, reason=str(error)))
        self._carry_out(effects)

    def receive(self, stream: Stream, other: str, kind: str, payload: Any) -> None:
        """Take in a message of another peer."""
        if kind == "closed":
            if self.calls.pop(other, None) is not None:
                self.peer.liveness.missed(other, self.network.now)
            self.peer.by_stream.pop(stream, None)
            self.handle(base.Lost(peer=other, reason="ended the stream"))
        elif kind == "abandon":
            self.handle(base.Lost(peer=other, reason=f"gave up: {payload}"))
        elif self.calls.get(other) is stream:
            del self.calls[other]
            self.peer.liveness.met(other, self.network.now)
            if kind == "accept" and not self.peer.supports(other, payload.swarm_step):
                self.network.break_(stream)
                self.handle(base.Lost(peer=other, reason="claims a swarm step that nobody else supports"))
            elif kind == "accept":
                self.link(other, stream)
                self.handle(base.Accepted(peer=other, offer=payload))
            else:
                self.peer.refused += 1
                self.handle(base.Refused(peer=other, reason=payload, detail=REFUSAL_TEXT[payload]))
        elif kind not in self._CONTENTS:
            self.handle(self._event(other, kind, payload))
        elif self.waiting is None:
            self._take_in(other, kind, payload)
        else:
            self.waiting.append(lambda: self._take_in(other, kind, payload))

    _CONTENTS: frozenset[str]
    """Kinds of messages that wait for our capture."""

    @abstractmethod
    def _event(self, other: str, kind: str, payload: Any) -> Any:
        """The event that a message is."""

    @abstractmethod
    def _use(self, other: str, kind: str, data: bytes) -> Any:
        """Decode contents; the event that follows, if any. Raises CodecError or ImplausibleError."""

    @abstractmethod
    def _effect(self, effect: base.Effect) -> None:
        """Carry out what only this kind of exchange asks for."""

    @abstractmethod
    def _code(self) -> None:
        """Code our contribution, which has been captured. Raises CodecError."""

    @abstractmethod
    def _pool(self, effect: base.Apply) -> None:
        """Make the mean of what is applied."""

    def _take_in(self, other: str, kind: str, data: bytes) -> None:
        if self.exchange.over:
            return
        try:
            event = self._use(other, kind, data)
        except (CodecError, ImplausibleError) as error:
            self.peer.implausible += isinstance(error, ImplausibleError)
            self._accuse(other, error)
            event = base.Lost(peer=other, reason=str(error))
        if event is not None:
            self.handle(event)

    def _accuse(self, other: str, error: LowcommError) -> None:
        deed = error.deed if isinstance(error, ImplausibleError) else Deed.HEAVY
        if deed is not None:
            self.peer.hold(other, deed, str(error))
        self._abandon(other, str(error))

    def _send(self, other: str, kind: str, data: bytes) -> None:
        stream = self.links[other]
        for _ in range(ENDLESS if self.peer.swarm.lie(self.peer) == "endless" else 1):
            self.peer.bytes_sent += len(data)
            self.network.send(stream, self.peer.name, kind, data, len(data), self.peer.delay)

    def _tell(self, other: str, kind: str, payload: Any) -> None:
        self.network.send(self.links[other], self.peer.name, kind, payload)

    # effects

    def _carry_out(self, effects: list[base.Effect]) -> None:
        for effect in effects:
            match effect:
                case base.Dial(peer=other):
                    self._dial(other)
                case base.Capture(members=members):
                    self.peer.at_boundary.append(lambda members=members: self._capture(members))
                case base.Abandon(peer=other, reason=reason):
                    self._abandon(other, reason)
                case base.Apply():
                    self._apply(effect)
                case base.End():
                    self._end()
                case _:
                    self._effect(effect)

    def _dial(self, other: str) -> None:
        stream = self.calls[other] = self.network.open(self.peer.name, other)
        self.peer.by_stream[stream] = self
        self.network.send(stream, self.peer.name, "hello", self.offer)

        def give_up() -> None:
            if self.calls.get(other) is stream:
                del self.calls[other]
                self.peer.liveness.missed(other, self.network.now)
                self.network.close(stream, self.peer.name)
                self.handle(base.Lost(peer=other, reason=base.UNANSWERED))

        self.peer.after(HELLO_DEADLINE, give_up)

    def _capture(self, members: tuple[str, ...]) -> None:
        if self.exchange.over:
            return
        others = self.exchange.offers(members)
        realign = must_realign(self.offer, others)
        self.replica.capture(self.fragment, realign, members, steps_ahead(self.offer, others, self.peer.sync.interval))
        self.peer.realigned += realign
        self.replica.captures[self.fragment].keep_momentum = realign and keeps_momentum(self.offer, others)
        try:
            self._code()
        except CodecError as error:
            self.handle(base.GaveUp(reason=str(error)))
            return
        waiting, self.waiting = self.waiting or [], None
        self.handle(base.Captured())
        for take_in in waiting:
            take_in()

    def _abandon(self, other: str, reason: str) -> None:
        if reason == base.UNANSWERED and other in self.calls:
            self.peer.liveness.missed(other, self.network.now)
        for stream in (self.calls.pop(other, None), self.links.get(other)):
            if stream is not None:
                self.network.send(stream, self.peer.name, "abandon", reason)
                self.network.close(stream, self.peer.name)

    def _apply(self, effect: base.Apply) -> None:
        for other in self.exchange.partners:
            self.peer.trust.thank(other, self.replica.steps, self.replica.captures[self.fragment].realign)
        self._pool(effect)
        self.replica.outer(self.fragment)
        ripe = self.replica.captures[self.fragment].steps + self.peer.sync.overlap

        def merge() -> None:
            self.replica.merge(self.fragment, effect.swarm_step)
            self.peer.applied += 1
            self._close()

        self.peer.ripening.append((ripe, merge))

    def _end(self) -> None:
        self.peer.failed += 1
        self.replica.drop(self.fragment)
        if not self.called:
            self.replica.schedule.skip(self.fragment, self.replica.clock.step)
        self._close()

    def _close(self) -> None:
        del self.peer.running[self.fragment]
        for stream in [*self.calls.values(), *self.links.values()]:
            self.network.close(stream, self.peer.name)
            self.peer.by_stream.pop(stream, None)
        self.calls.clear()


class PairRound(Round):
    """Two peers send each other the whole fragment."""

    _CONTENTS = frozenset({"content", "resend", "again"})

    def __init__(self, peer: "Peer", offer: Offer, candidates: Sequence[str], called: bool) -> None:
        super().__init__(peer, pairs.Exchange(me=peer.name, candidates=candidates), offer, called)
        self.content = b""

    @property
    def capture(self) -> PairCapture:
        """Of our replica."""
        return self.replica.pair(self.fragment)

    def _event(self, other: str, kind: str, payload: Any) -> Any:
        return pairs.Confirmed(peer=other, members=payload)

    def _use(self, other: str, kind: str, data: bytes) -> Any:
        if kind == "content" and (again := self.capture.receive(other, memoryview(data))):
            self._send(other, "resend", again)
            return None
        if kind == "resend":
            self._send(other, "again", self._coded(lambda out: self.capture.resend(data, out)))
            return None
        if kind == "again":
            self.capture.patch(other, memoryview(data))
        return pairs.Verified(peer=other)

    def _effect(self, effect: base.Effect) -> None:
        match effect:
            case pairs.SendContent(peer=other):
                self._send(other, "content", self.content)
            case pairs.SendConfirm(peer=other, members=members):
                self._tell(other, "confirm", members)

    def _code(self) -> None:
        self.content = self._coded(self.capture.encode)

    def _coded(self, encode: Callable[[memoryview], int]) -> bytes:
        out = bytearray(self.capture.coder.max_size)
        return self.peer.swarm.tampered(self.peer, bytes(out[: encode(memoryview(out))]))

    def _pool(self, effect: base.Apply) -> None:
        offers = {other: self.exchange.offer_of(other) or self.offer for other in effect.members}
        self.capture.pool({other: offer.tokens for other, offer in offers.items()})


class GroupRound(Round):
    """Every member averages one shard."""

    _CONTENTS = frozenset({"shard", "mean"})

    def __init__(self, peer: "Peer", offer: Offer, candidates: Sequence[str], called: bool) -> None:
        exchange = groups.GroupExchange(me=peer.name, candidates=candidates, group=peer.sync.group)
        super().__init__(peer, exchange, offer, called)
        self.shares: dict[str, bytes] = {}
        self.mean = b""
        for number in range(4):
            self.peer.after(HELLO_DEADLINE + (number + 1) * PATIENCE, lambda: self.handle(groups.AgreeingClosed()))
        self.peer.after(REDUCE_DEADLINE, lambda: self.handle(groups.ReduceClosed()))
        self.peer.after(DEADLINE + HELLO_DEADLINE / 2, lambda: self.handle(groups.ConfirmingClosed()))

    @property
    def capture(self) -> GroupCapture:
        """Of our replica."""
        return self.replica.group(self.fragment)

    def _event(self, other: str, kind: str, payload: Any) -> Any:
        match kind:
            case "roll":
                return groups.RollCame(peer=other, roll=payload)
            case "members":
                return groups.MembersCame(peer=other, members=payload)
            case "held":
                return groups.HeldCame(peer=other, held=payload)
            case _:
                shards, heard = payload
                return groups.CommitCame(peer=other, shards=shards, heard=heard)

    def _use(self, other: str, kind: str, data: bytes) -> Any:
        if kind == "shard":
            self.capture.receive(other, memoryview(data))
            return groups.ShardVerified(peer=other)
        self.capture.receive_mean(other, memoryview(data))
        return groups.MeanVerified(peer=other, digest=sha256(data).digest())

    def _effect(self, effect: base.Effect) -> None:
        match effect:
            case groups.SendRoll(peer=other, roll=roll):
                self._tell(other, "roll", roll)
            case groups.SendMembers(peer=other, members=members):
                self._tell(other, "members", members)
            case groups.SendShard(peer=other):
                self._send(other, "shard", self.shares[other])
            case groups.Reduce(contributors=contributors):
                self._reduce(contributors)
            case groups.SendMean(peer=other):
                self._send(other, "mean", self.mean)
            case groups.SendHeld(peer=other, held=held):
                self._tell(other, "held", held)
            case groups.SendCommit(peer=other, shards=shards, heard=heard):
                self._tell(other, "commit", (shards, heard))

    def _code(self) -> None:
        capture = self.capture
        out, start = bytearray(8 * capture.sent.numel() + 4096), 0
        for owner, size in zip(capture.members, capture.encode(memoryview(out)), strict=True):
            self.shares[owner] = self.peer.swarm.tampered(self.peer, bytes(out[start : start + size]))
            start += size

    def _reduce(self, contributors: tuple[str, ...]) -> None:
        offers = {other: self.exchange.offer_of(other) or self.offer for other in contributors}
        out = bytearray(8 * self.capture.sent.numel() + 4096)
        size = self.capture.reduce({other: offer.tokens for other, offer in offers.items()}, memoryview(out))
        self.mean = bytes(out[:size])
        self.handle(groups.Reduced(digest=sha256(self.mean).digest()))
        for other, error in self.capture.left_out.items() if not self.exchange.over else ():
            self.peer.implausible += 1
            self._accuse(other, error)
            self.handle(base.Lost(peer=other, reason=str(error)))

    def _pool(self, effect: base.Apply) -> None:
        self.capture.pool([owner for owner, applied in zip(effect.members, effect.shards, strict=True) if applied])
