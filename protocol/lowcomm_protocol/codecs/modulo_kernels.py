"""The compiled loops of the modulo codecs (modulo.py).

Apart from it, so that the fuzzer can instrument that file.

Loops over a block have 256 turns, one statement of arithmetic for all values and indices without a
sign: LLVM vectorizes them then (it does not where an index might count from the end). A vector's
last block, if it is shorter, counts as 256 values with zeros behind it. Sums of hashes are sums of
integers, so any width of vectors gives the same bits.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.codecs.kernels import (
    BF16_OVERFLOW,
    MAGNITUDE,
    bf16_in,
    bf16_out,
    kernel,
    nearest,
    part,
    peak_of,
)
from lowcomm_protocol.spec.names import BLOCK

HEADER = 4
"""Bytes before each block."""

_QUARTERS = np.array([1.0, 1.189207, 1.414214, 1.681793], dtype=np.float32)
MANTISSAS = _QUARTERS.view(np.uint32) & np.uint32(0x007FFFFF)

MODULO_STEPS = np.array(
    [0.0] + [m * np.float32(2.0) ** (i - 40) for i in range(64) for m in _QUARTERS],
    dtype=np.float32,
)[:256]
"""Step of each code: a quarter of an octave apart, from 2**-40 on; code 0 marks a block in bf16."""

INVERSES = np.append(np.float32(0.0), np.float32(1.0) / MODULO_STEPS[1:])

MODULO_FAR = np.float32(2.0**21)
"""The largest value that is coded, in steps."""

_TOO_FAR = np.float32(2.0**22).view(np.uint32)
"""Bits of the number of steps from which on `nearest` does not hold."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_ROWS = np.uint64(8)
_GROUPS = np.array([0, 0, 4, 8, 2, 0, 4, 0, 1], dtype=np.uint64)
"""By bits a value: how many fill whole bytes together."""


def _keys() -> Any:
    """Numbers from 2**30 to 3 * 2**30, one for each place in a block."""
    mixed = np.arange(BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B9) & _LOW
    mixed = (mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B) & _LOW
    mixed ^= mixed >> np.uint64(13)
    return (np.uint64(1 << 30) + (mixed >> np.uint64(1))).astype(np.uint32)


KEYS = _keys()
_KEY_PAIRS = KEYS.view(np.uint64)


@part
def _modulo_code(wanted: Any) -> Any:
    """The code of the smallest step that is at least ``wanted``; 0 if there is none."""
    bits = np.int64(np.float32(wanted).view(np.uint32))
    code, mantissa = 4 * ((bits >> 23) - 127 + 40) + 1, bits & 0x007FFFFF
    for quarter in range(4):
        code += mantissa > MANTISSAS[quarter]
    return max(code, 1) if code < 256 else 0


@part
def _hash(pairs: Any, number: Any) -> Any:
    """64 bits over the points of a block, two in each of ``pairs``, and over its number.

    No key is near 0 or 2**32, so no factor is ever 0, and one point that differs changes the sum of
    the products. The second sum sees what cancels in the first.
    """
    products, folded = np.uint64(0), np.uint64(0)
    for j in range(np.uint64(BLOCK // 2)):
        keyed = pairs[j] ^ _KEY_PAIRS[j]
        product = (keyed & _LOW) * (keyed >> np.uint64(32))
        products += product
        folded += product ^ (product >> np.uint64(29))
    return _mixed(_mixed(np.uint64(number), products), folded)


@part
def _mixed(hash_: Any, value: Any) -> Any:
    hash_ = (hash_ ^ value) * _GOLDEN
    return hash_ ^ (hash_ >> np.uint64(29))


@part
def _pack(points: Any, stride: Any, bits: Any, words: Any, out: Any, at: Any) -> None:
    """Write the remainders of 8 rows of ``stride`` points; see modulo.py."""
    group, mask = _GROUPS[bits], np.uint32((1 << bits) - 1)
    row = np.uint64(0)
    while row < _ROWS:
        words[:] = np.uint32(0)
        for k in range(group):
            begin, shift = (row + k) * stride, np.uint32(k * np.uint64(bits))
            for j in range(stride):
                words[j] |= (np.uint32(points[begin + j]) & mask) << shift
        for k in range(group * np.uint64(bits) // np.uint64(8)):
            shift = np.uint32(np.uint64(8) * k)
            for j in range(stride):
                out[at + j] = np.uint8(words[j] >> shift)
            at += stride
        row += group


@part
def _unpack(data: Any, at: Any, stride: Any, bits: Any, words: Any, codes: Any) -> None:
    """Read what `_pack` writes."""
    group, mask = _GROUPS[bits], np.uint32((1 << bits) - 1)
    row = np.uint64(0)
    while row < _ROWS:
        words[:] = np.uint32(0)
        for k in range(group * np.uint64(bits) // np.uint64(8)):
            shift = np.uint32(np.uint64(8) * k)
            for j in range(stride):
                words[j] |= np.uint32(data[at + j]) << shift
            at += stride
        for k in range(group):
            begin, shift = (row + k) * stride, np.uint32(k * np.uint64(bits))
            for j in range(stride):
                codes[begin + j] = np.int32((words[j] >> shift) & mask)
        row += group


@part
def _modulo_bytes(code: Any, count: int, bits: int) -> int:
    return 2 * count if code == 0 else (count + 7) // 8 * bits


@kernel
def modulo_encode(
    vector: Vector, wanted: Vector, bits: int, own: Vector, out: Bytes, hashes: Any, codes: Any
) -> Any:
    """Code all blocks with steps of at least ``wanted`` (below 0: unknown); bytes, or -1 - block if
    one is not finite.

    ``own`` gets a copy of ``vector``, which becomes what others decode; ``hashes`` the hash of each
    block's points, 0 for bf16; ``codes`` its step code.
    """
    points, words = np.empty(BLOCK, dtype=np.int32), np.zeros(BLOCK // 8, dtype=np.uint32)
    values = np.empty(BLOCK, dtype=np.float32)
    at = np.uint64(0)
    for block in range(np.uint64(wanted.size)):
        start = block * np.uint64(BLOCK)
        count = _take_block(vector, start, values)
        for i in range(np.uint64(count)):
            own[start + i] = values[i]
        code = _code_of(values, wanted[block], bits)
        if code < 0:
            return -1 - np.int64(block)
        body, hash_ = at + np.uint64(HEADER), np.uint64(0)
        if code == 0:
            for i in range(np.uint64(count)):
                vector[start + i] = bf16_out(values[i], out, body + np.uint64(2) * i)
        else:
            step, inverse = MODULO_STEPS[code], INVERSES[code]
            for i in range(np.uint64(BLOCK)):
                points[i] = nearest(values[i] * inverse)
            for i in range(np.uint64(count)):
                vector[start + i] = np.float32(points[i]) * step
            hash_ = _hash(points.view(np.uint64), np.int64(block) + 1)
            _pack(points, np.uint64((count + 7) // 8), bits, words, out, body)
        out[at] = code
        for k in range(np.uint64(3)):
            out[at + np.uint64(1) + k] = np.uint8(hash_ >> np.uint64(8) * k)
        codes[block], hashes[block] = code, hash_
        at = body + np.uint64(_modulo_bytes(code, count, bits))
    return np.int64(at)


@part
def _take_block(vector: Vector, start: Any, into: Vector) -> Any:
    """Copy a block, with zeros behind the last value of all; how many values it has."""
    count = min(vector.size - np.int64(start), BLOCK)
    for i in range(np.uint64(count)):
        into[i] = vector[start + i]
    into[count:] = np.float32(0.0)
    return count


@part
def _code_of(values: Vector, wanted: Any, bits: int) -> int:
    """The code of a block's step, 0 for bf16; -1 if a value is not finite."""
    peak_bits = np.uint32(peak_of(values.view(np.uint32), np.uint64(0), np.uint64(BLOCK)))
    if peak_bits >= BF16_OVERFLOW:
        return -1
    if not wanted >= 0:
        return 0
    peak = np.uint32(peak_bits).view(np.float32)
    code = _modulo_code(max(wanted, peak / MODULO_FAR))
    if MODULO_STEPS[code] > peak * np.float32(2.0 ** (2 - bits)):
        return 0  # the peers differ by what they are: bf16 stops that from growing
    return code


@kernel
def modulo_check(data: Bytes, numel: int, bits: int, codes: Any) -> tuple[int, int]:
    """How many blocks of ``numel`` values ``data`` holds whole, and in how many bytes; -1 and
    the block if one holds what no encoder writes. ``codes`` gets their step codes."""
    digits, words = np.zeros(BLOCK, dtype=np.int32), np.zeros(BLOCK // 8, dtype=np.uint32)
    at = 0
    for block in range((numel + BLOCK - 1) // BLOCK):
        count, body = min(numel - block * BLOCK, BLOCK), at + HEADER
        if body > data.size:
            return block, at
        end = body + _modulo_bytes(data[at], count, bits)
        if end > data.size:
            return block, at
        if data[at] == 0:
            if data[at + 1] | data[at + 2] | data[at + 3]:
                return -1, block
            for i in range(body + 1, end, 2):
                if (data[i] & 0x7F) == 0x7F and data[i - 1] & 0x80:
                    return -1, block
        elif count % 8:
            _unpack(data, np.uint64(body), np.uint64((count + 7) // 8), bits, words, digits)
            if digits[count : count + 8 - count % 8].any():
                return -1, block
        codes[block] = data[at]
        at = end
    return (numel + BLOCK - 1) // BLOCK, at


@kernel
def modulo_decode(data: Bytes, own: Vector, bits: int, out: Vector, hashes: Any, bad: Any) -> None:
    """Decode blocks that `modulo_check` has passed, next to ``own``.

    ``bad`` marks the blocks that wrapped.
    """
    points, codes = np.empty(BLOCK, dtype=np.int32), np.zeros(BLOCK, dtype=np.int32)
    values, words = np.empty(BLOCK, dtype=np.float32), np.zeros(BLOCK // 8, dtype=np.uint32)
    half, mask = np.int32(1 << (bits - 1)), np.int32((1 << bits) - 1)
    at = np.uint64(0)
    for block in range(np.uint64(bad.size)):
        start = block * np.uint64(BLOCK)
        count = _take_block(own, start, values)
        body, code = at + np.uint64(HEADER), data[at]
        hash_, sent, far = np.uint64(0), np.uint64(0), np.uint32(0)
        if code == 0:
            for i in range(np.uint64(count)):
                out[start + i] = bf16_in(data, body + np.uint64(2) * i)
        else:
            step, inverse = MODULO_STEPS[code], INVERSES[code]
            _unpack(data, body, np.uint64((count + 7) // 8), bits, words, codes)
            codes[count:] = np.int32(0)  # or the points behind a short block were the last one's
            for i in range(np.uint64(BLOCK)):
                steps = np.float32(values[i] * inverse)
                far = np.uint32(max(far, np.uint32(np.float32(steps).view(np.uint32) & MAGNITUDE)))
                near = nearest(steps)
                points[i] = near + ((codes[i] - near + half) & mask) - half
            for i in range(np.uint64(count)):
                out[start + i] = np.float32(points[i]) * step
            hash_ = _hash(points.view(np.uint64), np.int64(block) + 1)
            for k in range(np.uint64(3)):
                sent |= np.uint64(data[at + np.uint64(1) + k]) << np.uint64(8) * k
            if far >= _TOO_FAR:  # what is kept of such a value is its remainder alone
                for i in range(np.uint64(count)):
                    away = np.float32(values[i] * inverse)
                    if np.uint32(np.float32(away).view(np.uint32) & MAGNITUDE) >= _TOO_FAR:
                        out[start + i] = np.float32(codes[i]) * step
        hashes[block] = hash_
        bad[block] = far >= _TOO_FAR or (hash_ & np.uint64(0xFFFFFF)) != sent
        at = body + np.uint64(_modulo_bytes(code, count, bits))


@kernel
def modulo_total(hashes: Any, bad: Any) -> Any:
    """One 64-bit check over the blocks that are not ``bad``."""
    total = np.uint64(1)
    for block in range(hashes.size):
        if not bad[block]:
            total = (total ^ hashes[block]) * _GOLDEN
            total ^= total >> np.uint64(32)
    return total


@part
def _digits(points: Any, count: int, bits: int) -> int:
    """How many more digits these points need; 0 if bf16 takes no more bytes."""
    for digits in range(1, 2 * count // ((count + 7) // 8 * bits) + 1):
        if digits * ((count + 7) // 8 * bits) < 2 * count and _fit(points, count, bits, digits):
            return digits
    return 0


@part
def _fit(points: Any, count: int, bits: int, digits: int) -> bool:
    """Whether so many digits after the first hold these points."""
    half, wide = np.int64(1) << ((digits + 1) * bits - 1), 0
    for i in range(count):
        wide += points[i] < -half or points[i] >= half
    return wide == 0


@kernel
def modulo_resend(
    own: Vector, codes: Any, bits: int, bad: Any, out: Bytes, decoded: Vector, plain: Any
) -> int:
    """Write the ``bad`` blocks again; bytes. ``plain`` marks bf16: ``decoded`` is as there."""
    points, words = np.zeros(BLOCK, dtype=np.int32), np.zeros(BLOCK // 8, dtype=np.uint32)
    higher = np.zeros(BLOCK, dtype=np.int32)
    at = 0
    for block in range(bad.size):
        if not bad[block]:
            continue
        start, count = block * BLOCK, min(own.size - block * BLOCK, BLOCK)
        stride, inverse = (count + 7) // 8, INVERSES[codes[block]]
        points[:] = 0
        for i in range(count):
            points[i] = nearest(own[start + i] * inverse)
        digits = _digits(points, count, bits) if codes[block] else 0
        plain[block] = digits == 0
        out[at] = digits
        at += 1
        for digit in range(1, digits + 1):
            for i in range(BLOCK):
                higher[i] = points[i] >> (digit * bits)
            _pack(higher, np.uint64(stride), bits, words, out, np.uint64(at))
            at += stride * bits
        if digits == 0:
            for i in range(start, start + count):
                decoded[i] = bf16_out(own[i], out, at)
                at += 2
    return at


@kernel
def modulo_patch(data: Bytes, codes: Any, bits: int, bad: Any, out: Vector, hashes: Any) -> int:
    """Read the ``bad`` blocks again; the bytes read, or -1 if no encoder writes that.

    Those that came as points are ``bad`` no more, and ``hashes`` gets theirs.
    """
    points, words = np.zeros(BLOCK, dtype=np.int32), np.zeros(BLOCK // 8, dtype=np.uint32)
    digit_of, pairs = np.zeros(BLOCK, dtype=np.int32), points.view(np.uint64)
    at = 0
    for block in range(bad.size):
        if not bad[block]:
            continue
        start, count = block * BLOCK, min(out.size - block * BLOCK, BLOCK)
        stride = (count + 7) // 8
        digits = int(data[at]) if at < data.size else 0
        size = digits * stride * bits if digits else 2 * count
        at += 1
        if at + size > data.size or (digits and (codes[block] == 0 or size >= 2 * count)):
            return -1
        if digits == 0:
            for i in range(start, start + count):
                if (data[at + 1] & 0x7F) == 0x7F and data[at] & 0x80:
                    return -1
                out[i] = bf16_in(data, at)
                at += 2
            continue
        step, mask = MODULO_STEPS[codes[block]], (1 << bits) - 1
        points[:] = 0
        for i in range(count):
            # In float64: the float32 that holds a point times its step tells the point exactly.
            points[i] = int(np.rint(np.float64(out[start + i]) / np.float64(step))) & mask
        for digit in range(1, digits + 1):
            _unpack(data, np.uint64(at), np.uint64(stride), bits, words, digit_of)
            at += stride * bits
            for i in range(8 * stride):
                if i >= count and digit_of[i]:
                    return -1
                points[i] |= digit_of[i] << (digit * bits)
        whole = 1 << ((digits + 1) * bits)
        for i in range(count):
            if points[i] >= whole // 2:
                points[i] -= whole
            out[start + i] = np.float32(points[i]) * step
        if digits > 1 and _fit(points, count, bits, digits - 1):
            return -1
        hashes[block] = _hash(pairs, block + 1)
        bad[block] = 0
    return at


@kernel
def modulo_ranges(own: Vector, theirs: Vector, decay: Any, ranges: Vector) -> None:
    """Move each block's range to what was seen now, or slowly down to it."""
    for block in range(np.uint64(ranges.size)):
        start = block * np.uint64(BLOCK)
        seen = np.uint32(0)
        for i in range(start, min(np.uint64(own.size), start + np.uint64(BLOCK))):
            apart = np.float32(own[i] - theirs[i])
            seen = np.uint32(max(seen, np.uint32(np.float32(apart).view(np.uint32) & MAGNITUDE)))
        before = np.float32(ranges[block] * np.float32(decay))
        ranges[block] = max(np.uint32(seen).view(np.float32), before, np.float32(2.0**-60))
