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
from dataclasses import dataclass
from hashlib import sha256
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.spec.names import BLOCK

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
SIGN = np.uint32(0x80000000)
BF16_OVERFLOW = np.uint32(0x7F7F8000)
"""Bits of the smallest value that bf16 rounds to infinity."""
SMALLEST_SCALE = np.float32(2.0**-100)
SMALLEST_SCALE_BITS = np.uint32((127 - 100) << 23)

_NEAREST = np.float32(1.5 * 2.0**23)
_NEAREST_BITS = np.int32(_NEAREST.view(np.int32))


def _version_of(module: str) -> str:
    """Name of this version of a module's source."""
    return sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:12]


SHARED = _version_of(__name__)

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


def kernel(function: _Function) -> _Function:
    """Compile at the first call, and keep the result on disk where that works.

    numba raises where no folder is writable, the disk is full or a cache file is damaged. None of
    these may stop a peer: it compiles in memory then. Kernels raise nothing.
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
def peak_of(bits: Any, start: Any, stop: Any) -> Any:
    """Bits of the largest magnitude in [start, stop): integers are vectorized."""
    largest = np.uint32(0)
    for i in range(start, stop):
        largest = np.uint32(max(largest, np.uint32(bits[i] & MAGNITUDE)))
    return largest


@part
def nearest(value: Any) -> Any:
    """The nearest integer, ties to even, of a float32 within 2**22."""
    return np.float32(np.float32(value) + _NEAREST).view(np.int32) - _NEAREST_BITS


@dataclass(frozen=True)
class Kernels:
    """The loops of a codec for one kind of device; others must write the same bytes.

    Each takes whole blocks. All but ``decode`` return -1, or the first block that is refused.
    ``count`` is 256, or the values of a last block that comes alone, with zeros behind them.
    """

    send: Callable[[Any, int, Any], int]
    """``(vector, count, out)``: codes ``vector``, which becomes what others decode."""
    check: Callable[[Any], int]
    """``(data)``"""
    decode: Callable[[Any, Any], None]
    """``(data, out)``, where the data was checked."""


def loops(code: Any, holds: Any, restore: Any, size: int) -> Kernels:
    """The loops of a codec of ``size`` bytes a block, from parts for one block.

    ``code(block, peak, count, integers, codes, out, at)``: False where its scale is too small to
    write. ``holds(data, at)``, ``restore(data, at, out, start)``.
    """
    # The parts are globals of copies of the functions below: numba finds no closure in its cache.
    # Each copy has a name of its own. numba names compiled code by the qualified name and a number
    # that begins anew in every process: two that were cached by two processes could bear one name,
    # and the second would run the first one's code.
    name = f"{code.__name__.strip('_')}_{_version_of(code.__module__)}"
    parts: dict[str, Any] = {"_SIZE": size, "_CODE": code, "_HOLDS": holds, "_RESTORE": restore}

    def copied(function: Callable[..., Any]) -> Any:
        named = cast("FunctionType", function)
        copy = FunctionType(named.__code__, globals() | parts, named.__name__)
        copy.__qualname__ = f"{named.__name__.strip('_')}_{name}"
        return copy

    return Kernels(*(kernel(copied(loop)) for loop in (_send, _check, _decode)))


_SIZE: int = 0
_CODE: Any = None
_HOLDS: Any = None
_RESTORE: Any = None


def _send(vector: Any, count: int, out: Any) -> Any:
    block, codes = np.empty(BLOCK, dtype=np.float32), np.empty(BLOCK, dtype=np.uint8)
    integers = np.empty(BLOCK, dtype=np.int32)
    for number in range(np.uint64(vector.size // BLOCK)):
        start, at = number * np.uint64(BLOCK), number * np.uint64(_SIZE)
        for i in range(np.uint64(BLOCK)):
            block[i] = vector[start + i]
        peak = np.uint32(peak_of(block.view(np.uint32), np.uint64(0), np.uint64(BLOCK)))
        if peak >= INFINITE:
            return np.int64(number)
        if not _CODE(block, peak, count, integers, codes, out, at):
            for i in range(np.uint64(_SIZE)):
                out[at + i] = np.uint8(0)
        _RESTORE(out, at, vector, start)
    return np.int64(-1)


def _check(data: Any) -> Any:
    for number in range(np.uint64(data.size // _SIZE)):
        if not _HOLDS(data, number * np.uint64(_SIZE)):
            return np.int64(number)
    return np.int64(-1)


def _decode(data: Any, out: Any) -> None:
    for number in range(np.uint64(data.size // _SIZE)):
        _RESTORE(data, number * np.uint64(_SIZE), out, number * np.uint64(BLOCK))


@part
def write_scale(out: Any, at: Any, scale: Any, skipped: int) -> None:
    """Write the upper ``4 - skipped`` bytes of a float32: 2 are skipped of bf16."""
    bits = np.float32(scale).view(np.uint32)
    for k in range(np.uint64(skipped), np.uint64(4)):
        out[np.uint64(at) + k - np.uint64(skipped)] = np.uint8(bits >> np.uint32(np.uint64(8) * k))


@part
def scale_bits(data: Any, at: Any, skipped: int) -> Any:
    """Bits of what `write_scale` has written."""
    bits = np.uint32(0)
    for k in range(np.uint64(skipped), np.uint64(4)):
        byte = np.uint32(data[np.uint64(at) + k - np.uint64(skipped)])
        bits |= byte << np.uint32(np.uint64(8) * k)
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
    write_scale(out, at, rounded, 2)
    return rounded


@part
def bf16_in(data: Any, at: Any) -> Any:
    return np.uint32(scale_bits(data, at, 2)).view(np.float32)


@part
def integers_of(values: Vector, peak: Any, into: Any) -> Any:
    """Magnitudes of a block as integers below 2**24, in units of 2**-23 of the power of two
    below the peak. Sums of integers are exact, so their order does not matter."""
    factor = np.float32(2.0**23) / np.uint32(peak & INFINITE).view(np.float32)
    for i in range(np.uint64(BLOCK)):
        into[i] = np.int32(abs(values[i]) * factor)
    total = np.uint32(0)
    for i in range(np.uint64(BLOCK)):
        total = np.uint32(total + np.uint32(into[i]))
    return np.int64(total)


@part
def short_scale(upper: Any, lower: Any, peak: Any, largest: Any) -> Any:
    """``upper / lower`` of those units as float32, then bf16, nearest even; 0 below 2**-100."""
    unit = np.float64(np.uint32(peak & INFINITE).view(np.float32)) * 2.0**-23
    rounded = bf16_of(np.float32(np.float64(upper) / np.float64(lower) * unit))
    scale = min(rounded, np.float32(largest))
    return scale if scale >= SMALLEST_SCALE else np.float32(0.0)


@part
def short_block_holds(data: Any, at: Any, size: int, largest: Any) -> Any:
    """Whether an encoder writes a block with this scale: zeros after a scale of zero."""
    scale = scale_bits(data, at, 2)
    if scale:
        return scale_holds(scale, largest)
    filled = np.uint8(0)
    for i in range(np.uint64(2), np.uint64(size)):
        filled |= data[at + i]
    return filled == 0
