"""How the loops of codecs are compiled, and the parts that several of them share.

One thread, no GIL, no fast math: the same bits on every machine.

A block is 256 values behind one scale, a float32 (in q2 a bf16) that stands little-endian
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
from lowcomm_protocol.spec.names import BLOCK

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
SIGN = np.uint32(0x80000000)
SMALLEST_SCALE = np.float32(2.0**-100)
SMALLEST_SCALE_BITS = np.uint32((127 - 100) << 23)

LARGEST_WANTED = np.float32(2.0**127)
"""No codec refuses a value up to here, with its residual added."""
RESIDUAL_LIMIT = np.float32(16.0)
"""How many times the largest value of a block a residual may grow to."""
LARGEST_RESIDUAL = np.float32(2.0**126)

_NEAREST = np.float32(1.5 * 2.0**23)
_NEAREST_BITS = np.int32(_NEAREST.view(np.int32))

SHARED = sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:12]
"""Names this version of this file."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit = cast(
    "Callable[..., Callable[[Any], Any]]", numba.njit
)  # numba does not say what its decorators return
_kept: list[Any] = []
"""Kernels that look for their code on the disk."""
_in_memory: list[Any] = []
"""The same kernels as they are compiled where nothing can be kept."""


def part(function: _Function) -> _Function:
    """A function that kernels call: compiled into them."""
    return _njit(nogil=True)(function)


def _loop_of(code: Any) -> Callable[[_Function], _Function]:
    """A `part` that is made for the codec of ``code``.

    numba names compiled code by its qualified name and a number that begins anew in every process.
    Loops that one function makes for several codecs have one qualified name, so two of them that
    were cached by two processes may bear one name, and the second would run the first one's code.
    """

    def rename(function: _Function) -> _Function:
        function.__qualname__ = f"{function.__qualname__}_{code.__name__.strip('_')}"
        return part(function)

    return rename


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
        _in_memory.append(in_memory)
        return in_memory
    _kept.append(cached)
    _in_memory.append(in_memory)
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


def compiled_here() -> int:
    """How often this process has compiled a kernel, as none was found on the disk."""
    missed = sum(sum(one.stats.cache_misses.values()) for one in _kept)
    return missed + sum(len(one.signatures) for one in _in_memory)


def kept_in() -> str | None:
    """The folder with what was compiled; None where nothing can be kept."""
    return _kept[0].stats.cache_path if _kept else None


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
def block_peak(bits: Any) -> Any:
    """Bits of the largest magnitude in a block, whose 256 values are known to be there."""
    largest = np.uint32(0)
    for i in range(np.uint64(BLOCK)):
        largest = np.uint32(max(largest, np.uint32(bits[i] & MAGNITUDE)))
    return largest


@part
def nearest(value: Any) -> Any:
    """The nearest integer, ties to even, of a float32 within 2**22: added to a number whose last
    bit stands for 1, it is rounded to it."""
    return np.float32(np.float32(value) + _NEAREST).view(np.int32) - _NEAREST_BITS


def encoder(code: Any, size: int) -> Any:
    """A loop that codes blocks of 256 values into ``size`` bytes each: ``(values, count, out)``;
    -1, or the first that holds NaN or infinity.

    The last block of a vector, if it is shorter, comes alone, with zeros behind its ``count``
    values.
    """

    @_loop_of(code)
    def encode(values: Any, count: int, out: Any) -> Any:
        block, codes = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.uint8)
        integers = np.empty(BLOCK, dtype=np.int32)
        for number in range(np.uint64(values.size // BLOCK)):
            start = number * np.uint64(BLOCK)
            for i in range(np.uint64(BLOCK)):
                block[i] = values[start + i]
            if not code(block, count, integers, codes, out, number * np.uint64(size)):
                return np.int64(number)
        return np.int64(-1)

    return encode


def sender(code: Any, restore: Any, size: int, sent: Any = None) -> Any:
    """A loop that codes ``vector + residual`` as `encoder` does: ``(vector, residual, error, count,
    out)``.

    ``vector`` becomes what the others decode and ``error`` what that lost (`shards.Residual`).
    Without feedback both are empty. All is done block by block, while that is in the cache.
    ``sent`` gives what ``restore`` does, faster, from the values of the block and its coded scale.
    """

    @_loop_of(code)
    def taken_apart(block: Any, data: Any, at: Any, out: Any, start: Any) -> None:
        restore(data, at, out, start)

    keep = sent or taken_apart

    @_loop_of(code)
    def send(vector: Any, residual: Any, error: Any, count: int, out: Any) -> Any:
        block, codes = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.uint8)
        integers = np.empty(BLOCK, dtype=np.int32)
        for number in range(np.uint64(vector.size // BLOCK)):
            start, at = number * np.uint64(BLOCK), number * np.uint64(size)
            if residual.size:
                for i in range(np.uint64(BLOCK)):
                    block[i] = wanted_of(vector[start + i], residual[start + i])
            else:
                for i in range(np.uint64(BLOCK)):
                    block[i] = vector[start + i]
            if not code(block, count, integers, codes, out, at):
                return np.int64(number)
            keep(block, out, at, vector, start)
            if residual.size:
                limit = residual_limit(block, residual[start : start + np.uint64(BLOCK)])
                for i in range(np.uint64(BLOCK)):
                    error[start + i] = error_of(block[i], vector[start + i], limit)
        return np.int64(-1)

    return send


def checker(holds: Any, size: int) -> Any:
    """A loop over coded blocks: -1, or the first that no encoder writes."""

    @_loop_of(holds)
    def check(data: Any) -> Any:
        for number in range(np.uint64(data.size // size)):
            if not holds(data, number * np.uint64(size)):
                return np.int64(number)
        return np.int64(-1)

    return check


def decoder(restore: Any, size: int) -> Any:
    """A loop that decodes blocks that were checked: ``(data, out)``."""

    @_loop_of(restore)
    def decode(data: Any, out: Any) -> None:
        for number in range(np.uint64(data.size // size)):
            restore(data, number * np.uint64(size), out, number * np.uint64(BLOCK))

    return decode


@part
def wanted_of(value: Any, residual: Any) -> Any:
    """The sum, or the value alone where that would be too large to code or is not finite."""
    total = np.float32(value + residual)
    return total if abs(total) <= LARGEST_WANTED else value


@part
def residual_limit(wanted: Vector, residual: Vector) -> Any:
    """Largest residual of a block."""
    largest, reached = np.uint32(0), np.uint32(0)
    for i in range(np.uint64(wanted.size)):
        given, kept = np.float32(wanted[i] - residual[i]), np.float32(residual[i])
        largest = np.uint32(max(largest, np.uint32(given.view(np.uint32) & MAGNITUDE)))
        reached = np.uint32(max(reached, np.uint32(kept.view(np.uint32) & MAGNITUDE)))
    most = np.float32(np.uint32(largest).view(np.float32) * RESIDUAL_LIMIT)
    limit = max(most, np.uint32(reached).view(np.float32))
    return limit if limit <= LARGEST_RESIDUAL else LARGEST_RESIDUAL  # "<=" is false for NaN too


@part
def error_of(wanted: Any, sent: Any, limit: Any) -> Any:
    """What coding has lost, within the limit; 0 where that is not finite."""
    apart = np.float32(wanted - sent)
    if not abs(apart) < np.float32(np.inf):
        apart = np.float32(0.0)
    return max(-limit, min(limit, apart))


@part
def write_scale(out: Any, at: Any, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    for k in range(np.uint64(4)):
        out[at + k] = np.uint8(bits >> np.uint32(np.uint64(8) * k))


@part
def scale_bits(data: Any, at: Any) -> Any:
    bits = np.uint32(0)
    for k in range(np.uint64(4)):
        bits |= np.uint32(data[at + k]) << np.uint32(np.uint64(8) * k)
    return bits


@part
def scale_holds(bits: Any, largest: Any) -> bool:
    return bits == 0 or SMALLEST_SCALE_BITS <= bits <= np.float32(largest).view(np.uint32)


@part
def bf16_of(value: Any) -> Any:
    """The value of bf16 that is nearest, of two the even one."""
    raw = np.float32(value).view(np.uint32)
    raw = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.uint32(raw).view(np.float32)


@part
def bf16_out(value: Any, out: Any, at: Any) -> Any:
    """Write a value as bf16; the value that it stands for."""
    rounded = bf16_of(value)
    raw = np.float32(rounded).view(np.uint32)
    out[at], out[at + 1] = (raw >> np.uint32(16)) & np.uint32(0xFF), raw >> np.uint32(24)
    return rounded


@part
def bf16_in(data: Any, at: Any) -> Any:
    raw = (np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)) << np.uint32(16)
    return np.uint32(raw).view(np.float32)


@part
def integers_of(values: Vector, peak: Any, into: Any) -> Any:
    """Magnitudes of a block as integers below 2**24, cut: in units of 2**-23 of the power of two
    below the peak.

    Sums of integers are exact, so their order does not matter, and of a subnormal number nothing is
    left: the bytes do not depend on how a machine adds. 256 of them are below 2**32.
    """
    factor = np.float32(2.0**23) / np.uint32(peak & INFINITE).view(np.float32)
    for i in range(np.uint64(BLOCK)):
        into[i] = np.int32(abs(values[i]) * factor)
    total = np.uint32(0)
    for i in range(np.uint64(BLOCK)):
        total = np.uint32(total + np.uint32(into[i]))
    return np.int64(total)


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
def write_short_scale(out: Any, at: Any, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    out[at] = np.uint8(bits >> np.uint32(16))
    out[at + np.uint64(1)] = np.uint8(bits >> np.uint32(24))


@part
def short_scale_bits(data: Any, at: Any) -> Any:
    low, high = np.uint32(data[at]), np.uint32(data[at + np.uint64(1)])
    return (low | high << np.uint32(8)) << np.uint32(16)


@part
def short_block_holds(data: Any, at: Any, size: int, largest: Any) -> Any:
    """Whether an encoder writes a block of ``size`` bytes with this scale: zeros after a scale of
    zero."""
    scale = short_scale_bits(data, at)
    if scale:
        return scale_holds(scale, largest)
    filled = np.uint8(0)
    for i in range(np.uint64(2), np.uint64(size)):
        filled |= data[at + i]
    return filled == 0
