# pyright: reportMissingImports=false, reportIndexIssue=false
"""Triton kernels that merge on a GPU: `merge` of `exchange/outer.py`, to the bit.

Every operation is rounded to float32: kernels are launched with ``enable_fp_fusion=False``, so that
no multiplication and addition become one (FMA). Each program merges `PART` values.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lowcomm_protocol.errors import PlanError
from lowcomm_protocol.spec.outer import OuterSettings

PART = 1024
INFINITE = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def merge(
    settings: OuterSettings,
    theta: Tensor,
    phi_new: Tensor,
    theta_captured: Tensor,
    out: Tensor | None = None,
) -> bool:
    """Bring an outer step into the fast weights; whether all is finite. Waits for the device.

    Vectors are contiguous float32 of one shape, on the device. Raises PlanError otherwise.
    """
    merged = theta if out is None else out
    for one in (theta, phi_new, theta_captured, merged):
        flat = one.dtype == torch.float32 and one.ndim == 1 and one.is_contiguous()
        if not flat or one.shape != theta.shape or one.device != theta.device:
            raise PlanError(
                f"a vector of {one.dtype} and shape {tuple(one.shape)} on {one.device}: pass "
                f"contiguous float32 of shape {tuple(theta.shape)} on {theta.device}"
            )
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


def _launch(kernel: Any, out: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel over the values of ``out``; vectors first, then numbers."""
    numel = out.numel()
    if numel:
        grid = (triton.cdiv(numel, PART),)
        kernel[grid](out, *arguments, numel, PART=PART, enable_fp_fusion=False, **constants)


@triton.jit
def _here(numel, PART: tl.constexpr):
    """Indices of this program's part, and which of them there are."""
    at = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    return at, at < numel


@triton.jit
def _peak(value):
    """Bits of the largest magnitude."""
    return tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0)


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
