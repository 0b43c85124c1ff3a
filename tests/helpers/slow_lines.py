"""Peers that train in virtual time and exchange over lines that all their streams share.

The machine of a peer (``exchange/peer.py``) decides, as in a node; contents are sizes. So the
share of exchanges that a line carries, and what became of the rest, is known to the event.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from helpers.shared_lines import LineNetwork
from helpers.stimuli import FreeView
from lowcomm_node.simulation.driver import PeerDriver, SimulatedExchange
from lowcomm_node.simulation.network import Conditions
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.plan import FragmentProgress
from lowcomm_protocol.spec.run import RunSpec

MBIT = 1e6 / 8
DELAY = (0.024, 0.026)
CODING = 0.1
"""Seconds that coding, decoding and averaging take."""


class Swarm(LineNetwork):
    """Four peers in a star of equal lines."""

    def __init__(
        self,
        line: tuple[float, float],
        sizes: Sequence[int],
        *,
        seed: int = 0,
        peers: int = 4,
        step: float = 1.0,
        first: float = 2.7,
        most: float | None = None,
        again: float = 0.0,
        method: str = "lowcomm",
    ) -> None:
        """``line``: bits a second up and down; ``sizes``: coded bytes of each fragment; ``first``:
        how many times as many they are the first time; ``most``: and how many they might be at
        most; ``again``: part of them that comes again as further digits, on request; ``step``:
        seconds of an inner step."""
        up, down = line
        conditions = Conditions(latency=DELAY, notice=DELAY)
        super().__init__(seed, conditions, (up / 8, down / 8))
        self.sizes = sizes
        self.first = first
        self.most = first if most is None else most
        self.again = again
        self.step = step
        sync = {"method": method, "fragments": len(sizes)}
        self.spec = RunSpec.model_validate({"run": {"name": "slow", "seed": seed}, "sync": sync})
        self.names = [f"peer{number}" for number in range(peers)]
        self.peers: dict[str, LinePeer] = {}  # type: ignore[assignment]
        self.peers |= {name: LinePeer(self, name) for name in self.names}
        self.ends = 0.0

    def train(self, seconds: float) -> "Swarm":
        """Let everybody train and exchange for so long."""
        self.ends = seconds
        for peer in self.peers.values():
            peer.start()
        self.run()
        return self

    @property
    def due(self) -> int:
        """How many exchanges came due, of all peers together."""
        sync = self.spec.sync
        return sum(peer.steps for peer in self.peers.values()) * len(self.sizes) // sync.interval

    @property
    def fit(self) -> int:
        """How many of them the lines carry, where the first of each fragment is larger."""
        each = (1 + self.again) * sum(self.sizes) / len(self.sizes)
        left = self.ends * min(self.line) - (self.first - 1) * sum(self.sizes)
        return min(self.due, int(left / each * len(self.peers)))

    @property
    def applied(self) -> int:
        """How many were applied."""
        return sum(peer.applied for peer in self.peers.values())

    @property
    def reasons(self) -> Counter[str]:
        """Why others were not."""
        total: Counter[str] = Counter()
        for peer in self.peers.values():
            total += peer.reasons
        return total


class View(FreeView):
    """What a peer knows of the others."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self._swarm = swarm
        self._name = name

    def partners(self) -> Sequence[str]:
        return [name for name in self._swarm.names if name != self._name]

    def training(self) -> Sequence[tuple[str, int]]:
        peers = self._swarm.peers
        return [(name, peers[name].swarm_step) for name in self.partners()]

    def furthest(self, but: str) -> int:
        return max((step for name, step in self.training() if name != but), default=0)


class LinePeer(PeerDriver):
    """A peer that trains."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm, Peer(name, swarm.spec, "00" * 32, View(swarm, name), Deadlines()))
        self.swarm = swarm
        self.steps = 0
        self.applied = 0
        self.reasons: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.wasted = 0
        self.known: set[int] = set()
        """Fragments whose ranges it knows."""
        self.at_boundary: list[Callable[[], None]] = []
        self.ripening: list[tuple[int, Callable[[], None]]] = []

    @property
    def swarm_step(self) -> int:
        return self.machine.position.swarm_step

    def start(self) -> None:
        sizes, count = self.swarm.sizes, len(self.swarm.sizes)
        ready = events.TrainerReady(
            plan="11" * 32,
            sizes=tuple((size, int(self.swarm.most * size)) for size in sizes),
            realign_sizes=tuple(4 * size for size in sizes),
            exchanges=4,
            swarm_step=0,
            steps=0,
            tokens=0,
            progress=(FragmentProgress(),) * count,
            slow_digests=(b"",) * count,
            momentum_digests=(b"",) * count,
        )
        self.stimulate(ready)
        self.stimulate(events.Opened())
        self.after(self.swarm.random.uniform(0.5, 1.5) * self.swarm.step, self._step)

    def _step(self) -> None:
        self.steps += 1
        actions, self.at_boundary = self.at_boundary, []
        for action in actions:
            action()
        ripe = [merge for when, merge in self.ripening if when <= self.steps]
        self.ripening = [one for one in self.ripening if one[0] > self.steps]
        for merge in ripe:
            merge()
        seconds = self.swarm.step * self.swarm.random.uniform(0.95, 1.05)
        self.stimulate(
            events.Stepped(
                swarm_step=self.swarm_step + 1,
                steps=self.steps,
                tokens=32 * self.steps,
                seconds=seconds,
            )
        )
        if self.network.now < self.swarm.ends:
            self.after(seconds, self._step)
        else:
            self.stimulate(events.Closed())
            self.stimulate(events.GaveUp(reason="the end"))
            self.over = True

    def new_exchange(self, one: Underway) -> "LineExchange":
        return LineExchange(self, one)

    def on_effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Over(outcome=outcome, reason=reason) if outcome != "applied":
                if reason != "the end":
                    self.reasons[f"{outcome}: {reason}"] += 1
            case events.Penalty(reason=reason):
                self.reasons[f"held: {reason}"] += 1
            case events.Drifted():
                self.reasons["drifted"] += 1
            case _:
                pass


class LineExchange(SimulatedExchange):
    """A pair that exchanges bytes of no meaning."""

    CONTENTS = frozenset({"content", "resend", "digits"})
    WHOLE = frozenset({"content", "digits"})
    peer: LinePeer

    def __init__(self, peer: LinePeer, one: Underway) -> None:
        super().__init__(peer, one)
        self.captured_steps = 0
        self.sent = 0
        self.came: list[tuple[int, float]] = []
        """Bytes of each content, and the seconds that it took."""

    def capture(self, members: tuple[str, ...]) -> None:
        self.asked = self.peer.now
        self.peer.at_boundary.append(self._capture)

    def _capture(self) -> None:
        self.captured_steps = self.peer.steps
        self.peer.after(CODING, self._coded)

    def _coded(self) -> None:
        self.worked = self.peer.now - self.asked
        if not self.one.machine.over:
            self.captured()

    def use(self, other: str, kind: str, payload: Any) -> None:
        if kind == "resend":
            self._send(other, "digits", int(self.sent * self.peer.swarm.again))
            return
        size, began = payload
        self.came.append((size, max(1e-3, self.peer.now - began)))
        if kind == "content" and self.peer.swarm.again:
            self.peer.after(CODING, lambda: self._ask(other))
        else:
            self.peer.after(CODING, lambda: self.tell(events.WholeContribution(peer=other)))

    def _ask(self, other: str) -> None:
        self.network.send(self.links[other], self.peer.name, "resend")

    def _send(self, other: str, kind: str, size: int) -> None:
        self.sent += size
        payload = (size, self.peer.now)
        self.network.send(self.links[other], self.peer.name, kind, payload, size)

    def effect(self, effect: events.Effect) -> None:
        match effect:
            case events.WholeContribution(peer=other):
                fragment, swarm = self.one.fragment, self.peer.swarm
                factor = 1.0 if fragment in self.peer.known else swarm.first
                self._send(other, "content", int(factor * swarm.sizes[fragment]))
            case _:
                super().effect(effect)

    def apply(self, effect: events.Apply) -> None:
        ripe = self.captured_steps + self.peer.swarm.spec.sync.overlap
        peer = self.peer

        def merge() -> None:
            peer.applied += 1
            peer.known.add(self.one.fragment)
            peer.seconds.append(peer.now - self.one.began)
            measured = events.Measured(
                work=self.worked + 2 * CODING,
                rate=min(size / seconds for size, seconds in self.came),
                line=sum(seconds for _, seconds in self.came),
                share=self.sent / (peer.swarm.most * peer.swarm.sizes[self.one.fragment]),
            )
            peer.stimulate(
                events.Merged(
                    exchange=self.one.number,
                    swarm_step=max(peer.swarm_step, effect.swarm_step),
                    steps=self.captured_steps,
                    tokens=32 * self.captured_steps,
                    slow_digest=b"",
                    momentum_digest=b"",
                    measured=measured,
                )
            )

        peer.ripening.append((ripe, merge))

    def drop(self) -> None:
        self.peer.wasted += self.sent
