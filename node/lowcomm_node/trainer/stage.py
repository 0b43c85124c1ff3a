"""The lender's side of stages: it holds some blocks of a model, their gradients and moments.

    head ──states──► forward ──► states          of each micro-batch, in order
         ──slopes──► backward ──► slopes
         ──norm────► optimizer                   once a step

The head asks for nothing else in a step: neither text nor loss leaves it. Between steps it asks for
what all holders of a replica do (``team.py``).
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from queue import Queue
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from lowcomm_node.errors import ConfigError, LinkLost
from lowcomm_node.models.adapters import UNDER_WAY, footprint_of, shapes_of, take_weight
from lowcomm_node.models.base import Stage, StagedModel, computing
from lowcomm_node.models.devices import module_of
from lowcomm_node.models.stages import build_stage, require_stages, shell_of
from lowcomm_node.node.ipc import create_file
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.memory import EVALUATION_TOKENS, StepChoices
from lowcomm_node.trainer.ranks import try_out
from lowcomm_node.trainer.shard import Shard
from lowcomm_node.trainer.team import VECTORS, Board, Rank, values_of, whole_of
from lowcomm_node.trainer.wire import Wire
from lowcomm_node.trainer.world import runs_held
from lowcomm_protocol.spec.run import RunSpec

ALIVE_EVERY = 0.2
"""Seconds between two signs of life."""
QUEUED = 4
"""Orders that are read ahead of what is computed."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def places_of(order: Mapping[str, Any], shard: Shard, rows: Any, board: Board) -> list[Tensor]:
    """The parts of a board's vectors that a holder of these rows copies by an order."""
    if "kind" not in order and order["do"] != "merge":
        return []
    whole = "weight" in order
    part = whole_of(shard, order["weight"]) if whole else shard.plan.fragments[order["fragment"]]
    vectors = (board.vector(part.numel, n) for n in range(VECTORS if order["do"] == "merge" else 1))
    return [vector[here] for vector in vectors for _, here, _ in runs_held(part, rows)]


def most_blocks(
    spec: RunSpec,
    device: torch.device,
    limits: tuple[float | None, float | None],
    exchanges: int,
    choices: StepChoices,
    outside: bool = False,
) -> int:
    """Blocks that a machine has memory for; -1 if it has too little for what is outside of them.

    ``limits``: GiB of memory, and of that of the GPU.
    """
    low, high = -1, footprint_of(spec).blocks
    while low < high:
        tried = (low + high + 1) // 2
        try:
            stage = Stage(0, tried, outside)
            memory.check_memory(spec, device, *limits, exchanges, choices, stage=stage)
            low = tried
        except ConfigError:
            high = tried - 1
    return low


def hold(
    wire: Wire, order: dict[str, Any], spec: RunSpec, device: torch.device, max_bytes: int | None
) -> None:
    """Hold a stage until the trainer is gone. Raises ConfigError, LinkLost, OSError."""
    stopped = threading.Event()
    threading.Thread(target=_show_life, args=(wire, stopped), daemon=True).start()
    try:
        require_stages(spec)
        limits = None if max_bytes is None else max_bytes / memory.GIB, None
        choices = StepChoices(order["micro_batch"], None, order["moments"])
        most = most_blocks(spec, device, limits, 0, choices)
        wire.send({"blocks": max(0, most), "seconds": try_out(str(device)).seconds})
        if (chosen := wire.read()) is None:
            return
        stage = Stage(*chosen["stage"])
        _, cut = memory.check_memory(spec, device, *limits, 0, choices, stage=stage)
        model = build_stage(spec, stage, device)
        model.separator = order["separator"]
        if cut.recompute:
            model.recompute_blocks(True)
        shard = Shard(model, spec, device, None, order["moments"], whole=shell_of(spec))
        wire.send({"windows": cut.windows})
        Holding(wire, shard, model).run()
    finally:
        stopped.set()


def _show_life(wire: Wire, stopped: threading.Event) -> None:
    with suppress(OSError):
        while not stopped.wait(ALIVE_EVERY):
            wire.send({"alive": True})


class Holding:
    """A stage at work."""

    def __init__(self, wire: Wire, shard: Shard, model: StagedModel) -> None:
        self._wire, self._shard, self._model = wire, shard, model
        self._board = Board(create_file(), values_of(shard))
        self._rank = Rank(shard, self._board)
        self._kept = deque[tuple[Tensor, Tensor]]()
        """States that came and went, of micro-batches under way."""
        spec = shard.spec
        self._shapes = shapes_of(spec.model)
        self._width, self._context = footprint_of(spec).between, spec.model.context
        self._most_tokens = max(spec.train.batch * self._context, EVALUATION_TOKENS)
        self._orders: Queue[tuple[dict[str, Any], list[Tensor]] | None] = Queue(QUEUED)

    def run(self) -> None:
        """Do what the head orders until it is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        while (came := self._orders.get()) is not None:
            order, tensors = came
            began = monotonic()
            answer, results = self._take(order, tensors)
            seconds = monotonic() - began
            self._wire.send({"answer": answer, "seconds": seconds}, results)

    def _read(self) -> None:
        try:
            while (order := self._wire.read()) is not None:
                tensors = [torch.empty(shape, dtype=form) for shape, form in self._due(order)]
                self._wire.read_exactly(tensors)
                self._orders.put((order, tensors))
        except (OSError, ValueError, KeyError, TypeError, LinkLost):
            pass  # the head says why it went
        self._orders.put(None)

    def _due(self, order: Mapping[str, Any]) -> Iterable[tuple[Sequence[int], torch.dtype]]:
        """Shapes and types of the tensors that follow an order. Raises ValueError."""
        if order["do"] in ("merge", "read in"):
            for place in self._places(order):
                yield place.shape, torch.float32
        elif order["do"] == "load":
            yield self._shapes[order["name"]], DTYPES[order["dtype"]]
        elif order["do"] in ("forward", "backward"):
            windows, length, width = map(int, order["shape"])
            if windows < 1 or not 0 < length <= self._context or width != self._width:
                raise ValueError(f"states of {windows} x {length} x {width}")
            if windows * length > self._most_tokens:
                raise ValueError(f"{windows} windows of {length} tokens")
            yield (windows, length, width), DTYPES[order["dtype"]]
            if order.get("starts"):
                yield (windows, length), torch.int32

    def _places(self, order: Mapping[str, Any]) -> list[Tensor]:
        return places_of(order, self._shard, self._shard.rows, self._board)

    def _take(self, order: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        name = order["do"]
        if name == "forward":
            return None, [self._forward(order, *tensors)]
        if name == "backward":
            return None, [self._backward(tensors[0])]
        if name == "load":
            take_weight(self._model, order["name"], tensors[0])
            return None, []
        if name == "norms":
            return None, [norms_of(self._shard)]
        if name == "update":
            return update(self._shard, order["norm"], order["rate"], order["swarm_step"]), []
        if tensors:
            for place, came in zip(self._places(order), tensors, strict=True):
                place.copy_(came)
        answer = self._rank.take(order)
        return answer, self._places(order) if name == "write out" else []

    def _forward(self, order: Mapping[str, Any], x: Tensor, starts: Tensor | None = None) -> Tensor:
        model, device, learns = self._model, self._shard.device, order["learns"]
        if order.get("seed") is not None:
            torch.manual_seed(order["seed"])
        if learns and len(self._kept) >= UNDER_WAY:
            raise LinkLost(f"more than {UNDER_WAY} micro-batches are under way")
        model.train(learns)
        states = x.to(device).requires_grad_(learns)
        begins = None if starts is None else starts.to(device).long()
        with nullcontext() if learns else torch.no_grad(), computing(device):
            y = model.through(states, begins)
        if learns:
            self._kept.append((states, y))
        return y.detach().to(x.dtype)

    def _backward(self, slopes: Tensor) -> Tensor:
        states, y = self._kept.popleft()
        y.backward(slopes.to(y.device, y.dtype))
        assert states.grad is not None
        module_of(states.device).synchronize()
        return states.grad.to(slopes.dtype)


def norms_of(shard: Shard) -> Tensor:
    """The norm of the gradient of each weight that a machine holds, in host memory."""
    none = torch.zeros(())
    gradients = (one.grad for one in shard.weights.values())
    norms = [none if one is None else torch.linalg.vector_norm(one).cpu() for one in gradients]
    return torch.stack(norms).float()


def update(shard: Shard, norm: float | None, rate: float, swarm_step: int) -> None:
    """Clip by the norm of the whole gradient, and take a step; none if ``norm`` is None."""
    weights = list(shard.weights.values())
    if norm is None:
        for weight in weights:
            weight.grad = None
        return
    total = torch.tensor(norm, device=shard.device)
    nn.utils.clip_grads_with_norm_(weights, shard.spec.train.clip, total)
    shard.optimizer.step(rate, swarm_step)
