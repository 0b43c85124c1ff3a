"""The processes that compute the gradient of one replica together: one for each GPU of a node.

A whole model is sharded (FSDP2): each process holds a run of rows of every weight, of its gradient
and moments, and a block is whole only while it computes. An adapter is small: every process holds
all of it, beside the frozen weights, and gradients are summed.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowcomm_node.models.base import Model, trained
from lowcomm_protocol.plan import Fragment

PATIENCE = timedelta(seconds=120)
"""How long a process waits for the others in the middle of a step."""
BUCKET = 1 << 22
"""Values of gradients that are summed at once."""


@dataclass(frozen=True)
class World:
    """One process among those of a replica."""

    rank: int = 0
    size: int = 1
    shards: bool = False
    """Whether each holds rows of the weights; otherwise all of them."""

    def join(self, device: torch.device, meeting: Path) -> None:
        """Meet the others, by a file that was not there before."""
        if self.size == 1:
            return
        from torch import distributed

        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # no port beyond this machine
            os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
        by_device = distributed.get_default_backend_for_device(device)
        distributed.init_process_group(
            by_device,
            store=distributed.FileStore(str(meeting), self.size),  # pyright: ignore
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
        )

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            from torch import distributed

            distributed.destroy_process_group()

    def rows_of(self, count: int) -> tuple[int, int]:
        """The rows of a weight that this process holds, as FSDP2 cuts ``count`` of them."""
        if not self.shards:
            return 0, count
        each = -(-count // self.size)
        return min(count, self.rank * each), min(count, (self.rank + 1) * each)

    def numbered(self, weights: Iterable[Tensor]) -> dict[Tensor, int]:
        """A number for what each process holds of each weight."""
        mine, step = (self.rank, self.size) if self.shards else (0, 1)
        return {weight: mine + step * number for number, weight in enumerate(weights)}

    def shard(self, model: Model, device: torch.device) -> None:
        """Shard a model in place, block by block, and move it to the device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (self.size,))
        for module in (*model.compiled_parts(), model):
            fully_shard(module, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Parts of a loss weigh by their tokens already, so gradients add up.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "loss")
        model.to(device)  # buffers, which are not sharded

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(values)
        return values

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add up gradients of which every process holds all, in place."""
        if self.size == 1 or self.shards:
            return
        for gradient in gradients:
            for part in gradient.view(-1).split(BUCKET):
                self.sum(part)

    def clip(self, weights: Sequence[Tensor], most: float) -> Tensor:
        """Clip the gradients of weights to a norm, in place; the norm before."""
        norm = nn.utils.get_total_norm([one.grad for one in weights if one.grad is not None])
        if self.shards:
            norm = self.sum(norm.square()).sqrt()
        nn.utils.clip_grads_with_norm_(weights, most, norm)
        return norm

    def dealt(self, mine: Tensor, rows: int, work: Callable[[Tensor], Tensor]) -> Tensor:
        """Let each process ``work`` on some of many matrices, whole, of which each holds rows.

        ``mine``: ``[matrices, rows here, columns]``; the outcome has the same shape.
        """
        if not self.shards:
            return work(mine)
        from torch import distributed

        count, here, columns = mine.shape
        each, chunk = -(-count // self.size), -(-rows // self.size)
        sent = mine.new_zeros(self.size * each, chunk, columns)
        sent[:count, :here] = mine
        came = torch.empty_like(sent)
        distributed.all_to_all_single(came, sent)
        whole = came.view(self.size, each, chunk, columns).transpose(0, 1).flatten(1, 2)
        number = max(0, min(each, count - self.rank * each))
        if number:
            whole[:number, :rows] = work(whole[:number, :rows])
        worked = whole.view(each, self.size, chunk, columns).transpose(0, 1).contiguous()
        # ``worked`` may be where ``came`` is.
        distributed.all_to_all_single(sent, worked.view_as(sent))
        return sent[:count, :here]


ALONE = World()


@torch.no_grad()
def held(model: Model) -> dict[str, Tensor]:
    """What this process holds of the trained weights: all, or its rows, which share memory."""
    return {name: local(one) for name, one in trained(model).items()}


def rows_of(
    model: Model, shapes: Mapping[str, torch.Size], world: World = ALONE
) -> dict[str, tuple[int, int]]:
    """Rows of each weight that a process holds; none of those that its model lacks."""
    here = trained(model)
    return {
        name: world.rows_of(shape[0]) if name in here else (0, 0)
        for name, shape in shapes.items()
        if shape
    }


def local(tensor: Any) -> Tensor:
    """The rows of a tensor that this process holds, where it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def pairs_held(
    fragment: Fragment,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, tuple[int, int]],
    vectors: Sequence[Tensor],
) -> list[tuple[int, Tensor, tuple[Tensor, ...]]]:
    """What this process holds of a fragment: where it begins in the fragment's vector, our rows,
    and their place in each of ``vectors``."""
    found: list[tuple[int, Tensor, tuple[Tensor, ...]]] = []
    for name, here, (low, high) in runs_held(fragment, rows):
        first = rows[name][0]
        ours = tensors[name][low - first : high - first]
        found.append((here.start, ours, tuple(one[here].view(ours.shape) for one in vectors)))
    return found


def runs_held(
    fragment: Fragment, rows: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, slice, tuple[int, int]]]:
    """Weights of which a process holds rows in a fragment: the name of each, where these are in the
    fragment's vector, and which they are."""
    start = 0
    for part in fragment.slices:
        first, last = rows[part.tensor]
        low, high = max(part.start, first), min(part.stop, last)
        if low < high:
            each = part.numel // (part.stop - part.start)
            begin = start + (low - part.start) * each
            yield part.tensor, slice(begin, begin + (high - low) * each), (low, high)
        start += part.numel
