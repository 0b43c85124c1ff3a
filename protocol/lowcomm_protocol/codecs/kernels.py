"""The compiled loops of the blockwise codecs: one thread, no GIL, no fast math, so the same bits on every machine.

All of them live in this one file on purpose: numba's cache on disk notices a change only of the file that a cached
function stands in, so a kernel that called into another file could run stale code after an upgrade.

A block is 256 values behind one scale, a float32 that stands little-endian before the block's codes. Scales are tested
as integers: positive floats order as their bits do, so one comparison refuses NaN, infinity, a sign and too large a
scale. A block whose scale would fall below 2**-100 is coded as zeros, so that no subnormal number ever enters the
arithmetic: a thread that flushes them (torch.set_flush_denormal, CUDA) still writes the same bytes.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector

BLOCK = 256
INT8_BYTES = 4 + BLOCK
E3M0_BYTES = 4 + BLOCK // 2

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
SMALLEST_SCALE = np.float32(2.0**-100)
SMALLEST_SCALE_BITS = np.uint32((127 - 100) << 23)

INT8_LARGEST_SCALE = np.float32(66052.0 * 2.0**105)
"""The largest float32 divided by 127, rounded to 17 significant bits: 127 times it is finite."""

INT8_SCALE_HALF, INT8_SCALE_KEPT = np.uint32(0x40), np.uint32(0xFFFFFF80)
"""Rounds a scale to 17 significant bits: 7 bits of code times 17 bits of scale fit float32, so decoding is exact."""

E3M0_LARGEST_SCALE = np.float32((2.0 - 2.0**-23) * 2.0**123)
"""The largest float32 divided by 16."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit = cast("Callable[..., Callable[[Any], Any]]", numba.njit)  # numba does not say what its decorators return


def part(function: _Function) -> _Function:
    """A function that kernels call: compiled into them."""
    return _njit(nogil=True)(function)


def kernel(function: _Function) -> _Function:
    """Compile at the first call, and keep the result on disk where that works.

    numba looks for a writable folder at import and raises where there is none (a package and a home that are
    read-only), and it raises at the first call when the disk is full or a cache file is damaged. None of these may
    stop a peer: it compiles in memory then. Kernels themselves raise nothing.
    """
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
def _peak(bits: Any, start: int, stop: int) -> Any:
    """Bits of the largest magnitude in [start, stop); integers, because a maximum of those is vectorized."""
    largest = np.uint32(0)
    for i in range(start, stop):
        largest = max(largest, bits[i] & MAGNITUDE)
    return largest


@part
def _write_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    for k in range(4):
        out[at + k] = (bits >> np.uint32(8 * k)) & np.uint32(0xFF)


@part
def _scale_bits(data: Any, at: int) -> Any:
    bits = np.uint32(0)
    for k in range(4):
        bits |= np.uint32(data[at + k]) << np.uint32(8 * k)
    return bits


@part
def _scale_holds(bits: Any, largest: Any) -> bool:
    return bits == 0 or SMALLEST_SCALE_BITS <= bits <= np.float32(largest).view(np.uint32)


@kernel
def int8_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits = values.view(np.uint32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * INT8_BYTES
        peak = np.uint32(_peak(bits, start, stop))
        if peak >= INFINITE:
            return block
        scale = np.float32(peak.view(np.float32) / np.float32(127.0))
        scale = np.uint32((scale.view(np.uint32) + INT8_SCALE_HALF) & INT8_SCALE_KEPT).view(np.float32)
        if scale < SMALLEST_SCALE:
            out[at : at + 4 + stop - start] = 0
            continue
        _write_scale(out, at, scale)
        codes = out[at + 4 : at + 4 + stop - start]
        for i in range(codes.size):
            code = np.int32(np.rint(values[start + i] / scale))
            codes[i] = np.uint8(max(np.int32(-127), min(np.int32(127), code)))
    return -1


@kernel
def int8_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block with a scale or a code that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        at, count = block * INT8_BYTES, min(numel - block * BLOCK, BLOCK)
        if not _scale_holds(_scale_bits(data, at), INT8_LARGEST_SCALE):
            return block
        bad = np.uint8(0)
        for i in range(at + 4, at + 4 + count):
            bad |= np.uint8(data[i] == 0x80)
        if bad:
            return block
    return -1


@kernel
def int8_decode(data: Bytes, out: Vector) -> None:
    """Decode data that `int8_check` has passed."""
    for block in range((out.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * INT8_BYTES
        scale = np.uint32(_scale_bits(data, at)).view(np.float32)
        codes = data[at + 4 : at + 4 + stop - start]
        for i in range(codes.size):
            out[start + i] = np.float32(np.int8(codes[i])) * scale


@part
def _nibble(value: Any, scale: Any) -> Any:
    """Sign and exponent code of one value: the nearest magnitude, a tie goes to the larger one, zero has no sign."""
    bits = np.float32(value / scale).view(np.uint32)
    ratio = np.int32(bits & MAGNITUDE)
    # adding half a mantissa carries into the exponent from 1.5 * 2**k on, the middle between 2**k and 2**(k + 1)
    code = ((ratio + np.int32(0x00400000)) >> np.int32(23)) - np.int32(124)
    nonzero = ratio >= np.int32(0x3E000000)  # 0.125, the middle between 0 and .25, lies below that pattern
    code = min(np.int32(7), max(code, np.int32(nonzero)))
    return np.uint8(code | (np.int32(nonzero) & np.int32(bits >> np.uint32(31))) << np.int32(3))


@kernel
def e3m0_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits = values.view(np.uint32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * E3M0_BYTES
        peak = np.uint32(_peak(bits, start, stop))
        if peak >= INFINITE:
            return block
        scale = np.float32(peak.view(np.float32) / np.float32(16.0))
        codes = out[at + 4 : at + 4 + (stop - start + 1) // 2]
        if scale < SMALLEST_SCALE:
            out[at : at + 4 + codes.size] = 0
            continue
        _write_scale(out, at, scale)
        pairs = (stop - start) // 2
        for i in range(pairs):
            low, high = _nibble(values[start + 2 * i], scale), _nibble(values[start + 2 * i + 1], scale)
            codes[i] = low | high << np.uint8(4)
        if pairs < codes.size:
            codes[pairs] = _nibble(values[stop - 1], scale)
    return -1


@kernel
def e3m0_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block with a scale or a nibble that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        at, count = block * E3M0_BYTES, min(numel - block * BLOCK, BLOCK)
        if not _scale_holds(_scale_bits(data, at), E3M0_LARGEST_SCALE):
            return block
        bad = np.uint8(0)
        for i in range(at + 4, at + 4 + (count + 1) // 2):
            bad |= np.uint8((data[i] & 0x0F) == 0x08) | np.uint8((data[i] & 0xF0) == 0x80)
        if bad or (count % 2 and data[at + 4 + count // 2] > 0x0F):
            return block
    return -1


@kernel
def e3m0_decode(data: Bytes, out: Vector) -> None:
    """Decode data that `e3m0_check` has passed."""
    levels = np.zeros(16, dtype=np.float32)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * E3M0_BYTES
        scale = np.uint32(_scale_bits(data, at)).view(np.float32)
        for code in range(1, 8):
            levels[code] = scale * np.float32(2.0 ** (code - 3))
            levels[code + 8] = -levels[code]
        for i in range((stop - start) // 2):
            byte = data[at + 4 + i]
            out[start + 2 * i] = levels[byte & 0x0F]
            out[start + 2 * i + 1] = levels[byte >> 4]
        if (stop - start) % 2:
            out[stop - 1] = levels[data[at + 4 + (stop - start) // 2] & 0x0F]
