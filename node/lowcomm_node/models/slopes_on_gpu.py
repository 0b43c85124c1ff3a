# pyright: reportMissingImports=false, reportIndexIssue=false
"""Slopes of the cross-entropy on a GPU, in the place of the logits.

Elementary operations read and write logits in fp32 eight times, which takes longer than the
products of matrices around them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Logits that a program holds at once."""


def slopes(logits: Tensor, targets: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    """The sum of the losses of learned rows, and the slopes of each loss by its logits.

    ``logits``: ``[rows, vocab]``, in any precision, contiguous; the slopes take their place if it
    ``learns``. ``targets``: ``[rows]``, int64; those below 0 are IGNORED.
    """
    rows, vocab = logits.shape
    losses = torch.empty(rows, device=logits.device)
    _slopes[(rows,)](logits, targets, losses, vocab, LEARNS=learns, PART=PART, num_warps=8)
    return losses.sum(), logits


@triton.jit
def _slopes(logits, targets, losses, vocab, LEARNS: tl.constexpr, PART: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    place = tl.arange(0, PART)
    # A maximum and a sum that grow together read the row once; NaN goes into the sum.
    most, total = float("-inf"), 0.0
    wanted = tl.zeros((PART,), tl.float32)
    for start in range(0, vocab, PART):
        here = start + place
        value = tl.load(logits + here, mask=here < vocab, other=float("-inf")).to(tl.float32)
        before, most = most, tl.maximum(most, tl.max(value, axis=0))
        total = total * tl.exp(before - most) + tl.sum(tl.exp(value - most), axis=0)
        wanted += tl.where(here == target, value, 0.0)
    whole = most + tl.log(total)
    tl.store(losses + row, tl.where(target < 0, 0.0, whole - tl.sum(wanted, axis=0)))
    if LEARNS:
        for start in range(0, vocab, PART):
            here = start + place
            value = tl.load(logits + here, mask=here < vocab, other=0.0).to(tl.float32)
            slope = tl.exp(value - whole) - tl.where(here == target, 1.0, 0.0)
            slope = tl.where(target < 0, 0.0, slope)
            tl.store(logits + here, slope.to(logits.dtype.element_ty), mask=here < vocab)
