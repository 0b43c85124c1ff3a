"""Other systems as recipes on the simulator: one short class or loop each, beside what is shipped.

Four peers, the demo model, 400 steps, one seed. Where steps take varying time, their lengths are
log-normal with a mean of one second. Each recipe is the idea of a paper, not its program.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from baselines import allreduce, ring_bytes
from published.learning import spread
from torch import Tensor, nn

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.data.stream import TrainStream
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.simulation import Conditions, Member, simulate
from lowcomm_node.simulation.swarm import compare
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.matching import Meeting, Pairing, PeerOrder, mirrored
from lowcomm_protocol.spec.names import PAIRINGS
from lowcomm_protocol.spec.run import RunSpec

ALL, GROUPS, PAIRS, GOSSIP = "all-reduce", "`streaming-diloco`", "`lowcomm`", "`gossip`"
SLOW_PAIRS = "`lowcomm`, two slow lines"
HALF = "`streaming-diloco`, two of half speed"
FIXED = "two stages, fixed routing"
BACKUP = "backup workers: close on the three fastest"
DROP = "DropCompute: steps above 1.6 s are dropped"
SELSYNC = "SelSync: average where gradients change by 2 %"
SAPS = "SAPS: partners by bandwidth"
A2CID2 = "A2CiD2: a second copy that pulls"
ROUTED = "NoLoCo: two stages, random routing"
PROPORTION = "work in proportion to speed"
DILOCOX = "DiLoCoX: merged an interval later, in 4 bits"

BESIDE = {
    ALL: "",
    BACKUP: ALL,
    GROUPS: "",
    DROP: GROUPS,
    SELSYNC: ALL,
    SLOW_PAIRS: "",
    SAPS: SLOW_PAIRS,
    GOSSIP: "",
    A2CID2: GOSSIP,
    FIXED: "",
    ROUTED: FIXED,
    HALF: "",
    PROPORTION: HALF,
    DILOCOX: GROUPS,
    PAIRS: "",
}
"""In the order in which they are measured; empty: read on its own."""

PEERS, STEPS, SEED = 4, 400, 0
CPU = torch.device("cpu")
SIGMA = 0.5
"""Of the logarithm of a step's length."""
DEADLINE = 1.6
"""Seconds after which a step is dropped."""
SLOW_LINE = 4e3
"""Bytes a second of two of the four peers: a fragment takes 6 s, and is due every 4."""
NEW = 0.02
"""SelSync averages where the squared norm of gradients has changed by such a share."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    loss: float
    """Mean of the peers."""
    average: float
    """Of the averaged weights."""
    spread: float
    megabytes: float
    """That a peer sent."""
    notes: dict[str, float] = field(default_factory=dict)


def spec(method: str, train: dict[str, Any] | None = None, **sync: Any) -> RunSpec:
    """A run of the demo model."""
    return RunSpec.model_validate(
        {
            "run": {"name": "recipes", "seed": SEED, "steps": STEPS},
            "train": train or {},
            "sync": {"method": method} | sync,
        }
    )


def swarm(
    text: Dataset,
    run: RunSpec,
    kind: type[Replica] = Replica,
    members: list[Member] | int = PEERS,
    conditions: Conditions | None = None,
) -> Outcome:
    """In the simulator, over the production engine."""
    result = simulate(run, text, members, conditions, kind, compiled=True)
    return Outcome(
        result.loss,
        result.average_loss,
        result.spread,
        result.bytes_sent / 1e6,
        {"exchanges applied": result.applied, "failed": result.failed},
    )


# Whom to meet: SAPS-PSGD (2002.09692)


def by_rate(meeting: Meeting, me: str) -> str | None:
    """Peers of like lines meet, but in every fourth round all do, so that nobody is left apart."""
    drawn = meeting.line(meeting.round)
    if meeting.round % 4 == 3:
        return mirrored(drawn, me, 1)
    peers = tuple(sorted(drawn.peers, key=lambda peer: RATES.get(peer, 1e9)))
    return mirrored(PeerOrder(peers, {peer: place for place, peer in enumerate(peers)}), me, 1)


RATES = {"peer-1": SLOW_LINE, "peer-3": SLOW_LINE}


@contextmanager
def pairing(name: str, entry: Pairing) -> Iterator[None]:
    """A pairing of one's own while the context lasts."""
    PAIRINGS.register(name, entry)
    try:
        yield
    finally:
        PAIRINGS.unregister(name)


def two_slow_lines(text: Dataset, drawn: str = "hypercube") -> Outcome:
    """Pairs as shipped, where two of four lines are slow."""
    return swarm(text, spec("lowcomm", pairing=drawn), conditions=Conditions(rates=RATES))


def saps(text: Dataset) -> Outcome:
    """The same, but partners are chosen by their lines."""
    with pairing("by-rate", by_rate):
        return two_slow_lines(text, "by-rate")


# Steps of varying length


def seconds(random: Random) -> float:
    """Of a step, with a mean of one."""
    return random.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)


class DropCompute(Replica):
    """A step that would take longer than the deadline counts, but moves nothing (2306.10598)."""

    taken = 0.0

    def inner_step(self) -> float:
        took = seconds(Random(f"{self.peer_id}/{self.steps}"))
        type(self).taken += min(took, DEADLINE)
        if took <= DEADLINE:
            return super().inner_step()
        self.steps += 1
        self.clock.tick()
        self.stream.next_batch()
        return float("nan")


def drop_compute(text: Dataset) -> Outcome:
    """Groups as shipped, whose members drop steps that take too long."""
    DropCompute.taken = 0.0
    made = swarm(text, spec("streaming-diloco"), DropCompute)
    took = {"seconds a step": DropCompute.taken / PEERS / STEPS}
    return replace(made, notes=made.notes | took)


def backup_workers(text: Dataset, fastest: int = PEERS - 1) -> Outcome:
    """All-reduce that closes on the fastest: the gradient of the last peer is left out
    (1604.00981)."""
    run = spec("local", {"optimizer": "muon"})
    replica = Replica(run, "peer-0", text, CPU, compiled=True)
    streams = [_stream(run, text, f"peer-{k}") for k in range(PEERS)]
    random, time = Random(SEED), 0.0
    for _ in range(STEPS):
        lengths = [seconds(random) for _ in streams]
        closes = sorted(lengths)[fastest - 1]
        time += closes
        for stream, length in zip(streams, lengths, strict=True):
            batch = stream.next_batch()
            if length <= closes:
                (replica.loss(*batch) / fastest).backward()
        _step(replica)
    loss = held_out_loss(replica.model, text, run.model.context)
    sent = ring_bytes(_values(replica), PEERS, STEPS) / 1e6
    return Outcome(loss, loss, 0.0, sent, {"seconds a step": time / STEPS})


def in_step(text: Dataset) -> Outcome:
    """All-reduce as it is."""
    made = allreduce(spec("local", {"optimizer": "muon"}), text, PEERS, compiled=True)
    random = Random(SEED)
    time = sum(max(seconds(random) for _ in range(PEERS)) for _ in range(STEPS))
    return Outcome(
        made.loss, made.average_loss, 0.0, made.bytes_sent / 1e6, {"seconds a step": time / STEPS}
    )


def selsync(text: Dataset) -> Outcome:
    """Local steps; weights are averaged only where gradients change much (2307.07950)."""
    run = spec("local", {"optimizer": "muon"})
    replicas = [Replica(run, f"peer-{k}", text, CPU, compiled=True) for k in range(PEERS)]
    norms, met = [0.0] * PEERS, 0
    for _ in range(STEPS):
        changed = False
        for k, one in enumerate(replicas):
            one.loss(*one.stream.next_batch()).backward()
            norm = sum(
                float(w.grad.square().sum()) for w in one.weights.values() if w.grad is not None
            )
            # Smoothed as in the paper: a single batch is mostly noise.
            smooth = norm if not norms[k] else 0.96 * norms[k] + 0.04 * norm
            changed |= bool(norms[k]) and abs(smooth - norms[k]) > NEW * norms[k]
            norms[k] = smooth
            _step(one)
        if changed:
            met += 1
            _average(replicas)
    sent = ring_bytes(_values(replicas[0]), PEERS, met) / 1e6
    return _compared(replicas, text, sent, {"share of steps that average": met / STEPS})


# Another outer step


class A2CiD2(Replica):
    """Pairs average; a second copy of the weights is pulled to the first all the time
    (2306.08289).

    ``delta`` holds the second copy less the first, which gradients leave as it is.
    """

    REACH = 1.0
    """How far the second copy moves at an exchange, in differences to the mean; more than a half
    where peers are badly connected."""
    MIXED = 0.5
    """Of the difference, what is left after an interval."""

    def outer_step(
        self,
        phi: Tensor,
        delta: Tensor,
        mean: Tensor,
        progress: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> None:
        assert progress is not None
        apart = progress - (mean - phi)
        delta.add_(apart, alpha=1.0 - 2.0 * self.REACH)
        phi.copy_(mean).add_(delta, alpha=(1.0 - self.MIXED) / 2)
        delta.mul_(self.MIXED)


# Work in proportion to speed


class Proportional(Replica):
    """A peer of half the speed takes half the batch, so that all step together."""

    def __init__(self, run: RunSpec, peer_id: str, *rest: Any, **named: Any) -> None:
        super().__init__(run, peer_id, *rest, **named)
        if peer_id in ("peer-2", "peer-3"):
            train = run.train.model_copy(update={"batch": run.train.batch // 2})
            half = run.model_copy(update={"train": train})
            self.stream = _stream(half, self.dataset, peer_id)


def half_speed(text: Dataset) -> Outcome:
    """Groups as shipped, with two peers of half the speed."""
    members = [Member(), Member(), Member(speed=0.5), Member(speed=0.5)]
    return swarm(text, spec("streaming-diloco"), members=members)


# NoLoCo's random routing through two pipeline stages (2506.10911)


def routed(text: Dataset, at_random: bool) -> Outcome:
    """Four pipelines of two stages, whose weights pairs average every 20 steps.

    A batch that enters the first stage of one goes on through the second stage of another, drawn
    again at each step, or always of the same.
    """
    run = spec("local")
    replicas = [Replica(run, f"peer-{k}", text, CPU, compiled=False) for k in range(PEERS)]
    second = [name for name in replicas[0].weights if _in_second(name, replicas[0])]
    random, spreads = Random(SEED), []
    for step in range(1, STEPS + 1):
        goes_to = random.sample(range(PEERS), PEERS) if at_random else list(range(PEERS))
        for k, one in enumerate(replicas):
            other = replicas[goes_to[k]].weights
            path = dict(one.weights) | {name: other[name] for name in second}
            _loss(one.model, path, *one.stream.next_batch()).backward()
        for one in replicas:
            _step(one)
        if step % 20 == 0:
            spreads.append(spread(replicas))
            order = random.sample(range(PEERS), PEERS)
            _average([replicas[order[0]], replicas[order[1]]])
            _average([replicas[order[2]], replicas[order[3]]])
    sent = STEPS / 20 * 4 * _values(replicas[0]) / 1e6
    return _compared(
        replicas, text, sent, {"mean spread before exchanges": sum(spreads) / len(spreads)}
    )


def _in_second(name: str, replica: Replica) -> bool:
    place = replica.model.place_of(name)
    layers = getattr(replica.spec.model, "layers", 2)
    if place.layer is not None:
        return place.layer >= layers // 2
    return place.role in ("norm", "head")


def _loss(model: nn.Module, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    logits = torch.func.functional_call(model, weights, (tokens,))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# what loops share


def _stream(run: RunSpec, text: Dataset, peer: str) -> TrainStream:
    return TrainStream(text.train, run.model.context, run.train.batch, run.run.seed, peer)


def _step(replica: Replica) -> None:
    nn.utils.clip_grad_norm_(replica.model.parameters(), replica.spec.train.clip)
    replica.optimizer.step(replica.rate, replica.clock.step)
    replica.steps += 1
    replica.clock.tick()


def _values(replica: Replica) -> int:
    return sum(weight.numel() for weight in replica.weights.values())


@torch.no_grad()
def _average(replicas: list[Replica]) -> None:
    for weights in zip(*(one.weights.values() for one in replicas), strict=True):
        mean = torch.stack(list(weights)).mean(0)
        for weight in weights:
            weight.copy_(mean)


def _compared(
    replicas: list[Replica], text: Dataset, sent: float, notes: dict[str, float]
) -> Outcome:
    context = replicas[0].spec.model.context
    losses = [held_out_loss(one.model, text, context) for one in replicas]
    average, apart, _ = compare(replicas)
    return Outcome(sum(losses) / PEERS, held_out_loss(average, text, context), apart, sent, notes)


def shipped(text: Dataset, method: str, **sync: Any) -> Outcome:
    """A preset, or with other settings."""
    return swarm(text, spec(method, **sync))


RECIPES: dict[str, Callable[[Dataset], Outcome]] = {
    ALL: in_step,
    BACKUP: backup_workers,
    GROUPS: partial(shipped, method="streaming-diloco"),
    DROP: drop_compute,
    SELSYNC: selsync,
    SLOW_PAIRS: two_slow_lines,
    SAPS: saps,
    GOSSIP: partial(shipped, method="gossip"),
    A2CID2: lambda text: swarm(text, spec("gossip"), A2CiD2),
    FIXED: partial(routed, at_random=False),
    ROUTED: partial(routed, at_random=True),
    HALF: half_speed,
    PROPORTION: lambda text: swarm(text, spec("streaming-diloco"), Proportional),
    DILOCOX: partial(
        shipped, method="streaming-diloco", fragments=1, interval=16, overlap=15, codec="e3m0"
    ),
    PAIRS: partial(shipped, method="lowcomm"),
}


def measure(name: str, cache: Path) -> Outcome:
    """Run one."""
    torch.set_num_threads(1)
    return RECIPES[name](open_data("builtin:python", "bytes", cache / "data"))
