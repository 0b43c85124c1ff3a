"""Runs in simulation, and what a swarm is measured against: one replica alone, and all-reduce of
gradients at every step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from shutil import which
from typing import Any

import kit
import torch
from torch import nn

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.models.evaluation import held_out_loss
from lowcomm_node.simulation.swarm import Member, Point, Result, simulate
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.run import RunSpec


def measured(
    content: Mapping[str, Any],
    members: int | Sequence[Member],
    how: str = "swarm",
    text: Dataset | None = None,
    evaluations: int = 0,
) -> dict[str, Any]:
    """Run a specification in this process: a swarm, a "single" replica or an "allreduce"."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate(content)
    text = text or open_data("builtin:python", "bytes", kit.OUT / "data")
    peers = members if isinstance(members, int) else len(members)
    # Compiling takes half a minute, once, and makes a step a third faster.
    compiled = spec.run.steps * peers > 1000 and which("g++") is not None
    if how == "single":
        result = single(spec, text, compiled, evaluations)
    elif how == "allreduce":
        result = allreduce(spec, text, peers, compiled, evaluations)
    else:
        result = simulate(spec, text, members, compiled=compiled, evaluations=evaluations)
    kept = asdict(result) | {"loss": result.loss}
    return kept if evaluations else {name: one for name, one in kept.items() if name != "curve"}


def ring_bytes(parameters: int, peers: int, steps: int) -> float:
    """Bytes that each of ``peers`` sends in a ring all-reduce of fp32 gradients at every step."""
    return 2 * (peers - 1) / peers * 4 * parameters * steps


def single(
    spec: RunSpec,
    dataset: Dataset,
    compiled: bool = False,
    evaluations: int = 0,
    kind: type[Replica] = Replica,
) -> Result:
    """One replica that never meets anybody."""
    alone = spec.model_copy(update={"sync": spec.sync.model_copy(update={"group": 1})})
    return simulate(alone, dataset, 1, None, kind, compiled, evaluations)


def allreduce(
    spec: RunSpec,
    dataset: Dataset,
    peers: int,
    compiled: bool = False,
    evaluations: int = 0,
    kind: type[Replica] = Replica,
) -> Result:
    """``peers`` data-parallel replicas, which stay equal, so one is kept: each step takes the mean
    of all gradients."""
    cpu = torch.device("cpu")
    replica = kind(spec, "peer-0", dataset, cpu, compiled)
    train, model = spec.train, spec.model
    streams = [kind(spec, f"peer-{k}", dataset, cpu, False).stream for k in range(peers)]
    parameters = sum(weight.numel() for weight in replica.weights.values())
    every, curve = (max(1, spec.run.steps // evaluations) if evaluations else 0), []
    for step in range(1, spec.run.steps + 1):
        for stream in streams:
            (replica.loss(*stream.next_batch()) / peers).backward()
        nn.utils.clip_grad_norm_(replica.model.parameters(), train.clip)
        replica.optimizer.step(replica.rate, replica.clock.step)
        replica.clock.tick()
        if every and step % every == 0:
            sent = round(ring_bytes(parameters, peers, step))
            loss = held_out_loss(replica.model, dataset, model.context)
            curve.append(Point(step * spec.tokens_per_step, sent, loss))
    loss = held_out_loss(replica.model, dataset, model.context)
    return Result(
        losses=(loss,),
        average_loss=loss,
        spread=0.0,
        worst_block=0.0,
        bytes_sent=ring_bytes(parameters, peers, spec.run.steps),
        applied=0,
        failed=0,
        steps=(spec.run.steps,) * peers,
        curve=tuple(curve),
    )
