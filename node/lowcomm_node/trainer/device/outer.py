# pyright: reportMissingImports=false, reportIndexIssue=false
"""The arithmetic between capture and merge on a GPU: `exchange/outer.py`, to the bit.

Every operation is rounded to float32: kernels are launched with ``enable_fp_fusion=False``, so that
no multiplication and addition become one (FMA). Sums over 256 values fold halves, as the loops do.
A vector is cut into parts of `PART` values, one a program; blocks of 256 into `ROWS` a program.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lowcomm_protocol.errors import PlanError
from lowcomm_protocol.exchange.outer import normalized
from lowcomm_protocol.spec.names import BLOCK
from lowcomm_protocol.spec.outer_settings import OuterSettings

PART = 1024
ROWS = 4
INFINITE = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SMALLEST = tl.constexpr(2.0**-100)


def contribution(
    settings: OuterSettings, phi: Tensor, theta: Tensor, out: Tensor | None = None
) -> Tensor:
    """See exchange/outer.py."""
    sent = torch.empty_like(phi) if out is None else out
    _check_alike(phi, theta, sent)
    _launch(_contributed, sent, theta, phi, _fp32(settings.gain), _fp32(settings.consensus))
    return sent


def mean_contribution(
    contributions: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See exchange/outer.py."""
    if not contributions:
        raise PlanError("a mean of no contributions: pass at least the peer's own")
    total = torch.empty_like(contributions[0]) if out is None else out
    _check_alike(total, *contributions)
    if weights is None:
        total.copy_(contributions[0])
        for one in contributions[1:]:
            total.add_(one)
        # One by one: torch multiplies by the inverse of a scalar on a GPU, which rounds twice.
        _launch(_divided, total, _fp32(len(contributions)))
        return total
    shares = [_fp32(one) for one in normalized(weights, len(contributions))]
    _launch(_scaled, total, contributions[0], shares[0])
    for one, share in zip(contributions[1:], shares[1:], strict=True):
        _launch(_add_scaled, total, one, share)
    return total


def outer_step(
    settings: OuterSettings,
    phi: Tensor,
    delta: Tensor,
    mean_c: Tensor,
    progress: Tensor | None = None,
    own_decoded: Tensor | None = None,
) -> None:
    """See exchange/outer.py. Raises PlanError for a rule that has no kernel here."""
    _check_alike(phi, delta, mean_c)
    pooled = mean_c
    if settings.consensus and progress is not None and own_decoded is not None:
        _check_alike(phi, progress, own_decoded)
        pooled = torch.empty_like(mean_c)
        _launch(_pooled_of_own, pooled, progress, own_decoded, mean_c, _fp32(settings.gain))
    elif settings.consensus:
        pooled = torch.empty_like(mean_c)
        _launch(_pooled_of_mean, pooled, mean_c, phi, _fp32(settings.consensus))
    momentum = _fp32(settings.momentum)
    if settings.kind == "nesterov":
        _launch(_nesterov, phi, delta, pooled, _fp32(settings.outer_lr), momentum)
    elif settings.kind == "noloco" and settings.memory:
        memory, new = _fp32(settings.memory), _fp32(1.0 - settings.memory)
        _launch(_remembering, phi, delta, pooled, momentum, memory, new)
    elif settings.kind == "noloco":
        _launch(_noloco, phi, delta, pooled, momentum)
    else:
        raise PlanError(f"kind {settings.kind!r} has no kernel for a GPU: use host memory")


def merge(
    settings: OuterSettings,
    theta: Tensor,
    phi_new: Tensor,
    theta_captured: Tensor,
    out: Tensor | None = None,
) -> bool:
    """See exchange/outer.py. Waits for the device."""
    merged = theta if out is None else out
    _check_alike(theta, phi_new, theta_captured, merged)
    programs = triton.cdiv(theta.numel(), PART)
    largest = torch.zeros(programs, dtype=torch.int32, device=theta.device)
    if settings.merge == "mix":
        share = np.float32(1.0 - settings.mix)
        rest = float(np.float32(1.0) - share)
        nearer = bool(share < np.float32(0.5))
        _launch(_mixed, merged, theta, phi_new, float(share), rest, largest, FROM_THETA=nearer)
    else:
        _launch(_shifted, merged, theta, phi_new, theta_captured, largest)
    return bool((largest < INFINITE.value).all())


def worst_block_spread(vectors: Sequence[Tensor]) -> float:
    """See exchange/outer.py."""
    _check_alike(*vectors)
    sums = torch.zeros(_blocks(vectors[0]), dtype=torch.float32, device=vectors[0].device)
    for one, other in combinations(vectors, 2):
        folded = torch.empty_like(sums)
        _launch_rows(_squares_apart, one, other, 1.0, folded)
        sums.add_(folded)
    largest = float(sums.max()) if sums.numel() else 0.0
    return (largest / BLOCK) ** 0.5 / len(vectors)


def square_apart(vector: Tensor, base: Tensor, pull: float) -> float:
    """See exchange/outer.py: sums of blocks are added in float64, one after the other."""
    _check_alike(vector, base)
    folded = torch.empty(_blocks(vector), dtype=torch.float32, device=vector.device)
    _launch_rows(_squares_apart, vector, base, _fp32(pull), folded)
    sums = np.cumsum(folded.cpu().numpy(), dtype=np.float64)
    return float(sums[-1]) if sums.size else 0.0


def _fp32(number: float) -> float:
    """As it is in float32; a kernel takes it without rounding again."""
    return float(np.float32(number))


def _blocks(vector: Tensor) -> int:
    return -(-vector.numel() // BLOCK)


def _check_alike(*vectors: Tensor) -> None:
    first = vectors[0]
    for one in vectors:
        flat = one.dtype == torch.float32 and one.ndim == 1 and one.is_contiguous()
        if not flat or one.shape != first.shape or one.device != first.device:
            raise PlanError(
                f"a vector of {one.dtype} and shape {tuple(one.shape)} on {one.device}: pass "
                f"contiguous float32 of shape {tuple(first.shape)} on {first.device}"
            )


def _launch(kernel: Any, out: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over the values of ``out``; vectors first, then numbers."""
    numel = out.numel()
    if numel:
        grid = (triton.cdiv(numel, PART),)
        kernel[grid](out, *arguments, numel, PART=PART, enable_fp_fusion=False, **constants)


def _launch_rows(kernel: Any, one: Tensor, other: Tensor, pull: float, sums: Tensor) -> None:
    """Run a kernel over the blocks of vectors."""
    if one.numel():
        grid = (triton.cdiv(sums.numel(), ROWS),)
        kernel[grid](
            one, other, sums, pull, one.numel(), ROWS=ROWS, BLOCK=BLOCK, enable_fp_fusion=False
        )


@triton.jit
def _here(numel, PART: tl.constexpr):
    """Indices of this program's part, and which of them there are."""
    at = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    return at, at < numel


@triton.jit
def _kept(value):
    """The value, or 0 where it is smaller than `SMALLEST`."""
    return tl.where(tl.abs(value) < SMALLEST, 0.0, value)


@triton.jit
def _peak(value):
    """Bits of the largest magnitude."""
    return tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0)


@triton.jit
def _contributed(out, theta, phi, gain, pull, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    slow = tl.load(phi + at, mask=here, other=0.0)
    value = gain * (tl.load(theta + at, mask=here, other=0.0) - slow)
    if pull != 0.0:
        value = value + pull * slow
    tl.store(out + at, value, mask=here)


@triton.jit
def _scaled(out, one, share, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    tl.store(out + at, share * tl.load(one + at, mask=here, other=0.0), mask=here)


@triton.jit
def _add_scaled(out, one, share, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    more = share * tl.load(one + at, mask=here, other=0.0)
    tl.store(out + at, tl.load(out + at, mask=here, other=0.0) + more, mask=here)


@triton.jit
def _divided(out, count, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    value = tl.load(out + at, mask=here, other=0.0)
    tl.store(out + at, tl.div_rn(value, tl.zeros_like(value) + count), mask=here)


@triton.jit
def _pooled_of_own(out, progress, sent, mean, gain, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    ours = tl.load(sent + at, mask=here, other=0.0)
    apart = ours - tl.load(mean + at, mask=here, other=0.0)
    value = gain * tl.load(progress + at, mask=here, other=0.0) - apart
    tl.store(out + at, value, mask=here)


@triton.jit
def _pooled_of_mean(out, mean, phi, pull, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    slow = pull * tl.load(phi + at, mask=here, other=0.0)
    tl.store(out + at, tl.load(mean + at, mask=here, other=0.0) - slow, mask=here)


@triton.jit
def _nesterov(phi, delta, pooled, rate, momentum, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    gradient = _kept(-tl.load(pooled + at, mask=here, other=0.0))
    velocity = _kept(momentum * tl.load(delta + at, mask=here, other=0.0) + gradient)
    tl.store(delta + at, velocity, mask=here)
    step = _kept(rate * (gradient + momentum * velocity))
    tl.store(phi + at, tl.load(phi + at, mask=here, other=0.0) - step, mask=here)


@triton.jit
def _noloco(phi, delta, pooled, momentum, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    velocity = momentum * tl.load(delta + at, mask=here, other=0.0)
    velocity = velocity + tl.load(pooled + at, mask=here, other=0.0)
    tl.store(delta + at, velocity, mask=here)
    tl.store(phi + at, tl.load(phi + at, mask=here, other=0.0) + velocity, mask=here)


@triton.jit
def _remembering(phi, delta, pooled, momentum, memory, new, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    before = tl.load(delta + at, mask=here, other=0.0)
    step = _kept(momentum * before + tl.load(pooled + at, mask=here, other=0.0))
    tl.store(phi + at, tl.load(phi + at, mask=here, other=0.0) + step, mask=here)
    tl.store(delta + at, _kept(memory * before + new * step), mask=here)


@triton.jit
def _shifted(out, theta, phi, captured, largest, numel, PART: tl.constexpr) -> None:
    at, here = _here(numel, PART)
    fast = tl.load(theta + at, mask=here, other=0.0)
    slow = tl.load(phi + at, mask=here, other=0.0)
    before = tl.load(captured + at, mask=here, other=0.0)
    value = tl.where(fast == before, slow, fast + (slow - before))
    tl.store(out + at, value, mask=here)
    tl.store(largest + tl.program_id(0), _peak(value))


@triton.jit
def _mixed(
    out,
    theta,
    phi,
    share,
    rest,
    largest,
    numel,
    PART: tl.constexpr,
    FROM_THETA: tl.constexpr,
) -> None:
    at, here = _here(numel, PART)
    fast = tl.load(theta + at, mask=here, other=0.0)
    slow = tl.load(phi + at, mask=here, other=0.0)
    way = slow - fast
    if FROM_THETA:
        value = fast + share * way
    else:
        value = slow - rest * way
    tl.store(out + at, value, mask=here)
    tl.store(largest + tl.program_id(0), _peak(value))


@triton.jit
def _squares_apart(
    one,
    other,
    sums,
    pull,
    numel,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The sum of the squares of ``one - pull * other`` in each block."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < numel
    base = pull * tl.load(other + at, mask=here, other=0.0)
    apart = tl.load(one + at, mask=here, other=0.0) - base
    squares = apart * apart
    # Halves, as the loop of exchange/outer_kernels.py adds them.
    for half in tl.static_range(8):
        squares = tl.sum(tl.reshape(squares, (ROWS, 2, BLOCK >> (half + 1))), axis=1)
    tl.store(sums + block, tl.reshape(squares, (ROWS,)), mask=block * BLOCK < numel)
