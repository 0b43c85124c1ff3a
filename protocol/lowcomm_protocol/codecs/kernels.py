"""The compiled loops of the blockwise codecs: one thread, no GIL, no fast math, so the same bits on every machine.

All of them live in this one file on purpose: numba's cache on disk notices a change only of the file that a cached
function stands in, so a kernel that called into another file could run stale code after an upgrade.

A block is 256 values behind one scale, a float32 (in q2 and q1 a bf16) that stands little-endian before the block's
codes. Scales are tested as integers: positive floats order as their bits do, so one comparison refuses NaN, infinity, a
sign and too large a scale. A block whose scale would fall below 2**-100 is coded as zeros, so that no subnormal number
ever enters the arithmetic: a thread that flushes them (torch.set_flush_denormal, CUDA) still writes the same bytes.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector

BLOCK = 256
INT8_BYTES = 4 + BLOCK
E3M0_BYTES = 4 + BLOCK // 2
Q2_BYTES = 2 + BLOCK // 4
Q1_BYTES = 2 + BLOCK // 8

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
SIGN = np.uint32(0x80000000)
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


MODULO_STEPS = np.array(
    [0.0]
    + [np.float32(m) * np.float32(2.0) ** (i - 40) for i in range(64) for m in (1.0, 1.189207, 1.414214, 1.681793)],
    dtype=np.float32,
)[:256]
"""Step of each code: a quarter of an octave apart, from 2**-40 on; code 0 marks a block in bf16."""

BF16_OVERFLOW = np.uint32(0x7F7F8000)
"""Bits of the smallest value that bf16 rounds to infinity."""

MODULO_FAR = np.float32(2.0**22)
"""Lattice points are counted in int32 and must be exact in float32."""


@part
def _modulo_code(wanted: Any) -> Any:
    """The code of the smallest step that is at least ``wanted``; 0 if there is none."""
    low, high = 1, 256
    while low < high:
        middle = (low + high) // 2
        if MODULO_STEPS[middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return low if low < 256 else 0


@part
def _mixed(hash_: Any, value: Any) -> Any:
    """One more lattice point into a block's 64-bit hash."""
    hash_ = (hash_ ^ np.uint64(np.uint32(value))) * np.uint64(0x9E3779B97F4A7C15)
    return hash_ ^ (hash_ >> np.uint64(29))


@part
def _modulo_bytes(code: Any, count: int, bits: int) -> int:
    return 2 * count if code == 0 else (count * bits + 7) // 8


@part
def _bf16_out(value: Any, out: Any, at: int) -> Any:
    """Write a value as bf16, nearest even; the value that it stands for."""
    raw = np.float32(value).view(np.uint32)
    raw = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    out[at], out[at + 1] = (raw >> np.uint32(16)) & np.uint32(0xFF), raw >> np.uint32(24)
    return np.uint32(raw).view(np.float32)


@part
def _bf16_in(data: Any, at: int) -> Any:
    raw = (np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)) << np.uint32(16)
    return np.uint32(raw).view(np.float32)


@kernel
def modulo_encode(values: Vector, wanted: Vector, bits: int, out: Bytes, decoded: Vector, hashes: Any) -> int:
    """Code all blocks with steps of at least ``wanted`` (below 0: none is known); bytes, or -1 - block if not finite.

    ``decoded`` gets what the others will decode, ``hashes`` the hash of each block's lattice points, 0 for bf16.
    """
    patterns = values.view(np.uint32)
    blocks = (values.size + BLOCK - 1) // BLOCK
    mask = np.uint32((1 << bits) - 1)
    at = 4 * blocks
    for block in range(blocks):
        start, stop = block * BLOCK, min(values.size, (block + 1) * BLOCK)
        peak_bits = np.uint32(_peak(patterns, start, stop))
        if peak_bits >= BF16_OVERFLOW:
            return -1 - block
        peak = peak_bits.view(np.float32)
        code = 0
        if wanted[block] >= 0:
            code = _modulo_code(max(wanted[block], peak / MODULO_FAR))
            if MODULO_STEPS[code] > peak * np.float32(2.0 ** (2 - bits)):
                code = 0  # the peers differ by what they are: bf16 stops that from growing
        hash_ = np.uint64(0)
        if code == 0:
            for i in range(start, stop):
                decoded[i] = _bf16_out(values[i], out, at)
                at += 2
        else:
            hash_ = np.uint64(block + 1)
            step = MODULO_STEPS[code]
            waiting, held = np.uint32(0), 0
            for i in range(start, stop):
                point = np.int32(np.floor(values[i] / step + np.float32(0.5)))
                decoded[i] = np.float32(point) * step
                hash_ = _mixed(hash_, point)
                waiting |= (np.uint32(point) & mask) << np.uint32(held)
                held += bits
                while held >= 8:
                    out[at] = np.uint8(waiting & np.uint32(0xFF))
                    at += 1
                    waiting >>= np.uint32(8)
                    held -= 8
            if held > 0:
                out[at] = np.uint8(waiting & np.uint32(0xFF))
                at += 1
        hashes[block] = hash_
        out[4 * block] = code
        for k in range(3):
            out[4 * block + 1 + k] = np.uint8((hash_ >> np.uint64(8 * k)) & np.uint64(0xFF))
    return at


@kernel
def modulo_check(data: Bytes, numel: int, bits: int) -> int:
    """Bytes of the header and all blocks, or -1 if the data is shorter or holds what no encoder writes."""
    blocks = (numel + BLOCK - 1) // BLOCK
    at = 4 * blocks
    if data.size < at:
        return -1
    for block in range(blocks):
        count = min(numel - block * BLOCK, BLOCK)
        size = _modulo_bytes(data[4 * block], count, bits)
        if at + size > data.size:
            return -1
        if data[4 * block] == 0:
            for i in range(at + 1, at + size, 2):
                if (data[i] & 0x7F) == 0x7F and data[i - 1] & 0x80:
                    return -1
            if data[4 * block + 1] | data[4 * block + 2] | data[4 * block + 3]:
                return -1
        elif count * bits % 8 and data[at + size - 1] >> (count * bits % 8):
            return -1
        at += size
    return at


@kernel
def modulo_decode(data: Bytes, own: Vector, bits: int, out: Vector, hashes: Any, bad: Any) -> int:
    """Decode data that `modulo_check` has passed, each block next to ``own``; how many blocks are ``bad``: wrapped."""
    blocks = (own.size + BLOCK - 1) // BLOCK
    size, half = np.int32(1 << bits), np.int32(1 << (bits - 1))
    mask = np.uint32(size - 1)
    at, wrapped = 4 * blocks, 0
    for block in range(blocks):
        start, stop = block * BLOCK, min(own.size, (block + 1) * BLOCK)
        bad[block] = 0
        hashes[block] = np.uint64(0)
        if data[4 * block] == 0:
            for i in range(start, stop):
                out[i] = _bf16_in(data, at)
                at += 2
            continue
        step = MODULO_STEPS[data[4 * block]]
        end = at + _modulo_bytes(data[4 * block], stop - start, bits)
        hash_, waiting, held, far = np.uint64(block + 1), np.uint32(0), 0, False
        for i in range(start, stop):
            while held < bits:
                waiting |= np.uint32(data[at]) << np.uint32(held)
                at += 1
                held += 8
            code = np.int32(waiting & mask)
            waiting >>= np.uint32(bits)
            held -= bits
            place = np.floor(own[i] / step + np.float32(0.5))
            far |= not abs(place) < MODULO_FAR + MODULO_FAR
            near = np.int32(max(-MODULO_FAR - MODULO_FAR, min(MODULO_FAR + MODULO_FAR, place)))
            apart = (code - near) & np.int32(mask)
            if apart >= half:
                apart -= size
            point = near + apart
            out[i] = np.float32(point) * step
            hash_ = _mixed(hash_, point)
        at = end
        hashes[block] = hash_
        sent = np.uint64(0)
        for k in range(3):
            sent |= np.uint64(data[4 * block + 1 + k]) << np.uint64(8 * k)
        if far or (hash_ & np.uint64(0xFFFFFF)) != sent:
            bad[block] = 1
            wrapped += 1
    return wrapped


@kernel
def modulo_total(hashes: Any, bad: Any) -> Any:
    """One 64-bit check over the blocks that are not ``bad``."""
    total = np.uint64(1)
    for block in range(hashes.size):
        if not bad[block]:
            total = (total ^ hashes[block]) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(32)
    return total


@kernel
def modulo_resend(values: Vector, bad: Any, out: Bytes, decoded: Vector) -> int:
    """Write the ``bad`` blocks in bf16, and note in ``decoded`` what the other end has now; bytes."""
    at = 0
    for block in range(bad.size):
        if bad[block]:
            for i in range(block * BLOCK, min(values.size, (block + 1) * BLOCK)):
                decoded[i] = _bf16_out(values[i], out, at)
                at += 2
    return at


@kernel
def modulo_patch(data: Bytes, bad: Any, out: Vector) -> int:
    """Read blocks that were sent again; -1, or the first that is not finite."""
    at = 0
    for block in range(bad.size):
        if bad[block]:
            for i in range(block * BLOCK, min(out.size, (block + 1) * BLOCK)):
                if (data[at + 1] & 0x7F) == 0x7F and data[at] & 0x80:
                    return block
                out[i] = _bf16_in(data, at)
                at += 2
    return -1


@kernel
def modulo_ranges(own: Vector, theirs: Vector, decay: Any, ranges: Vector) -> None:
    """Move each block's range to what was seen now, or slowly down to it."""
    for block in range(ranges.size):
        seen = np.float32(0.0)
        for i in range(block * BLOCK, min(own.size, (block + 1) * BLOCK)):
            seen = max(seen, abs(own[i] - theirs[i]))
        ranges[block] = max(seen, ranges[block] * np.float32(decay), np.float32(2.0**-60))


Q1_LARGEST_SCALE = np.float32(255.0 * 2.0**120)
"""The largest bf16."""

Q2_LARGEST_SCALE = np.float32(146.0 * 2.0**119)
"""The largest bf16 of which 3.5 times is finite in float32."""

Q2_ROUNDS = 3
"""Rounds that fit a scale to the values; a fourth would lower the error by about 1 %."""


@part
def _integers(values: Vector, start: int, stop: int, peak: Any, into: Any) -> Any:
    """Magnitudes of a block as integers below 2**24, cut: in units of 2**-23 of the power of two below the peak.

    Sums of integers are exact, so their order does not matter, and of a subnormal number nothing is left: the bytes do
    not depend on how a machine adds.
    """
    factor = np.float32(2.0**23) / np.uint32(peak & INFINITE).view(np.float32)
    for i in range(stop - start):
        into[i] = np.int32(abs(values[start + i]) * factor)
    total = np.int64(0)
    for i in range(stop - start):
        total += into[i]
    return total


@part
def _short_scale(upper: Any, lower: Any, peak: Any, largest: Any) -> Any:
    """``upper / lower`` of those units, rounded to float32 and then to bf16, both nearest even; 0 below 2**-100."""
    unit = np.float64(np.uint32(peak & INFINITE).view(np.float32)) * 2.0**-23
    raw = np.float32(np.float64(upper) / np.float64(lower) * unit).view(np.uint32)
    raw = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    scale = min(np.uint32(raw).view(np.float32), np.float32(largest))
    return scale if scale >= SMALLEST_SCALE else np.float32(0.0)


@part
def _write_short_scale(out: Any, at: int, scale: Any) -> None:
    bits = np.float32(scale).view(np.uint32)
    out[at], out[at + 1] = (bits >> np.uint32(16)) & np.uint32(0xFF), bits >> np.uint32(24)


@part
def _short_block_holds(data: Any, at: int, count: int, bits: int, largest: Any) -> bool:
    """Whether an encoder writes this scale, and these codes behind it: zeros as padding, and after a scale of zero."""
    scale = (np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)) << np.uint32(16)
    end = at + 2 + (count * bits + 7) // 8
    if scale == 0:
        filled = np.uint8(0)
        for i in range(at + 2, end):
            filled |= data[i]
        return filled == 0
    return _scale_holds(scale, largest) and (count * bits % 8 == 0 or data[end - 1] >> (count * bits % 8) == 0)


@kernel
def q1_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits, integers = values.view(np.uint32), np.empty(BLOCK, dtype=np.int32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * Q1_BYTES
        peak = np.uint32(_peak(bits, start, stop))
        if peak >= INFINITE:
            return block
        count = stop - start
        codes = out[at + 2 : at + 2 + (count + 7) // 8]
        codes[:] = 0
        scale = np.float32(0.0)
        if peak >= SMALLEST_SCALE_BITS:
            total = _integers(values, start, stop, peak, integers)
            scale = _short_scale(total, count, peak, Q1_LARGEST_SCALE)
        _write_short_scale(out, at, scale)
        if scale == 0:
            continue
        for i in range(count // 8):
            code = np.uint8(0)
            for k in range(8):
                code |= np.uint8(bits[start + 8 * i + k] > SIGN) << np.uint8(k)
            codes[i] = code
        for i in range(count // 8 * 8, count):
            codes[i // 8] |= np.uint8(bits[start + i] > SIGN) << np.uint8(i % 8)
    return -1


@kernel
def q1_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        if not _short_block_holds(data, block * Q1_BYTES, min(numel - block * BLOCK, BLOCK), 1, Q1_LARGEST_SCALE):
            return block
    return -1


@kernel
def q1_decode(data: Bytes, out: Vector) -> None:
    """Decode data that `q1_check` has passed."""
    bits = out.view(np.uint32)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * Q1_BYTES
        scale = np.float32(_bf16_in(data, at)).view(np.uint32)
        for i in range((stop - start) // 8):
            byte = np.uint32(data[at + 2 + i])
            for k in range(8):
                bits[start + 8 * i + k] = scale | (byte >> np.uint32(k) & np.uint32(1)) << np.uint32(31)
        for i in range((stop - start) // 8 * 8, stop - start):
            byte = np.uint32(data[at + 2 + i // 8])
            bits[start + i] = scale | (byte >> np.uint32(i % 8) & np.uint32(1)) << np.uint32(31)


@part
def _fitted(integers: Any, count: int, total: Any, peak: Any) -> Any:
    """Scale of the levels 1 and 3.5: at first the values above the mean take the outer level, then the nearest does.

    Each round takes the scale of least squares for these levels, ``sum(value * level) / sum(level**2)``.
    """
    threshold, upper, lower = total // count, total, np.int64(count)
    for _ in range(Q2_ROUNDS):
        outer, outside = np.int32(0), np.int64(0)
        for i in range(count):
            far = integers[i] > threshold
            outer += np.int32(far)
            outside += integers[i] if far else np.int32(0)
        # both sums 4 times: 4 * (inside + 3.5 * outside) over 4 * (inner + 12.25 * outer), so that all stays whole
        upper, lower = 4 * total + 10 * outside, np.int64(4 * count + 45 * outer)
        threshold = 9 * upper // (4 * lower)
    return _short_scale(upper, lower, peak, Q2_LARGEST_SCALE)


@part
def _q2_edge(scale: Any) -> Any:
    """Bits of the middle between both levels."""
    return np.float32(scale * np.float32(2.25)).view(np.uint32)


@part
def _two_bits(bits: Any, edge: Any) -> Any:
    """Bit 0: the magnitude reaches ``edge``, both as the bits of a float. Bit 1: negative, which zero is not."""
    return np.uint8((bits & MAGNITUDE) >= edge) | np.uint8(bits > SIGN) << np.uint8(1)


@kernel
def q2_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits, integers = values.view(np.uint32), np.empty(BLOCK, dtype=np.int32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * Q2_BYTES
        peak = np.uint32(_peak(bits, start, stop))
        if peak >= INFINITE:
            return block
        count = stop - start
        codes = out[at + 2 : at + 2 + (count + 3) // 4]
        codes[:] = 0
        scale, least = np.float32(0.0), INFINITE
        if peak >= SMALLEST_SCALE_BITS:
            total = _integers(values, start, stop, peak, integers)
            scale = _fitted(integers, count, total, peak)
            for i in range(start, stop):
                least = min(least, bits[i] & MAGNITUDE)
            if least >= _q2_edge(scale):  # all would be outer: the inner level holds them as well, and codes them again
                scale = _short_scale(total, count, peak, Q2_LARGEST_SCALE)
        _write_short_scale(out, at, scale)
        if scale == 0:
            continue
        edge = _q2_edge(scale)
        for i in range(count // 4):
            code = np.uint8(0)
            for k in range(4):
                code |= _two_bits(bits[start + 4 * i + k], edge) << np.uint8(2 * k)
            codes[i] = code
        for i in range(count // 4 * 4, count):
            codes[i // 4] |= _two_bits(bits[start + i], edge) << np.uint8(2 * (i % 4))
    return -1


@kernel
def q2_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        if not _short_block_holds(data, block * Q2_BYTES, min(numel - block * BLOCK, BLOCK), 2, Q2_LARGEST_SCALE):
            return block
    return -1


@kernel
def q2_decode(data: Bytes, out: Vector) -> None:
    """Decode data that `q2_check` has passed."""
    levels = np.empty(4, dtype=np.float32)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * Q2_BYTES
        scale = np.float32(_bf16_in(data, at))
        levels[0], levels[1] = scale, scale * np.float32(3.5)
        levels[2], levels[3] = -levels[0], -levels[1]
        for i in range((stop - start) // 4):
            byte = data[at + 2 + i]
            for k in range(4):
                out[start + 4 * i + k] = levels[byte >> np.uint8(2 * k) & np.uint8(3)]
        for i in range((stop - start) // 4 * 4, stop - start):
            out[start + i] = levels[data[at + 2 + i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)]


RESIDUAL_LIMIT = np.float32(16.0)
"""How many times the largest value of a block a residual may grow to."""

LARGEST_WANTED = np.float32(2.0**127)
"""No codec refuses a value up to here."""

LARGEST_RESIDUAL = np.float32(2.0**126)


@kernel
def residual_add(vector: Vector, residual: Vector) -> None:
    """Add the residual in place; a value that would grow too large to code, or is not finite, stays as it is."""
    for i in range(vector.size):
        total = vector[i] + residual[i]
        if abs(total) <= LARGEST_WANTED:
            vector[i] = total


@kernel
def residual_keep(wanted: Vector, sent: Vector, residual: Vector, error: Vector) -> None:
    """``error`` gets wanted - sent within the block's limit, and 0 where that is not finite.

    The limit comes from the values as they were without the residual, but is never below what the residual has reached:
    values that become small do not cut what is still owed.
    """
    for start in range(0, wanted.size, BLOCK):
        stop = min(wanted.size, start + BLOCK)
        largest, reached = np.float32(0.0), np.float32(0.0)
        for i in range(start, stop):
            largest = max(largest, abs(wanted[i] - residual[i]))
            reached = max(reached, abs(residual[i]))
        limit = max(largest * RESIDUAL_LIMIT, reached)
        if not limit <= LARGEST_RESIDUAL:  # "not <=" catches NaN too
            limit = LARGEST_RESIDUAL
        for i in range(start, stop):
            apart = wanted[i] - sent[i]
            if not abs(apart) < np.float32(np.inf):
                apart = np.float32(0.0)
            error[i] = max(-limit, min(limit, apart))
