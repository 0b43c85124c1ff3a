"""Virtual time, and a seeded network in it: streams between peers that take time, keep their order,
and break.

The same seed gives the same story, to the event. Nothing here knows what travels.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol


@dataclass(frozen=True)
class Conditions:
    """How long things take between two peers, and how often they go wrong."""

    latency: tuple[float, float] = (0.02, 0.08)
    """Seconds one way, from and to; drawn for every message."""
    notice: tuple[float, float] = (0.02, 0.08)
    """Seconds until an end hears that its stream has broken, from and to; drawn for each."""
    bandwidth: float = 2.5e6
    """Bytes a second of one peer's uplink to another; 20 Mbit/s."""
    rates: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Bytes a second of single peers, both ways, where that is less."""
    loss: float = 0.0
    """Probability that a stream breaks, at a random moment of its first ``loss_within`` seconds."""
    loss_within: float = 5.0


class Receiver(Protocol):
    """An end of a stream."""

    def receive(self, stream: "SimulatedStream", kind: str, payload: Any) -> None:
        """Take in a message; ``kind`` is "closed" when the stream was closed or broke."""


@dataclass(eq=False)
class SimulatedStream:
    """One call: messages arrive in order in each direction, until an end closes it or it breaks."""

    caller: str
    callee: str
    broken: bool = False
    closed: set[str] = field(default_factory=set)
    arrived: dict[str, float] = field(default_factory=dict)
    """When the last message to each end arrives."""

    def other(self, peer: str) -> str:
        """The other end."""
        return self.callee if peer == self.caller else self.caller


class Network:
    """Time that only events move, and the peers that it connects."""

    def __init__(self, seed: int, conditions: Conditions) -> None:
        self.random, self.conditions = Random(f"network:{seed}"), conditions
        self.now = 0.0
        """Seconds."""
        self.peers: dict[str, Receiver] = {}
        self.events = 0
        """How many things were to happen so far."""
        self.control: Counter[str] = Counter()
        """Bytes that each peer has sent beside contents, as ``weigh`` has them."""
        self.weigh: Callable[[Any], int] = lambda payload: 0
        """Bytes of a message beside contents, by its payload."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        self.at(self.now + seconds, action, *arguments)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a moment; what is due at the same one happens in the order of asking."""
        self.events += 1
        heapq.heappush(self._queue, (time, self.events, action, arguments))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.advance()

    def advance(self) -> None:
        """Let the next thing happen."""
        self.now, _, action, arguments = heapq.heappop(self._queue)
        action(*arguments)

    def open(self, caller: str, callee: str) -> SimulatedStream:
        """A stream between two peers; nobody else may be there to answer."""
        stream = SimulatedStream(caller, callee)
        if self.random.random() < self.conditions.loss:
            self.after(self.random.uniform(0.0, self.conditions.loss_within), self.break_, stream)
        return stream

    def send(
        self,
        stream: SimulatedStream,
        sender: str,
        kind: str,
        payload: Any = None,
        size: int = 0,
        late: float = 0.0,
    ) -> None:
        """Send a message of ``size`` bytes, unless the stream is closed or breaks before.

        ``late``: more seconds than it should take; whatever follows comes after it.
        """
        if sender in stream.closed or stream.broken:
            return
        receiver = stream.other(sender)
        self.control[sender] += self.weigh(payload)
        rates, rate = self.conditions.rates, self.conditions.bandwidth
        if rates:
            rate = min(rates.get(sender, rate), rates.get(receiver, rate))
        way = self.random.uniform(*self.conditions.latency) + size / rate + late
        arrives = stream.arrived[receiver] = max(stream.arrived.get(receiver, 0.0), self.now + way)
        # Not after(): rounding could make one message overtake another.
        self.at(arrives, self._deliver, stream, receiver, kind, payload)

    def _deliver(self, stream: SimulatedStream, receiver: str, kind: str, payload: Any) -> None:
        if receiver in stream.closed or stream.broken:
            return
        if receiver in self.peers:
            self.peers[receiver].receive(stream, kind, payload)
        else:
            self.break_(stream)

    def close(self, stream: SimulatedStream, sender: str) -> None:
        """End a stream; the other end hears of it after all that was sent before."""
        self.send(stream, sender, "closed")
        stream.closed.add(sender)

    def break_(self, stream: SimulatedStream) -> None:
        """Both ends notice, each in its time; what was on its way is gone."""
        if stream.broken:
            return
        stream.broken = True
        for name in (stream.caller, stream.callee):
            if name not in stream.closed:
                notice = self.random.uniform(*self.conditions.notice)
                self.after(notice, self._notice, stream, name)

    def _notice(self, stream: SimulatedStream, name: str) -> None:
        if name in self.peers:
            self.peers[name].receive(stream, "closed", None)
