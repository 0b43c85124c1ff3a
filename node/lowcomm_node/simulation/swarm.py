"""A swarm of simulated peers: who takes part, and what came of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import mean
from typing import Any, Literal, get_args

import torch

from lowcomm_node.data import Dataset
from lowcomm_node.models.base import Model
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.simulation.network import Conditions, Network
from lowcomm_node.simulation.peer import SimulatedPeer
from lowcomm_node.sync import frames
from lowcomm_node.sync.link import CHUNK_BYTES
from lowcomm_node.trainer import transfer
from lowcomm_node.trainer.judging import PLAUSIBLE, Bound
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.errors import MAX_REASON
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.outer import worst_block_spread
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.state import Piece, fits

Attack = Literal["nan", "huge", "flipped", "flipped-huge", "stale", "clock", "shapes", "endless"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)
FACTORS = {"huge": 100.0, "flipped": -1.0, "flipped-huge": -10.0}
"""What a liar multiplies its progress by."""
RECORD_LIFETIME = 30.0
"""Seconds that others still believe in a peer that died."""


@dataclass(frozen=True)
class Member:
    """One peer of a simulation."""

    speed: float = 1.0
    """Inner steps a second."""
    joins: float = 0.0
    """Seconds; a late peer copies the state of those that are furthest, in pieces."""
    leaves: float | None = None
    dies: float | None = None
    attack: Attack | None = None
    """How it lies from a quarter of the run on."""
    delay: float = 0.0
    """Seconds that its contributions are on their way for longer."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Start and length, in seconds, of a standstill of the machine, like a closed laptop's."""


@dataclass(frozen=True)
class Point:
    """One look at the first peer during the run."""

    tokens: int
    """Tokens that it has trained on."""
    bytes_sent: int
    loss: float


@dataclass(frozen=True)
class Result:
    """Outcome of honest peers that were there at the end; losses: held-out, nats a token."""

    losses: tuple[float, ...]
    average_loss: float
    """Of the averaged weights."""
    spread: float
    """Root mean square of the standard deviation of weights across peers."""
    worst_block: float
    """The same of the block of 256 values where it is largest."""
    bytes_sent: float
    """Payload bytes a peer."""
    applied: int
    failed: int
    """Exchanges, of all peers together."""
    steps: tuple[int, ...]
    curve: tuple[Point, ...]
    control_sent: float = 0.0
    """Bytes a peer beside contents: frames that agree on exchanges."""

    @property
    def loss(self) -> float:
        """Mean of the peers' own."""
        return mean(self.losses)


class Swarm:
    """The peers of one run, and what they know of each other."""

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset,
        members: Sequence[Member],
        conditions: Conditions,
        kind: type[Replica],
        compiled: bool,
        evaluations: int,
    ) -> None:
        self.spec, self.dataset, self.members = spec, dataset, members
        self.network = Network(spec.run.seed, conditions)
        self.network.weigh = control_bytes
        self.peers: list[SimulatedPeer] = []
        self.curve: list[Point] = []
        self._every = max(1, spec.run.steps // evaluations) if evaluations else 0
        self._gone: dict[str, float] = {}
        cpu = torch.device("cpu")
        for number, member in enumerate(members):
            name = f"peer-{number}"
            made = liar(kind, member.attack) if member.attack else kind
            peer = SimulatedPeer(self, name, made(spec, name, dataset, cpu, compiled), member.speed)
            peer.delay, peer.pauses, peer.attack = member.delay, member.pauses, member.attack
            self.peers.append(peer)
            self.network.after(
                member.joins, lambda peer=peer, late=member.joins > 0: self._join(peer, late)
            )
            if member.leaves is not None:
                self.network.after(member.leaves, lambda peer=peer: self._leave(peer))
            if member.dies is not None:
                self.network.after(member.dies, lambda peer=peer: self._die(peer))

    def training(self) -> list[str]:
        """Whom peers believe to be training, as signed records would tell them."""
        now = self.network.now
        there = (
            peer for peer in self.peers if peer.training or self._gone.get(peer.name, now) > now
        )
        return [peer.name for peer in there]

    def others(self, *but: SimulatedPeer | str) -> Iterable[SimulatedPeer]:
        """All peers that train, but these."""
        return [
            one for one in self.peers if one.training and one not in but and one.name not in but
        ]

    def on_step(self, peer: SimulatedPeer) -> None:
        """Look at the first peer now and then."""
        if self._every and peer is self.peers[0] and peer.replica.steps % self._every == 0:
            loss = held_out_loss(peer.replica.model, self.dataset, self.spec.model.context)
            self.curve.append(Point(peer.replica.tokens, peer.bytes_sent, loss))

    def result(self) -> Result:
        """Compare the honest peers that are there at the end."""
        honest = [
            peer
            for peer, member in zip(self.peers, self.members, strict=True)
            if member.attack is None and member.leaves is None and member.dies is None
        ]
        context = self.spec.model.context
        losses = tuple(held_out_loss(one.replica.model, self.dataset, context) for one in honest)
        average, spread, worst = compare([one.replica for one in honest])
        return Result(
            losses=losses,
            average_loss=held_out_loss(average, self.dataset, context),
            spread=spread,
            worst_block=worst,
            bytes_sent=mean(one.bytes_sent for one in honest),
            applied=sum(one.applied for one in self.peers),
            failed=sum(one.failed for one in self.peers),
            steps=tuple(one.replica.steps for one in honest),
            curve=tuple(self.curve),
            control_sent=mean(self.network.control[one.name] for one in honest),
        )

    def _join(self, peer: SimulatedPeer, late: bool) -> None:
        if late:
            self.copy_state(peer)
        self.network.peers[peer.name] = peer
        peer.start()

    def copy_state(self, peer: SimulatedPeer) -> bool:
        """Copy pieces from all peers that are where the furthest is; whether there was any."""
        there = list(self.others(peer))
        if not there:
            return False
        there = [one for one in there if one.cell == peer.cell] or there
        copies = [transfer.StateSnapshot(one.replica) for one in there]
        base = max(copies, key=lambda one: one.swarm_step)
        manifests, sync = {one: one.manifest([]) for one in copies}, self.spec.sync

        def read(piece: Piece) -> bytes:
            fitting = (
                fits(manifests[one], manifests[base], piece.fragment, sync) for one in copies
            )
            good = list(compress(copies, fitting))
            return good[piece.index % len(good)].piece(piece)

        transfer.adopt(peer.replica, manifests[base], read)
        return True

    def _leave(self, peer: SimulatedPeer) -> None:
        peer.leave()
        self.network.peers.pop(peer.name, None)

    def _die(self, peer: SimulatedPeer) -> None:
        peer.die()
        self.network.peers.pop(peer.name, None)
        self._gone[peer.name] = self.network.now + RECORD_LIFETIME


def simulate(
    spec: RunSpec,
    dataset: Dataset,
    members: int | Sequence[Member],
    conditions: Conditions | None = None,
    kind: type[Replica] = Replica,
    compiled: bool = False,
    evaluations: int = 0,
) -> Result:
    """Train a swarm in one process and virtual time; the same arguments give the same bits.

    ``kind``: replica, where a method of your own goes (docs/methods.md); ``compiled`` needs a C++
    compiler; ``evaluations``: looks at the first peer during the run.
    """
    members = [Member()] * members if isinstance(members, int) else members
    conditions = conditions or Conditions()
    swarm = Swarm(spec, dataset, members, conditions, kind, compiled, evaluations)
    swarm.network.run()
    return swarm.result()


def liar(kind: type[Replica], attack: Attack) -> type[Replica]:
    """A replica that multiplies its contribution, or repeats it, from a quarter of the run on.

    It takes whatever others bring. What is far too large it keeps out of the mean of its own shard,
    so that only the shards of others show it.
    """
    factor = FACTORS.get(attack, 1.0)

    class Liar(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest)
            self.kept: dict[int, torch.Tensor] = {}
            self.captured = 0

        def capture(self, fragment: int, *rest: Any, **named: Any) -> None:
            self.captured = fragment
            super().capture(fragment, *rest, **named)
            if self._lies():
                capture = self.captures[fragment]
                capture.judge.bound = Bound(math.inf, math.inf)
                if abs(factor) > PLAUSIBLE:
                    reduce, me = capture.reduce, capture.me

                    def without_ours(tokens: Mapping[str, int], out: memoryview) -> int:
                        others = {peer: count for peer, count in tokens.items() if peer != me}
                        return reduce(others or tokens, out)

                    capture.reduce = without_ours

        def contribution(self, phi: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
            if not self._lies():
                return super().contribution(phi, theta)
            brought = super().contribution(phi, torch.lerp(phi, theta, factor))
            kept = self.kept.setdefault(self.captured, brought)
            return kept.clone() if attack == "stale" else brought

        def _lies(self) -> bool:
            return self.clock.step >= self.spec.run.steps // 4

    return Liar


@torch.no_grad()
def compare(replicas: Sequence[Replica]) -> tuple[Model, float, float]:
    """The averaged model (in the first one's weights), the spread, and that of the worst block."""
    vectors = [torch.cat([weight.flatten() for weight in one.weights.values()]) for one in replicas]
    variance, average = torch.var_mean(torch.stack(vectors), 0, correction=0)
    offset = 0
    for weight in replicas[0].weights.values():
        weight.copy_(average[offset : offset + weight.numel()].view_as(weight))
        offset += weight.numel()
    return replicas[0].model, float(variance.mean().sqrt()), worst_block_spread(vectors)


def control_bytes(payload: Any) -> int:
    """Bytes of the frames that carry a message, without contents, gRPC, HTTP/2 and TLS."""
    match payload:
        case Offer():
            return pb.Frame(hello=frames.to_message(payload)).ByteSize()
        case Refusal():
            return frames.refuse(payload).ByteSize()
        case str():
            return pb.Frame(abandon=pb.Abandon(reason=payload[:MAX_REASON])).ByteSize()
        case events.MemberMessage():
            return frames.frame_of(payload).ByteSize()
        case bytes():
            # The frame that announces a content, and what stands before each of its chunks.
            content = pb.Content(size=len(payload), digest=bytes(32))
            last = pb.Frame(chunk=pb.Chunk(offset=len(payload), data=b"-")).ByteSize() - 1
            return pb.Frame(content=content).ByteSize() + last * -(-len(payload) // CHUNK_BYTES)
        case _:
            return 0
