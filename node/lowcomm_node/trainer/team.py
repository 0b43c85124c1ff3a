"""Processes that hold the parts of one replica, on devices of one machine or on several machines.

The first one trains and exchanges; it has all do the same between steps. Of a fragment or a weight
each copies what it holds to its place in a vector, and back. The vector is that of one process, so
exchanges, checkpoints and states for joiners are, too.
"""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.models.base import Stage
from lowcomm_node.node.ipc import create_file
from lowcomm_node.node.messages import LenderFigures
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_node.trainer.shard import WEIGHTS, Ranges, Shard, Step
from lowcomm_protocol.plan import Fragment, Slice

VECTORS = 2
"""In shared memory: a merge takes slow weights and captured ones."""


class Board:
    """Vectors of float32 in memory that all ranks share."""

    def __init__(self, descriptor: int, values: int) -> None:
        size = 4 * VECTORS * max(1, values)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        whole = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.float32)
        self._vectors = whole.view(VECTORS, -1)

    def vector(self, numel: int, number: int = 0) -> Tensor:
        """The beginning of a vector."""
        return self._vectors[number, :numel]


def values_of(shard: Shard) -> int:
    """Values of the largest fragment or weight."""
    shapes = (shape.numel() for shape in shard.shapes.values())
    return max(*(one.numel for one in shard.plan.fragments), *shapes)


def whole_of(shard: Shard, name: str) -> Fragment:
    """A weight, as if it were a fragment."""
    shape = shard.shapes[name]
    return Fragment(0, (Slice(name, 0, shape[0], shape.numel()),))


class Rank:
    """What each rank does between and in steps, rank 0 among them."""

    def __init__(self, shard: Shard, board: Board) -> None:
        self.shard = shard
        self._board = board
        self._restored: dict[str, Tensor] = {}

    def take(self, order: Mapping[str, Any], windows: Sequence[Tensor] = ()) -> Any:
        """Do what all ranks do; the answer."""
        name, shard = order["do"], self.shard
        if windows:
            tokens, targets = windows
            if name == "evaluate":
                return shard.loss_here(tokens, targets)
            shard.gradient.cut = Cut(*order["cut"])
            return shard.train(tokens, targets, Step(**order["step"]))
        if name == "merge":
            part, ranges = shard.plan.fragments[order["fragment"]], order["ranges"]
            slow, captured = (self._board.vector(part.numel, number) for number in range(VECTORS))
            return shard.merge_rows(part, ranges, slow, captured)
        if name == "keep":
            return shard.keep_merged(order["keep"])
        if name == "moments":
            return shard.optimizer.kept()
        if name == "restore":
            steps = {f"{name}.step": torch.tensor(steps) for name, steps in order["steps"].items()}
            restored, self._restored = self._restored | steps, {}
            return shard.optimizer.restore(restored)
        kind = order["kind"]
        if "weight" in order:
            weight = order["weight"]
            if weight not in shard.weights:
                return None
            part = whole_of(shard, weight)
            if kind == WEIGHTS:
                held = shard.weights
            elif name == "write out":
                held = {weight: shard.optimizer.moment(weight, kind)}
            else:
                empty = torch.empty(shard.weights[weight].shape)
                held = {weight: self._restored.setdefault(f"{weight}.{kind}", empty)}
        else:
            part, held = shard.plan.fragments[order["fragment"]], shard.weights
        copy = shard.write_out if name == "write out" else shard.read_in
        return copy(held, part, self._board.vector(part.numel))


class Team(ABC):
    """All processes that hold parts of one replica, this one among them; what is called here, all
    of them do."""

    stage: Stage | None = None
    """What this process holds of a model that no machine holds whole."""
    _shard: Shard
    _board: Board
    _rank: Rank

    def __init__(self) -> None:
        self._descriptor = create_file()
        self.lost: dict[str, str] = {}
        """Devices that can't be used, and why."""

    def begin(self, shard: Shard) -> None:
        """Do what is called from now on with this shard, too."""
        self._shard, self._board = shard, Board(self._descriptor, values_of(shard))
        self._rank = Rank(shard, self._board)

    @abstractmethod
    def train(self, tokens: Tensor, targets: Tensor, step: Step) -> Callable[[], list[float]]:
        """``Shard.train`` of a whole batch."""

    @abstractmethod
    def total_loss(self, tokens: Tensor, targets: Tensor) -> float:
        """``Shard.loss_here`` of all windows."""

    def figures(self) -> tuple[LenderFigures, ...]:
        """What each of other machines does."""
        return ()

    @abstractmethod
    def returned(self) -> str:
        """A device or machine that was lost and can be used again; empty if there is none. To be
        called again and again: now and then it begins to try."""

    def stop(self) -> None:
        """End all of the others."""
        os.close(self._descriptor)

    @abstractmethod
    def _all(self, order: dict[str, Any]) -> list[Any]:
        """Answers of all to an order, ours first. Raises TrainerError if one is gone."""

    def _room(self, numel: int) -> Tensor:
        """A new vector for a copy of a weight or a moment."""
        return torch.empty(numel)

    def gather(self, fragment: Fragment, out: Tensor) -> None:
        """Copy a fragment of the weights into a vector."""
        self._all({"do": "write out", "kind": WEIGHTS, "fragment": fragment.index})
        out.copy_(self._board.vector(fragment.numel))

    def merge(self, fragment: Fragment, ranges: Ranges, phi: Tensor, captured: Tensor) -> bool:
        """Merge new slow weights into the weights; False if not finite: they are as before."""
        for number, one in enumerate((phi, captured)):
            self._board.vector(fragment.numel, number).copy_(one)
        order = {"do": "merge", "fragment": fragment.index, "ranges": list(ranges)}
        finite = all(self._all(order))
        self._all({"do": "keep", "keep": finite})
        return finite

    def weights(self) -> dict[str, Tensor]:
        """All weights, in host memory."""
        return {name: self._whole(WEIGHTS, name) for name in self._shard.shapes}

    def moments(self) -> dict[str, Tensor]:
        """All moments, as ``InnerOptimizer.moments``."""
        steps = float(self._shard.optimizer.steps)
        found = dict[str, Tensor]()
        for key in dict.fromkeys(chain.from_iterable(self._all({"do": "moments"}))):
            name, _, kind = key.rpartition(".")
            found[key] = torch.tensor(steps) if kind == "step" else self._whole(kind, name)
        return found

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights."""
        for name, one in weights.items():
            self._place(WEIGHTS, name, one)

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Replace all moments. Raises CheckpointError."""
        steps = {}
        for key, one in moments.items():
            name, _, kind = key.rpartition(".")
            if kind == "step":
                steps[name] = float(one)
            else:
                self._place(kind, name, one)
        self._all({"do": "restore", "steps": steps})

    def _whole(self, kind: str, name: str) -> Tensor:
        self._all({"do": "write out", "kind": kind, "weight": name})
        shape = self._shard.shapes[name]
        numel = shape.numel()
        return self._room(numel).copy_(self._board.vector(numel)).view(shape)

    def _place(self, kind: str, name: str, one: Tensor) -> None:
        self._board.vector(one.numel()).copy_(one.detach().reshape(-1))
        self._all({"do": "read in", "kind": kind, "weight": name})
