"""Small models at the papers' settings: the relations of losses that the papers print.

Every run of a size begins with the weights that data-parallel training has reached
(`START_STEPS`), so that momentum of 0.9 and intervals of 100 steps meet a model that has left its
steepest part behind. Peers train on equal tokens; a run of four peers takes half the batch of one
of two. Held-out losses are those of each peer's fast weights, of their average, and of the slow
weights of the first.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from published.relations import BATCH, LOOKS, SIZES, START_STEPS, WARMUP, Job

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.simulation import Conditions, Member
from lowcomm_node.simulation.swarm import Swarm, compare
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.rows import scatter
from lowcomm_protocol.spec.run import RunSpec


def measure(job: Job, cache: Path) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    torch.set_num_threads(1)
    text = open_data("builtin:python", "bytes", cache / "data")
    begins = start(job.size, job.seed, text, cache)
    row = job.row
    if row.kind == "data-parallel":
        replica = data_parallel(spec_of(job), text, row.peers, begins)
        loss = held_out_loss(replica.model, text, replica.spec.model.context)
        return {"losses": [loss], "average": loss, "slow": loss, "curve": []}
    seen: list[list[float]] = []
    swarm = Looking(job, text, begins, seen)
    swarm.network.run()
    replicas = [peer.replica for peer in swarm.peers]
    losses = [look(one, text) for one in replicas]
    average_model, spread, _ = compare(replicas)
    average = held_out_loss(average_model, text, swarm.spec.model.context)
    return {
        "losses": losses,
        "average": average,
        "slow": slow_loss(replicas[0], text),
        "spread": spread,
        "bytes": mean(peer.bytes_sent for peer in swarm.peers),
        "peak": max(fragment.numel for fragment in replicas[0].plan.fragments),
        "applied": sum(peer.applied for peer in swarm.peers),
        "curve": seen,
    }


def spec_of(job: Job) -> RunSpec:
    """Of a run that goes on from the common start."""
    row = job.row
    train = {"warmup": WARMUP, "batch": 2 * BATCH // row.peers}
    return RunSpec.model_validate(
        {
            "run": {"name": "papers", "seed": job.seed, "steps": job.steps},
            "model": SIZES[job.size],
            "train": train,
            "sync": {"method": row.method} | row.sync,
        }
    )


def start(size: str, seed: int, text: Dataset, cache: Path) -> dict[str, torch.Tensor]:
    """The weights that two data-parallel peers reach; kept in a file."""
    file = cache / f"papers-start-{size}-{START_STEPS}-{seed}.pt"
    if not file.exists():
        spec = RunSpec.model_validate(
            {
                "run": {"name": "papers", "seed": 100 + seed, "steps": START_STEPS},
                "model": SIZES[size],
                "train": {"schedule": "constant", "batch": BATCH},
                "sync": {"method": "local"},
            }
        )
        replica = data_parallel(spec, text, 2, None)
        temporary = file.with_suffix(".writing")
        torch.save({name: weight.data for name, weight in replica.weights.items()}, temporary)
        temporary.replace(file)
    return torch.load(file, weights_only=True)


def data_parallel(
    spec: RunSpec, text: Dataset, peers: int, begins: dict[str, torch.Tensor] | None
) -> Replica:
    """Replicas that stay equal, so one is kept: each step takes the mean gradient of all."""
    batch = {"batch": spec.train.batch * peers}
    whole = spec.model_copy(update={"train": spec.train.model_copy(update=batch)})
    replica = Replica(whole, "peer-0", text, torch.device("cpu"), compiled=True)
    if begins:
        set_weights(replica, begins)
    for _ in range(spec.run.steps):
        replica.inner_step()
    return replica


def set_weights(replica: Replica, weights: dict[str, torch.Tensor]) -> None:
    """Begin with these, fast and slow."""
    with torch.no_grad():
        for name, weight in replica.weights.items():
            weight.copy_(weights[name])
    for p in range(len(replica.phi)):
        replica.phi[p] = replica.fast(p)


def look(replica: Replica, text: Dataset) -> float:
    """Held-out loss of the fast weights."""
    return held_out_loss(replica.model, text, replica.spec.model.context)


def slow_loss(replica: Replica, text: Dataset) -> float:
    """Held-out loss of the slow weights, which take the place of the fast ones."""
    with torch.no_grad():
        for fragment, phi in zip(replica.plan.fragments, replica.phi, strict=True):
            scatter(fragment, phi, replica.weights)
    return look(replica, text)


class Late(Replica):
    """The second peer merges five steps later than the others."""

    def __init__(self, spec: RunSpec, peer_id: str, *rest: Any, **named: Any) -> None:
        super().__init__(spec, peer_id, *rest, **named)
        if peer_id == "peer-1":
            late = spec.sync.model_copy(update={"overlap": spec.sync.overlap + 5})
            self.spec = spec.model_copy(update={"sync": late})


class Half(Replica):
    """Every second value of what is sent, drawn again each time, is lost for good."""

    def contribution(self, phi: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        sent = super().contribution(phi, theta)
        drawn = torch.Generator().manual_seed(self.steps)
        return sent.mul_(torch.rand(sent.numel(), generator=drawn) < 0.5)


KINDS: dict[str, type[Replica]] = {"": Replica, "late": Late, "half": Half}


class Looking(Swarm):
    """A swarm that begins with given weights, and whose spread is looked at."""

    def __init__(
        self, job: Job, text: Dataset, begins: dict[str, torch.Tensor], seen: list[list[float]]
    ) -> None:
        self.seen = seen
        spec = spec_of(job)
        members: Sequence[Member] = [Member()] * job.row.peers
        super().__init__(spec, text, members, Conditions(), KINDS[job.row.kind], True, 0)
        for peer in self.peers:
            set_weights(peer.replica, begins)

    def on_step(self, peer: Any) -> None:
        super().on_step(peer)
        replica = peer.replica
        if peer is self.peers[0] and replica.steps % (self.spec.run.steps // LOOKS) == 0:
            rate = learning_rate(self.spec.train, replica.clock.step, self.spec.run.steps)
            self.seen.append([replica.steps, rate, spread([one.replica for one in self.peers])])


@torch.no_grad()
def spread(replicas: Sequence[Replica]) -> float:
    """Root mean square of the standard deviation of the fast weights across peers."""
    vectors = [torch.cat([weight.flatten() for weight in one.weights.values()]) for one in replicas]
    return float(torch.stack(vectors).var(0, correction=0).mean().sqrt())
