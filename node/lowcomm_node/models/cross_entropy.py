"""The loss of a language model from what its head reads, without all logits in memory at once.

Logits of 8,192 tokens over 32,000 words are 1 GiB in fp32, and a plain loss holds them three times.
Here one chunk of tokens after the other gives its part of the loss and of both gradients, and only
these are kept. ``F.linear_cross_entropy`` of torch 2.13 does the same, but needs that torch, knows
no autocast, and took 1.7 s where ours took 1.0 s (2,048 tokens over 32,000 words on a processor).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowcomm_node.data.stream import IGNORED
from lowcomm_node.system.machine import can_compile

WHOLE = 1 << 24
"""Logits up to which all are computed at once: 64 MiB in fp32. Below, chunks save little, and small
models keep the bits of their losses."""
CHUNK, CHUNK_ON_GPU = WHOLE, 1 << 26
"""Logits of a chunk. A GPU holds them in bf16, and large products keep it busy."""
FEWEST = 256
"""Tokens of a chunk at least: each chunk reads and writes a gradient as large as the head."""


def chunk_tokens(tokens: int, vocab: int, gpu: bool = False) -> int | None:
    """Tokens whose logits are held at once; None where the plain loss holds all."""
    if tokens * vocab <= WHOLE:
        return None
    return min(tokens, max(FEWEST, (CHUNK_ON_GPU if gpu else CHUNK) // vocab))


def cross_entropy(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a learned token; 0 where none is learned.

    ``states``: what the head reads, ``[..., width]``; ``head``: its matrix ``[vocab, width]``;
    ``targets``: ``[...]``, of which those that are IGNORED don't count. It can be
    differentiated once, by these two.
    """
    chunk = chunk_tokens(targets.numel(), len(head), states.device.type != "cpu")
    if chunk is None:
        return mean_loss(F.linear(states, head), targets)
    if torch.is_autocast_enabled(states.device.type):
        states = states.to(torch.get_autocast_dtype(states.device.type))
    learns = torch.is_grad_enabled()
    # Autocast would cast the head anew for each chunk.
    with torch.autocast(states.device.type, enabled=False):
        flat = states.flatten(0, -2)
        return _Chunked.apply(flat, head, targets.flatten(), chunk, learns)  # type: ignore[no-any-return]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same of logits ``[..., vocab]``."""
    flat = logits.float().flatten(0, -2)
    total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / count_learned(targets).clamp(min=1)


def count_learned(targets: Tensor) -> Tensor:
    """How many targets are learned, on their device."""
    return (targets != IGNORED).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, targets: Tensor, chunk: int, learns: bool
    ) -> Tensor:
        matrix = head.to(states.dtype)
        by_states = torch.empty_like(states) if learns else None
        by_head = torch.zeros_like(head) if learns else None
        total = torch.zeros((), device=states.device)
        slopes_of = _slopes_on(states.device)
        for start in range(0, len(targets), chunk):
            here = slice(start, start + chunk)
            loss, slopes = slopes_of(states[here] @ matrix.T, targets[here], learns)
            total += loss
            if by_states is None or by_head is None:
                continue
            torch.mm(slopes, matrix, out=by_states[here])
            if head.dtype == states.dtype:
                by_head.addmm_(slopes.T, states[here])
            else:
                by_head += slopes.T @ states[here]
            del slopes
        ctx.slopes, ctx.count = (by_states, by_head), count_learned(targets).clamp(min=1)
        return total / ctx.count

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # Handed on, not kept: the head's becomes its gradient without a copy.
        (by_states, by_head), ctx.slopes = ctx.slopes, None
        each = slopes[0] / ctx.count
        return by_states.mul_(each), by_head.mul_(each), None, None, None


@cache
def _slopes_on(device: torch.device) -> Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]:
    """``slopes`` by Triton on a device for which it compiles them, and they are right."""
    if device.type == "cpu" or not can_compile():
        return slopes_on_host
    try:
        from lowcomm_node.models.slopes_on_gpu import slopes

        logits = torch.linspace(-9, 9, 300, device=device).view(3, 100).cos()
        targets = torch.tensor([0, 99, IGNORED], device=device)
        expected, found = (some(logits.clone(), targets, True) for some in (slopes_on_host, slopes))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    except Exception:  # of Triton, a driver or a compiler: each has its own
        return slopes_on_host
    return slopes


def slopes_on_host(logits: Tensor, targets: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    """The sum of the losses of learned rows, and the slopes of each loss by its logits.

    ``logits``: ``[rows, vocab]``, which nobody needs any more: in fp32 the slopes take their place.
    ``targets``: ``[rows]``. Without ``learns`` the slopes hold anything.
    """
    values, places = logits.float(), targets[:, None]
    ignored = places == IGNORED
    places = places.clamp(min=0)
    values -= values.amax(-1, keepdim=True)
    total = -values.gather(1, places).masked_fill_(ignored, 0.0).sum()
    sums = values.exp_().sum(-1, keepdim=True)
    total += sums.log().masked_fill_(ignored, 0.0).sum()
    if learns:
        values /= sums.masked_fill_(ignored, torch.inf)  # whose slopes become 0
        values.scatter_add_(1, places, ignored.float() - 1.0)
    return total, values.to(logits.dtype)
