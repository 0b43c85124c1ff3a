"""Drives the machine of a peer (``exchange/peer.py``) over the virtual network.

    messages, timers ─► events ─► Peer.handle ─► effects ─► messages, captures, merges

Nothing is decided here. What an exchange carries is up to a subclass of `SimulatedExchange`: coded
tensors (``contents.py``), numbers, or mere names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lowcomm_node.simulation.network import Network, SimulatedStream
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import Offer


class PeerDriver(ABC):
    """One peer of the virtual network."""

    def __init__(self, network: Network, machine: Peer) -> None:
        self.network = network
        self.machine = machine
        self.name = machine.me
        self.over = False
        """Whether it has left or died."""
        self.exchanges: dict[int, SimulatedExchange] = {}
        """Those under way, by number."""
        self.by_stream: dict[SimulatedStream, SimulatedExchange] = {}
        self._calls: dict[int, SimulatedStream] = {}
        self._called = 0
        self._timer: float | None = None

    @abstractmethod
    def new_exchange(self, one: Underway) -> "SimulatedExchange":
        """What carries out an exchange that has begun."""

    def heard(self, peer: str) -> None:  # noqa: B027
        """A peer has made an offer, or has answered ours."""

    @abstractmethod
    def on_effect(self, effect: events.Effect) -> None:
        """What is only to be known: a deed that is held, an offer that nobody answers, a drift."""

    def tampered(self, offer: Offer) -> Offer:
        """An offer as it is sent."""
        return offer

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, if the peer is still there."""
        self.network.after(seconds, lambda: None if self.over else action())

    @property
    def now(self) -> float:
        """Seconds of its clock."""
        return self.network.now

    # events in, effects out

    def stimulate(self, event: events.PeerEvent) -> None:
        """Tell the machine what happened, and carry out what it decides."""
        for effect in self.machine.handle(self.now, event):
            if self.over:
                return
            self._carry_out(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.machine.next_timer
        if due is not None and (self._timer is None or due < self._timer):
            self._timer = due
            self.after(due - self.now, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.stimulate(events.Tick())

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.MemberMessage():
                self.exchanges[effect.exchange].carry_out(effect)
            case events.Began(exchange=number):
                one = self.machine.exchange(number)
                assert one is not None
                self.exchanges[number] = self.new_exchange(one)
            case events.Accept(exchange=number, call=call, peer=peer, offer=offer):
                stream = self._calls.pop(call)
                self.exchanges[number].link(peer, stream)
                self.network.send(stream, self.name, "accept", self.tampered(offer))
            case events.Refuse(call=call, reason=reason):
                self.network.send(self._calls.pop(call), self.name, "refuse", reason)
            case events.CancelCall(exchange=number, peer=peer):
                stream = self.exchanges[number].calls.pop(peer)
                self.network.close(stream, self.name)
                self.by_stream.pop(stream, None)
            case events.CutOff(exchange=number, peer=peer, reason=reason, tells=True):
                self.exchanges[number].abandon(peer, reason)
            case events.CutOff(exchange=number, peer=peer):
                self.exchanges[number].cut_off(peer)
            case events.Over(exchange=number):
                self.on_effect(effect)
                self.exchanges.pop(number).close()
                self.stimulate(events.Released(exchange=number))
            case events.RanLate() | events.Unanswered() | events.Penalty() | events.Drifted():
                self.on_effect(effect)
            case _:
                self.exchanges[effect.exchange].carry_out(effect)

    # messages

    def receive(self, stream: SimulatedStream, kind: str, payload: Any) -> None:
        """Take in a message."""
        if self.over:
            if kind != "closed":
                self.network.break_(stream)
        elif kind == "hello":
            self._called += 1
            self._calls[self._called] = stream
            peer = stream.other(self.name)
            self.heard(peer)
            self.stimulate(events.Called(call=self._called, peer=peer, offer=payload, place=peer))
        elif (exchange := self.by_stream.get(stream)) is not None:
            exchange.receive(stream, stream.other(self.name), kind, payload)
        elif kind == "closed" and stream in self._calls.values():
            call = next(call for call, one in self._calls.items() if one is stream)
            self.stimulate(events.CallDropped(call=call))
            del self._calls[call]


class SimulatedExchange(ABC):
    """One exchange at one peer."""

    CONTENTS: frozenset[str]
    """Messages that wait until our contribution is captured."""
    WHOLE: frozenset[str]
    """Those of them that are a contribution, or a part of it."""

    def __init__(self, peer: PeerDriver, one: Underway) -> None:
        self.peer = peer
        self.one = one
        self.network = peer.network
        self.links: dict[str, SimulatedStream] = {}
        self.calls: dict[str, SimulatedStream] = {}
        self._waiting: list[Callable[[], None]] | None = []
        """What came before our contribution was captured; None afterwards."""

    @abstractmethod
    def capture(self, members: tuple[str, ...]) -> None:
        """Capture and code our contribution, and then tell ``captured``."""

    @abstractmethod
    def use(self, other: str, kind: str, payload: Any) -> None:
        """Decode a content, and tell what comes of it."""

    @abstractmethod
    def apply(self, effect: events.Apply) -> None:
        """Take the outer step, and then tell that it is merged."""

    @abstractmethod
    def drop(self) -> None:
        """Forget our contribution."""

    # what is reported

    def tell(self, event: Any) -> None:
        """An event of this exchange."""
        self.peer.stimulate(event.of(exchange=self.one.number))

    def captured(self) -> None:
        """Our contribution is coded: tell so, and take in what has waited for it."""
        waiting = self._waiting or []
        self._waiting = None
        self.tell(events.Captured())
        for take_in in waiting:
            take_in()

    def fail(self, other: str, reason: str, **more: Any) -> None:
        """Nothing can come from a peer any more."""
        self.tell(events.Lost(peer=other, reason=reason, **more))

    # messages

    def link(self, other: str, stream: SimulatedStream) -> None:
        """Take in the stream to a peer that takes part."""
        self.links[other] = stream
        self.peer.by_stream[stream] = self

    def receive(self, stream: SimulatedStream, other: str, kind: str, payload: Any) -> None:
        """Take in a message of another peer."""
        if kind == "closed":
            self.calls.pop(other, None)
            self.peer.by_stream.pop(stream, None)
            self.fail(other, "ended the stream", broke=True)
        elif kind == "abandon":
            self.fail(other, f"gave up: {payload}")
        elif self.calls.get(other) is stream:
            del self.calls[other]
            self._on_answer(stream, other, kind, payload)
        elif kind not in self.CONTENTS:
            self.peer.stimulate(payload.of(peer=other, exchange=self.one.number))
        else:
            if kind in self.WHOLE:
                self.tell(events.ContentCame(peer=other))
            if self._waiting is None:
                self._use(other, kind, payload)
            else:
                self._waiting.append(lambda: self._use(other, kind, payload))

    def _on_answer(self, stream: SimulatedStream, other: str, kind: str, payload: Any) -> None:
        self.peer.heard(other)
        if kind == "accept":
            self.link(other, stream)
            self.tell(events.Accepted(peer=other, offer=payload))
        else:
            self.peer.by_stream.pop(stream, None)
            self.tell(events.Refused(peer=other, reason=payload))

    def _use(self, other: str, kind: str, payload: Any) -> None:
        if not self.one.machine.over:
            self.use(other, kind, payload)

    # effects

    def carry_out(self, effect: events.Effect) -> None:
        """Carry out an effect of this exchange."""
        match effect:
            case events.MemberMessage():
                self.effect(effect)
            case events.Dial(peer=other):
                stream = self.calls[other] = self.network.open(self.peer.name, other)
                self.peer.by_stream[stream] = self
                self.network.send(
                    stream, self.peer.name, "hello", self.peer.tampered(self.one.offer)
                )
            case events.Capture(members=members):
                self.capture(members)
            case events.Abandon(peer=other, reason=reason):
                self.abandon(other, reason)
            case events.Apply():
                self.apply(effect)
            case events.End(reason=reason):
                self.drop()
                self.tell(events.Dropped(reason=reason))
            case _:
                self.effect(effect)

    def effect(self, effect: events.Effect) -> None:
        """Carry out what only this kind of exchange asks for: here a message without contents."""
        assert isinstance(effect, events.MemberMessage), f"nobody carries out {effect}"
        kind = type(effect).__name__.lower()
        self.network.send(self.links[effect.peer], self.peer.name, kind, effect)

    def abandon(self, other: str, reason: str) -> None:
        """Tell a peer why we give it up, and end the stream."""
        for stream in (self.calls.pop(other, None), self.links.get(other)):
            if stream is not None:
                self.network.send(stream, self.peer.name, "abandon", reason)
                self.network.close(stream, self.peer.name)
                self.peer.by_stream.pop(stream, None)

    def cut_off(self, other: str) -> None:
        """Cancel the stream of a peer, if it has not ended yet."""
        stream = self.links.get(other)
        if stream is not None and not stream.closed:
            self.network.break_(stream)

    def close(self) -> None:
        """End what is left of the streams."""
        # Their ends here take in nothing more: a break that happened before is noticed later, and
        # would lose the peer to an exchange that goes on over another stream.
        for stream in [*self.calls.values(), *self.links.values()]:
            self.network.close(stream, self.peer.name)
            self.peer.by_stream.pop(stream, None)
        self.calls.clear()
