# pyright: reportMissingImports=false, reportIndexIssue=false
"""int8, e3m0 and q2 on a GPU: the bytes that codecs/int8.py, e3m0.py and q2.py write.

A program codes `ROWS` blocks of 256 values. A last block that is shorter is read with zeros behind
its values, and bytes beyond its end are not written. Divisions are ``div_rn``, for Triton's ``/``
is not rounded to nearest.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowcomm_protocol.codecs import e3m0, int8, q2
from lowcomm_protocol.codecs.blocks import BlockCodec
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

ROWS = 4
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
SMALLEST = tl.constexpr(2.0**-100)
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)


def encode(name: str, vector: Tensor, out: Tensor) -> None:
    """Code float32 ``vector`` into uint8 ``out``, of ``coded_size(numel)`` bytes.

    Raises `CodecError` if it is not finite.
    """
    loops = _loops(name)
    _check(loops.codec, vector, out)
    bad = _run(loops.encode, vector, out, loops.largest)
    if bad >= 0:
        raise loops.codec._refuse_value(vector.cpu().numpy())


def decode(name: str, data: Tensor, out: Tensor) -> None:
    """Decode uint8 ``data`` into float32 ``out``.

    Raises `CodecError`, before it writes, for what no encoder writes.
    """
    loops = _loops(name)
    _check(loops.codec, out, data)
    bad = _run(loops.check, out, data, loops.largest)
    if bad >= 0:
        raise CodecError(
            f"{name}: block {bad} holds a scale or a code that is not valid: drop this contribution"
        )
    if out.numel():
        loops.decode[_grid(out)](data, out, out.numel(), ROWS=ROWS, enable_fp_fusion=False)


def _run(kernel: Any, vector: Tensor, data: Tensor, largest: float) -> int:
    """Run a kernel that marks blocks which it refuses; the first of them, or -1."""
    if not vector.numel():
        return -1
    marks = torch.zeros(-(-vector.numel() // BLOCK), dtype=torch.int32, device=vector.device)
    kernel[_grid(vector)](
        vector, data, marks, largest, vector.numel(), ROWS=ROWS, enable_fp_fusion=False
    )
    bad = torch.nonzero(marks)
    return int(bad[0]) if bad.numel() else -1


def _grid(vector: Tensor) -> tuple[int]:
    return (triton.cdiv(-(-vector.numel() // BLOCK), ROWS),)


def _check(codec: BlockCodec, vector: Tensor, data: Tensor) -> None:
    size = codec.coded_size(vector.numel())
    flat = vector.dtype == torch.float32 and vector.ndim == 1 and vector.is_contiguous()
    bytes_ = data.dtype == torch.uint8 and data.shape == (size,) and data.is_contiguous()
    if not (flat and bytes_ and vector.device == data.device):
        raise CodecError(
            f"{codec.name}: a vector of {vector.dtype}, shape {tuple(vector.shape)}, and a buffer "
            f"of {data.dtype}, shape {tuple(data.shape)}: pass contiguous float32 and {size} bytes "
            "on one device"
        )


@triton.jit
def _rows(numel, ROWS: tl.constexpr):
    """This program's blocks, and how many values each has."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return block, tl.minimum(tl.maximum(numel - block * 256, 0), 256)


@triton.jit
def _values(vector, block, count, STEP: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Values FIRST, FIRST + STEP, ... of each block; 0 where there is none."""
    place = tl.arange(0, 256 // STEP)[None, :] * STEP + FIRST
    return tl.load(vector + block[:, None] * 256 + place, mask=place < count[:, None], other=0.0)


@triton.jit
def _put(vector, value, block, count, STEP: tl.constexpr, FIRST: tl.constexpr):
    """Write what `_values` reads."""
    place = tl.arange(0, 256 // STEP)[None, :] * STEP + FIRST
    tl.store(vector + block[:, None] * 256 + place, value, mask=place < count[:, None])


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _magnitudes(value):
    return _bits(value) & MAGNITUDE


@triton.jit
def _nearest(value):
    """The nearest integer, ties to even, of a float32 within 2**22."""
    return _bits(value + 12582912.0) - 0x4B400000


@triton.jit
def _wide(value, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """One value a block, for each value of it."""
    return tl.broadcast_to(value[:, None], (ROWS, WIDTH))


@triton.jit
def _write_scale(out, at, bits, count, HEAD: tl.constexpr, SHIFT: tl.constexpr):
    """Write ``HEAD`` bytes of the bits of a scale, from bit ``SHIFT`` on."""
    k = tl.arange(0, HEAD)[None, :]
    byte = (bits[:, None] >> (SHIFT + 8 * k)) & 0xFF
    tl.store(out + at[:, None] + k, byte.to(tl.uint8), mask=(count > 0)[:, None])


@triton.jit
def _read_scale(data, at, count, HEAD: tl.constexpr, SHIFT: tl.constexpr):
    k = tl.arange(0, HEAD)[None, :]
    byte = tl.load(data + at[:, None] + k, mask=(count > 0)[:, None], other=0).to(tl.int32)
    return tl.sum(byte << (SHIFT + 8 * k), axis=1)


@triton.jit
def _scale_refused(bits, largest):
    """A scale is 0, or from 2**-100 to ``largest``; as integers, so a sign is refused too."""
    most = _bits(largest + tl.zeros_like(bits).to(tl.float32))
    return (bits != 0) & ((bits < SMALLEST_BITS) | (bits > most))


@triton.jit
def _int8_encode(vector, out, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    values = _values(vector, block, count, 1, 0, ROWS)
    peak = tl.max(_magnitudes(values), axis=1)
    tl.store(marks + block, (peak >= INFINITE).to(tl.int32), mask=count > 0)
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), tl.zeros_like(peak).to(tl.float32) + 127.0)
    bits = (_bits(scale) + 0x40) & -128
    scale = bits.to(tl.float32, bitcast=True)
    none = scale < SMALLEST
    at = block * 260
    _write_scale(out, at, tl.where(none, 0, bits), count, 4, 0)
    codes = _nearest(tl.div_rn(values, _wide(tl.where(none, 1.0, scale), 256, ROWS)))
    codes = tl.where(none[:, None], 0, codes)
    place = tl.arange(0, 256)[None, :]
    tl.store(out + at[:, None] + 4 + place, codes.to(tl.uint8), mask=place < count[:, None])


@triton.jit
def _int8_codes(data, block, count):
    place = tl.arange(0, 256)[None, :]
    at = block[:, None] * 260 + 4 + place
    return tl.load(data + at, mask=place < count[:, None], other=0).to(tl.int32)


@triton.jit
def _int8_check(vector, data, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    bad = tl.max((_int8_codes(data, block, count) == 0x80).to(tl.int32), axis=1)
    bits = _read_scale(data, block * 260, count, 4, 0)
    bad = bad | _scale_refused(bits, largest).to(tl.int32)
    tl.store(marks + block, bad, mask=count > 0)


@triton.jit
def _int8_decode(data, out, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    scale = _read_scale(data, block * 260, count, 4, 0).to(tl.float32, bitcast=True)
    codes = _int8_codes(data, block, count)
    codes = codes - ((codes & 0x80) << 1)
    _put(out, codes.to(tl.float32) * _wide(scale, 256, ROWS), block, count, 1, 0)


@triton.jit
def _nibble(value, scale):
    """See e3m0.py."""
    bits = _bits(tl.div_rn(value, scale))
    ratio = bits & MAGNITUDE
    code = ((ratio + 0x00400000) >> 23) - 124
    nonzero = (ratio >= 0x3E000000).to(tl.int32)
    code = tl.minimum(tl.maximum(code, nonzero), 7)
    return code | ((nonzero & (bits < 0).to(tl.int32)) << 3)


@triton.jit
def _e3m0_encode(vector, out, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    low = _values(vector, block, count, 2, 0, ROWS)
    high = _values(vector, block, count, 2, 1, ROWS)
    peak = tl.max(tl.maximum(_magnitudes(low), _magnitudes(high)), axis=1)
    tl.store(marks + block, (peak >= INFINITE).to(tl.int32), mask=count > 0)
    scale = peak.to(tl.float32, bitcast=True) * 0.0625  # exact where it is not coded as zeros
    none = scale < SMALLEST
    at = block * 132
    _write_scale(out, at, tl.where(none, 0, _bits(scale)), count, 4, 0)
    wide = _wide(tl.where(none, 1.0, scale), 128, ROWS)
    byte = _nibble(low, wide) | (_nibble(high, wide) << 4)
    byte = tl.where(none[:, None], 0, byte)
    place = tl.arange(0, 128)[None, :]
    there = 2 * place < count[:, None]
    tl.store(out + at[:, None] + 4 + place, byte.to(tl.uint8), mask=there)


@triton.jit
def _e3m0_bytes(data, block, count):
    place = tl.arange(0, 128)[None, :]
    at = block[:, None] * 132 + 4 + place
    return tl.load(data + at, mask=2 * place < count[:, None], other=0).to(tl.int32)


@triton.jit
def _e3m0_check(vector, data, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    byte = _e3m0_bytes(data, block, count)
    odd_end = 2 * tl.arange(0, 128)[None, :] + 1 == count[:, None]
    bad = ((byte & 0x0F) == 0x08) | ((byte & 0xF0) == 0x80) | (odd_end & (byte >= 0x10))
    refused = _scale_refused(_read_scale(data, block * 132, count, 4, 0), largest)
    bad = tl.max(bad.to(tl.int32), axis=1) | refused.to(tl.int32)
    tl.store(marks + block, bad, mask=count > 0)


@triton.jit
def _e3m0_value(code, scale):
    exponent = code & 7
    power = tl.where(exponent > 0, (exponent + 124) << 23, 0).to(tl.float32, bitcast=True)
    bits = _bits(power * scale) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e3m0_decode(data, out, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    scale = _read_scale(data, block * 132, count, 4, 0).to(tl.float32, bitcast=True)
    wide, byte = _wide(scale, 128, ROWS), _e3m0_bytes(data, block, count)
    _put(out, _e3m0_value(byte & 0x0F, wide), block, count, 2, 0)
    _put(out, _e3m0_value(byte >> 4, wide), block, count, 2, 1)


@triton.jit
def _short_scale(upper, lower, unit, largest):
    """``upper / lower`` units, rounded to float32 and then to bf16; 0 below 2**-100."""
    quotient = upper.to(tl.float64) / lower.to(tl.float64) * unit
    raw = _bits(quotient.to(tl.float32))
    raw = (raw + 0x7FFF + ((raw >> 16) & 1)) & -65536
    scale = tl.minimum(raw.to(tl.float32, bitcast=True), largest)
    return tl.where(scale >= SMALLEST, scale, 0.0)


@triton.jit
def _far(integers, least):
    return (integers > least.to(tl.int32)[:, None]).to(tl.int64)


@triton.jit
def _q2_code(bits, edge):
    outer = ((bits & MAGNITUDE) >= edge[:, None]).to(tl.int32)
    # A sign, but not that of a zero.
    return outer | (((bits < 0) & (bits != -2147483648)).to(tl.int32) << 1)


@triton.jit
def _q2_encode(vector, out, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    values = _values(vector, block, count, 1, 0, ROWS)
    magnitudes = _magnitudes(values)
    peak = tl.max(magnitudes, axis=1)
    tl.store(marks + block, (peak >= INFINITE).to(tl.int32), mask=count > 0)
    coded = (peak >= SMALLEST_BITS) & (peak < INFINITE)
    power = tl.where(coded, peak & INFINITE, 0x3F800000).to(tl.float32, bitcast=True)
    factor = tl.div_rn(tl.zeros_like(power) + 8388608.0, power)
    integers = tl.where(coded[:, None], tl.abs(values) * factor[:, None], 0.0).to(tl.int32)
    total, many = tl.sum(integers.to(tl.int64), axis=1), tl.maximum(count, 1)
    unit = power.to(tl.float64) * 1.1920928955078125e-07
    threshold, upper, lower = total // many, total, many
    for _ in tl.static_range(3):
        far = _far(integers, threshold)
        upper = 4 * total + 10 * tl.sum(far * integers, axis=1)
        lower = 4 * many + 45 * tl.sum(far, axis=1)
        threshold = 9 * upper // (4 * lower)
    scale = _short_scale(upper, lower, unit, largest)
    reached = tl.sum((magnitudes >= _bits(scale * 2.25)[:, None]).to(tl.int64), axis=1)
    # All would be outer: the inner level holds them as well, and codes them again.
    scale = tl.where(reached == count, _short_scale(total, many, unit, largest), scale)
    scale = tl.where(coded, scale, 0.0)
    at, edge = block * 66, _bits(scale * 2.25)
    _write_scale(out, at, _bits(scale), count, 2, 16)
    place = tl.arange(0, 64)[None, :]
    byte = tl.zeros((ROWS, 64), dtype=tl.int32)
    for k in tl.static_range(4):
        bits = _bits(_values(vector, block, count, 4, k, ROWS))
        there = 4 * place + k < count[:, None]
        byte = byte | (tl.where(there, _q2_code(bits, edge), 0) << (2 * k))
    byte = tl.where((scale == 0.0)[:, None], 0, byte)
    there = 4 * place < count[:, None]
    tl.store(out + at[:, None] + 2 + place, byte.to(tl.uint8), mask=there)


@triton.jit
def _q2_bytes(data, block, count):
    place = tl.arange(0, 64)[None, :]
    at = block[:, None] * 66 + 2 + place
    return tl.load(data + at, mask=4 * place < count[:, None], other=0).to(tl.int32)


@triton.jit
def _q2_check(vector, data, marks, largest, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    byte, scale = _q2_bytes(data, block, count), _read_scale(data, block * 66, count, 2, 16)
    used = tl.minimum(tl.maximum(count[:, None] - 4 * tl.arange(0, 64)[None, :], 0), 4)
    bad = (byte >> (2 * used).to(tl.int32)) != 0
    bad = bad | ((scale == 0)[:, None] & (byte != 0))
    marked = tl.max(bad.to(tl.int32), axis=1) | _scale_refused(scale, largest).to(tl.int32)
    tl.store(marks + block, marked, mask=count > 0)


@triton.jit
def _q2_decode(data, out, numel, ROWS: tl.constexpr):
    block, count = _rows(numel, ROWS)
    inner, byte = _read_scale(data, block * 66, count, 2, 16), _q2_bytes(data, block, count)
    outer = _bits(inner.to(tl.float32, bitcast=True) * 3.5)
    for k in tl.static_range(4):
        code = byte >> (2 * k)
        level = tl.where((code & 1) > 0, outer[:, None], inner[:, None])
        value = (level | ((code & 2) << 30)).to(tl.float32, bitcast=True)
        _put(out, value, block, count, 4, k)


@dataclass(frozen=True)
class Loops:
    """The kernels of a codec."""

    codec: BlockCodec
    largest: float
    """The largest scale."""
    encode: Any
    check: Any
    decode: Any


LOOPS = {
    "int8": Loops(int8.CODEC, float(int8.LARGEST_SCALE), _int8_encode, _int8_check, _int8_decode),
    "e3m0": Loops(e3m0.CODEC, float(e3m0.LARGEST_SCALE), _e3m0_encode, _e3m0_check, _e3m0_decode),
    "q2": Loops(q2.CODEC, float(q2.LARGEST_SCALE), _q2_encode, _q2_check, _q2_decode),
}


def _loops(name: str) -> Loops:
    if name not in LOOPS:
        raise CodecError(f"codec {name!r} has no kernel for a GPU: code it in host memory")
    return LOOPS[name]
