"""One simulated peer: a real replica, real exchanges, and virtual time.

Steps take ``1 / speed`` seconds; captures and merges wait for step boundaries, as in
``trainer/loop.py``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowcomm_node.simulation.contents import CONTENTS
from lowcomm_node.simulation.driver import PeerDriver, SimulatedExchange
from lowcomm_node.simulation.network import SimulatedStream
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs import coder
from lowcomm_protocol.errors import Offence
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.peer import Peer
from lowcomm_protocol.exchange.underway import Underway
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.peers.roster import Liveness
from lowcomm_protocol.peers.shards import cell_of

if TYPE_CHECKING:  # which imports this module
    from lowcomm_node.simulation.swarm import Swarm

AHEAD = 10**9
"""Swarm steps that a liar adds to its claim."""
EXCHANGES = 4
"""How many may be under way at once, as in a node."""
LONGEST = 300.0
"""Seconds that one may take, as in a node."""


class SimulatedPeer(PeerDriver):
    """A replica that trains and exchanges until the run is over, it leaves or dies."""

    def __init__(
        self,
        world: "Swarm",
        name: str,
        replica: Replica,
        speed: float,
    ) -> None:
        deadlines = Deadlines(longest=LONGEST, alone_first=False)
        machine = Peer(name, replica.spec, replica.run_id, _View(self), deadlines)
        super().__init__(world.network, machine)
        self.world = world
        self.replica = replica
        self.sync = replica.spec.sync
        self.cell = cell_of(replica.run_id, name, self.sync.cells)
        self.speed = speed
        self.training = False
        self.delay = 0.0
        self.attack: str | None = None
        self.pauses: tuple[tuple[float, float], ...] = ()
        self.bytes_sent = 0
        self.applied = 0
        self.failed = 0
        self.implausible = 0
        self.realigned = 0
        self.taken_over = 0
        self.copied = 0
        """How often it has copied a state because it had drifted."""
        self.deeds: list[tuple[str, Offence, str]] = []
        """Offences counted against others: peer, weight and reason."""
        self.liveness = Liveness(name)
        self.losses: list[float] = []
        """Loss of every inner step, nats a token."""
        self.at_boundary: list[Callable[[], None]] = []
        self.ripening: list[tuple[int, Callable[[], None]]] = []
        self._is_copying = False

    def new_exchange(self, one: Underway) -> SimulatedExchange:
        return CONTENTS[one.kind.name](self, one)

    def heard(self, peer: str) -> None:
        self.liveness.met(peer, self.network.now)

    def on_effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Unanswered(peer=peer):
                self.liveness.missed(peer, self.network.now)
            case events.Penalty(peer=peer, deed=deed, reason=reason, forgiven=False):
                self.deeds.append((peer, deed, reason))
            case events.Drifted() if not self._is_copying:
                self._is_copying = True
                self.after(0.0, self._copy_state)
            case _:
                pass

    @property
    def lie(self) -> str | None:
        """How it lies now, if it does: from a quarter of the run on."""
        begun = self.replica.clock.step >= self.replica.spec.run.steps // 4
        return self.attack if begun else None

    def altered(self, content: bytes) -> bytes:
        """What it really sends: a liar sends bytes of no number, or too many."""
        lies = {"nan": b"\xff" * len(content), "shapes": content + bytes(4096)}
        return lies.get(self.lie or "", content)

    def tampered(self, offer: Offer) -> Offer:
        return replace(offer, swarm_step=offer.swarm_step + AHEAD) if self.lie == "clock" else offer

    # inner steps

    def start(self) -> None:
        """Begin to train."""
        self.training = True
        self._take_over()
        self._begin_step()

    def content_sizes(self) -> tuple[tuple[int, int], ...]:
        """Of each fragment, see TrainerReady."""
        fragments = self.replica.plan.fragments
        sizes = (coder(self.sync.codec, fragment.numel).max_size for fragment in fragments)
        return tuple((size, size) for size in sizes)

    def _take_over(self) -> None:
        replica = self.replica
        fragments = range(len(replica.plan.fragments))
        ready = events.TrainerReady(
            plan=replica.plan.digest,
            sizes=self.content_sizes(),
            realign_sizes=tuple(4 * fragment.numel for fragment in replica.plan.fragments),
            exchanges=EXCHANGES,
            swarm_step=replica.clock.step,
            steps=replica.steps,
            tokens=replica.tokens,
            progress=tuple(replica.schedule[p] for p in fragments),
            slow_digests=tuple(bytes.fromhex(replica.slow_digest(p)) for p in fragments),
            momentum_digests=tuple(bytes.fromhex(replica.momentum_digest(p)) for p in fragments),
        )
        self.stimulate(ready)
        self.stimulate(events.Opened())

    def leave(self) -> None:
        """Say goodbye: exchanges under way are given up, and others hear of it."""
        self.stimulate(events.GaveUp(reason="leaves"))
        self.training = False
        self.over = True

    def die(self) -> None:
        """End without a word; connected peers notice."""
        self.training = False
        self.over = True
        for stream in self.by_stream:
            self.network.break_(stream)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, once the machine runs."""
        self.network.after(seconds, lambda: self._when_awake(action))

    def _when_awake(self, action: Callable[[], None]) -> None:
        now = self.network.now
        until = max(
            (start + length for start, length in self.pauses if start <= now < start + length),
            default=now,
        )
        if until > now:
            self.network.at(until, lambda: self._when_awake(action))
        elif not self.over:
            action()

    def step_seconds(self) -> float:
        """How long the next inner step takes; override it for steps of varying length."""
        return 1.0 / self.speed

    def transfer_seconds(self, size: int) -> float:
        """How long contents of ``size`` bytes take at the rates that its owner allows."""
        return 0.0

    def _begin_step(self) -> None:
        seconds = self.step_seconds()
        self.after(seconds, lambda: self._step(seconds))

    def _step(self, seconds: float) -> None:
        replica = self.replica
        self.losses.append(replica.inner_step())
        actions, self.at_boundary = self.at_boundary, []
        for action in actions:
            action()
        self._merge(replica.steps)
        self.world.on_step(self)
        steps, tokens = replica.steps, replica.tokens
        self.stimulate(
            events.Stepped(
                swarm_step=replica.clock.step, steps=steps, tokens=tokens, seconds=seconds
            )
        )
        if not replica.course.is_over(replica.clock.step):
            self._begin_step()
        else:
            self._finish()

    def _finish(self) -> None:
        """The run is over: merge what has arrived, begin nothing new."""
        self.training = False
        self.stimulate(events.Closed())
        self.stimulate(events.GaveUp(reason="the run is over"))
        self._merge(math.inf)
        self.over = True

    def _merge(self, steps: float) -> None:
        """Merge what is ripe after ``steps`` inner steps."""
        ripe = [entry for entry in self.ripening if entry[0] <= steps]
        self.ripening = [entry for entry in self.ripening if entry not in ripe]
        for _, merge in ripe:
            merge()

    def _copy_state(self) -> None:
        """Go back to the others, as a node does that has drifted."""
        self._is_copying = False
        if not self.training:
            return
        self.stimulate(events.Closed())
        self.stimulate(events.GaveUp(reason="copies the state of a peer"))
        for exchange in list(self.exchanges.values()):  # applied, and waiting to be merged
            exchange.carry_out(events.End(reason="copies the state of a peer"))
        self.ripening.clear()
        self.at_boundary.clear()
        if self.world.copy_state(self):
            self.copied += 1
            self.stimulate(events.StateCopied(seconds=0.0))
        else:
            self.stimulate(events.DriftEndured())
        self._take_over()

    # messages

    def receive(self, stream: SimulatedStream, kind: str, payload: Any) -> None:
        """Take in a message, once the machine runs."""
        if self.pauses and not self.over:
            self._when_awake(lambda: super(SimulatedPeer, self).receive(stream, kind, payload))
        else:
            super().receive(stream, kind, payload)


class _View:
    """The surroundings of a simulated peer."""

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer

    def partners(self) -> list[str]:
        peer, now = self._peer, self._peer.network.now
        for other in peer.world.others(peer):  # as probes and the DHT show in a node
            peer.liveness.heard(other.name, now)
        training = (one for one in peer.world.training() if peer.liveness.is_alive(one, now))
        run_id, cells = peer.replica.run_id, peer.sync.cells
        return [one for one in training if cell_of(run_id, one, cells) == peer.cell]

    def training(self) -> list[tuple[str, int]]:
        return [(one.name, one.replica.clock.step) for one in self._peer.world.others(self._peer)]

    def furthest(self, but: str) -> int:
        return max(
            (one.replica.clock.step for one in self._peer.world.others(self._peer, but)), default=0
        )

    def knows(self, peer: str) -> bool:
        return True

    def sharing(self) -> int:
        return 0

    def has_room_for(self, place: str, callers: Sequence[str], free: int) -> bool:
        return True

    def transfer_seconds(self, size: int, streams: int) -> float:
        return self._peer.transfer_seconds(size)
