"""How the loops of codecs are compiled, and the parts that several of them share.

One thread, no GIL, no fast math: the same bits on every machine.

A block is 256 values behind one scale, a float32 (in q2 and q1 a bf16) that stands little-endian
before the block's codes. Scales are tested as integers: positive floats order as their bits do, so
one comparison refuses NaN, infinity, a sign and too large a scale. A block whose scale would fall
below 2**-100 is coded as zeros, so that no subnormal number enters the arithmetic: a thread that
flushes them (torch.set_flush_denormal, CUDA) still writes the same bytes.
"""

import inspect
import sys
from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeVar, cast

import numba
import numpy as np

from lowcomm_protocol.codecs.base import Vector

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
SIGN = np.uint32(0x80000000)
SMALLEST_SCALE = np.float32(2.0**-100)
SMALLEST_SCALE_BITS = np.uint32((127 - 100) << 23)

SHARED = sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:12]
"""Names this version of this file."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit = cast(
    "Callable[..., Callable[[Any], Any]]", numba.njit
)  # numba does not say what its decorators return


def part(function: _Function) -> _Function:
    """A function that kernels call: compiled into them."""
    return _njit(nogil=True)(function)


def kernel(function: _Function) -> _Function:
    """Compile at the first call, and keep the result on disk where that works.

    numba looks for a writable folder at import and raises where there is none (a package and a home
    that are read-only). At the first call it raises when the disk is full or a cache file is
    damaged. None of these may stop a peer: it compiles in memory then. Kernels raise nothing.
    """
    # numba's cache sees a change of the file that a kernel stands in, not of the parts below that
    # it calls. It names its files by the qualified name, so a new version of this file finds no old
    # code.
    function.__qualname__ = f"{function.__qualname__}_{SHARED}"
    in_memory = _njit(nogil=True)(function)
    try:
        cached = _njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return in_memory
    chosen = [cached]

    def call(*arguments: Any) -> Any:
        try:
            return chosen[0](*arguments)
        except Exception:
            if chosen[0] is in_memory:
                raise
            chosen[0] = in_memory
            return in_memory(*arguments)

    return cast("_Function", call)


@part
def peak_of(bits: Any, start: int, stop: int) -> Any:
    """Bits of the largest magnitude in [start, stop).

    Integers, because a maximum of those is vectorized.
    """
    largest = np.uint32(0)
    for i in range(start, stop):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest


@part
def write_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    for k in range(4):
        out[at + k] = (bits >> np.uint32(8 * k)) & np.uint32(0xFF)


@part
def scale_bits(data: Any, at: int) -> Any:
    bits = np.uint32(0)
    for k in range(4):
        bits |= np.uint32(data[at + k]) << np.uint32(8 * k)
    return bits


@part
def scale_holds(bits: Any, largest: Any) -> bool:
    return bits == 0 or SMALLEST_SCALE_BITS <= bits <= np.float32(largest).view(np.uint32)


@part
def bf16_out(value: Any, out: Any, at: Any) -> Any:
    """Write a value as bf16, nearest even; the value that it stands for."""
    raw = np.float32(value).view(np.uint32)
    raw = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    out[at], out[at + 1] = (raw >> np.uint32(16)) & np.uint32(0xFF), raw >> np.uint32(24)
    return np.uint32(raw).view(np.float32)


@part
def bf16_in(data: Any, at: Any) -> Any:
    raw = (np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)) << np.uint32(16)
    return np.uint32(raw).view(np.float32)


@part
def integers_of(values: Vector, start: int, stop: int, peak: Any, into: Any) -> Any:
    """Magnitudes of a block as integers below 2**24, cut: in units of 2**-23 of the power of two
    below the peak.

    Sums of integers are exact, so their order does not matter, and of a subnormal number nothing is
    left: the bytes do not depend on how a machine adds.
    """
    factor = np.float32(2.0**23) / np.uint32(peak & INFINITE).view(np.float32)
    for i in range(stop - start):
        into[i] = np.int32(abs(values[start + i]) * factor)
    total = np.int64(0)
    for i in range(stop - start):
        total += into[i]
    return total


@part
def short_scale(upper: Any, lower: Any, peak: Any, largest: Any) -> Any:
    """``upper / lower`` of those units, rounded to float32 and then to bf16, both nearest even.

    0 below 2**-100.
    """
    unit = np.float64(np.uint32(peak & INFINITE).view(np.float32)) * 2.0**-23
    raw = np.float32(np.float64(upper) / np.float64(lower) * unit).view(np.uint32)
    raw = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    scale = min(np.uint32(raw).view(np.float32), np.float32(largest))
    return scale if scale >= SMALLEST_SCALE else np.float32(0.0)


@part
def write_short_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    out[at], out[at + 1] = (bits >> np.uint32(16)) & np.uint32(0xFF), bits >> np.uint32(24)


@part
def short_block_holds(data: Any, at: int, count: int, bits: int, largest: Any) -> bool:
    """Whether an encoder writes this scale, and these codes behind it: zeros as padding, and after
    a scale of zero."""
    scale = (np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)) << np.uint32(16)
    end = at + 2 + (count * bits + 7) // 8
    if scale == 0:
        filled = np.uint8(0)
        for i in range(at + 2, end):
            filled |= data[i]
        return filled == 0
    return scale_holds(scale, largest) and (
        count * bits % 8 == 0 or data[end - 1] >> (count * bits % 8) == 0
    )
