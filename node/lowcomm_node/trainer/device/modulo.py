# pyright: reportMissingImports=false, reportIndexIssue=false
"""mod3, mod4, mod6 and mod8 on a GPU: the bytes and hashes of codecs/modulo_kernels.py.

Where a block begins depends on those before it, so the step codes of all blocks come first: the
encoder's from the vector, the decoder's from ``modulo_check``, which walks the headers in host
memory, where the bytes have come. Then each program handles `ROWS` blocks by themselves.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lowcomm_protocol.codecs.modulo_kernels import (
    HEADER,
    INVERSES,
    KEYS,
    MANTISSAS,
    MODULO_STEPS,
    rows_together,
)
from lowcomm_protocol.spec.names import BLOCK

ROWS = 4
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
BF16_OVERFLOW = tl.constexpr(0x7F7F8000)
TOO_FAR = tl.constexpr((127 + 22) << 23)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


def encode(
    vector: Tensor, wanted: Tensor, bits: int, own: Tensor, out: Tensor, hashes: Tensor
) -> int:
    """Code a whole float32 ``vector`` into uint8 ``out`` with steps of at least ``wanted``, float32
    [blocks] (below 0: none is known); bytes, or -1 - block if one is not finite.

    ``own`` gets a copy of ``vector``, which becomes what the others will decode; int64 ``hashes``
    the hash of each block's lattice points, 0 for bf16.
    """
    numel, blocks = vector.numel(), wanted.numel()
    if not numel:
        return 0
    own.copy_(vector)
    codes = torch.empty(blocks, dtype=torch.int32, device=vector.device)
    grid, tables = (triton.cdiv(blocks, ROWS),), _tables(vector.device)
    _modulo_plan[grid](
        own,
        wanted,
        tables[0],
        tables[3],
        codes,
        numel,
        BITS=bits,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )
    refused = torch.nonzero(codes < 0)
    if refused.numel():
        return -1 - int(refused[0])
    begins, size = _places(codes, numel, bits)
    _modulo_encode[grid](
        own, vector, out, hashes, codes, begins, *tables[:3], numel,
        BITS=bits, GROUP=rows_together(bits), ROWS=ROWS, enable_fp_fusion=False,
    )  # fmt: skip
    return size


def decode(
    data: Tensor,
    codes: Tensor,
    bits: int,
    own: Tensor,
    out: Tensor,
    hashes: Tensor,
    bad: Tensor,
) -> None:
    """Decode a whole vector that ``modulo_check`` has passed, next to ``own``.

    ``codes``: step codes, uint8 [blocks]. ``hashes`` (int64) as in ``encode``; ``bad`` (uint8)
    marks the blocks that wrapped.
    """
    numel = out.numel()
    if not numel:
        return
    begins, _ = _places(codes.to(torch.int32), numel, bits)
    _modulo_decode[(triton.cdiv(codes.numel(), ROWS),)](
        data, own, out, hashes, bad, codes, begins, *_tables(out.device)[:3], numel,
        BITS=bits, GROUP=rows_together(bits), ROWS=ROWS, enable_fp_fusion=False,
    )  # fmt: skip


def _places(codes: Tensor, numel: int, bits: int) -> tuple[Tensor, int]:
    """Where each block begins, and the bytes of all."""
    counts = torch.full_like(codes, BLOCK, dtype=torch.int64)
    counts[-1] = numel - BLOCK * (codes.numel() - 1)
    bodies = torch.where(codes == 0, 2 * counts, (counts + 7) // 8 * bits)
    ends = torch.cumsum(bodies + HEADER, 0)
    return ends - bodies - HEADER, int(ends[-1])


def _tables(device: torch.device) -> list[Tensor]:
    """Steps, their inverses, keys, and mantissas of quarters of an octave."""
    arrays = (MODULO_STEPS, INVERSES, KEYS.view(np.int32), MANTISSAS.view(np.int32))
    return [torch.from_numpy(one).to(device) for one in arrays]


@triton.jit
def _rows(numel, ROWS: tl.constexpr):
    """This program's blocks, and how many values each has."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return block, tl.minimum(tl.maximum(numel - block * 256, 0), 256)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _nearest(value):
    """The nearest integer, ties to even, of a float32 within 2**22."""
    return _bits(value + 12582912.0) - 0x4B400000


@triton.jit
def _modulo_plan(
    own, wanted, steps, mantissas, codes, numel, BITS: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """The step code of each block: 0 for bf16, -1 where it is not finite."""
    block, count = _rows(numel, ROWS)
    place = tl.arange(0, 256)[None, :]
    here = place < count[:, None]
    values = tl.load(own + block[:, None] * 256 + place, mask=here, other=0.0)
    peaks = tl.max(_bits(values) & MAGNITUDE, axis=1)
    peak = peaks.to(tl.float32, bitcast=True)
    asked = tl.load(wanted + block, mask=count > 0, other=-1.0)
    least = _bits(tl.maximum(asked, peak * 4.76837158203125e-07))  # 2**-21
    code, mantissa = 4 * ((least >> 23) - 87) + 1, least & 0x007FFFFF
    for quarter in tl.static_range(4):
        code = code + (mantissa > tl.load(mantissas + quarter)).to(tl.int32)
    code = tl.where(code < 256, tl.maximum(code, 1), 0)
    step = tl.load(steps + code)
    # The peers differ by what they are: bf16 stops that from growing.
    code = tl.where((asked < 0.0) | (step > peak * (4.0 / (1 << BITS))), 0, code)
    code = tl.where(peaks >= BF16_OVERFLOW, -1, code)
    tl.store(codes + block, code, mask=count > 0)


@triton.jit
def _mixed(hash_, value):
    hash_ = (hash_ ^ value) * GOLDEN
    return hash_ ^ (hash_ >> 29)


@triton.jit
def _hash(low, high, keys, block):
    """64 bits over the points of a block, even and odd ones apart, and over its number."""
    j = tl.arange(0, 128)[None, :]
    one = (low ^ tl.load(keys + 2 * j)).to(tl.uint32, bitcast=True).to(tl.uint64)
    other = (high ^ tl.load(keys + 2 * j + 1)).to(tl.uint32, bitcast=True).to(tl.uint64)
    product = one * other
    folded = tl.sum(product ^ (product >> 29), axis=1)
    number = (block + 1).to(tl.uint64)
    return _mixed(_mixed(number, tl.sum(product, axis=1)), folded)


@triton.jit
def _points(own, inverse, block, place, here):
    values = tl.load(own + block[:, None] * 256 + place, mask=here, other=0.0)
    return _nearest(values * inverse[:, None])


@triton.jit
def _bf16(own, vector, out, body, block, here, place) -> None:
    """Write values as bf16, nearest even, and what they stand for."""
    at = block[:, None] * 256 + place
    raw = _bits(tl.load(own + at, mask=here, other=0.0))
    raw = (raw + 0x7FFF + ((raw >> 16) & 1)) & -65536
    tl.store(vector + at, raw.to(tl.float32, bitcast=True), mask=here)
    to = out + body[:, None] + 2 * place
    tl.store(to, ((raw >> 16) & 0xFF).to(tl.uint8), mask=here)
    tl.store(to + 1, ((raw >> 24) & 0xFF).to(tl.uint8), mask=here)


@triton.jit
def _modulo_encode(
    own,
    vector,
    out,
    hashes,
    codes,
    begins,
    steps,
    inverses,
    keys,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    block, count = _rows(numel, ROWS)
    code = tl.load(codes + block, mask=count > 0, other=0)
    at = tl.load(begins + block, mask=count > 0, other=0)
    body, coded = at + 4, (code > 0)[:, None]
    step, inverse = tl.load(steps + code), tl.load(inverses + code)
    pair, stride = tl.arange(0, 128)[None, :], ((count + 7) // 8)[:, None]
    low = _points(own, inverse, block, 2 * pair, 2 * pair < count[:, None])
    high = _points(own, inverse, block, 2 * pair + 1, 2 * pair + 1 < count[:, None])
    hash_ = tl.where(code > 0, _hash(low, high, keys, block), tl.zeros_like(code).to(tl.uint64))
    tl.store(hashes + block, hash_.to(tl.int64, bitcast=True), mask=count > 0)
    tl.store(out + at, code.to(tl.uint8), mask=count > 0)
    for k in tl.static_range(3):
        byte = (hash_ >> (8 * k)) & 0xFF
        tl.store(out + at + 1 + k, byte.to(tl.uint8), mask=count > 0)
    j = tl.arange(0, 32)[None, :]
    for group in tl.static_range(8 // GROUP):
        word = tl.zeros((ROWS, 32), dtype=tl.int32)
        for k in tl.static_range(GROUP):
            place = (group * GROUP + k) * stride + j
            here = coded & (j < stride) & (place < count[:, None])
            point = _points(own, inverse, block, place, here)
            decoded = point.to(tl.float32) * step[:, None]
            tl.store(vector + block[:, None] * 256 + place, decoded, mask=here)
            word = word | ((point & ((1 << BITS) - 1)) << (k * BITS))
        for k in tl.static_range(GROUP * BITS // 8):
            to = body[:, None] + (group * (GROUP * BITS // 8) + k) * stride + j
            tl.store(out + to, ((word >> (8 * k)) & 0xFF).to(tl.uint8), mask=coded & (j < stride))
    place = tl.arange(0, 256)[None, :]
    _bf16(own, vector, out, body, block, (code == 0)[:, None] & (place < count[:, None]), place)


@triton.jit
def _decoded(
    data,
    own,
    out,
    body,
    block,
    count,
    code,
    steps,
    inverses,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Decode every second value of coded blocks; points, and the farthest in steps."""
    place = 2 * tl.arange(0, 128)[None, :] + FIRST
    stride = tl.maximum((count + 7) // 8, 1)[:, None]
    coded, there = (code > 0)[:, None], place < count[:, None]
    row, j = place // stride, place % stride
    at = body[:, None] + (row // GROUP) * (GROUP * BITS // 8) * stride + j
    word = tl.zeros_like(row).to(tl.int32)
    for k in tl.static_range(GROUP * BITS // 8):
        byte = tl.load(data + at + k * stride, mask=coded & there, other=0)
        word = word | (byte.to(tl.int32) << (8 * k))
    remainder = (word >> ((row % GROUP) * BITS).to(tl.int32)) & ((1 << BITS) - 1)
    values = tl.load(own + block[:, None] * 256 + place, mask=there, other=0.0)
    steps_away = values * tl.load(inverses + code)[:, None]
    far = tl.max(_bits(steps_away) & MAGNITUDE, axis=1)
    near = _nearest(steps_away)
    half: tl.constexpr = 1 << (BITS - 1)
    point = near + ((remainder - near + half) & ((1 << BITS) - 1)) - half
    is_far = (_bits(steps_away) & MAGNITUDE) >= TOO_FAR
    kept = tl.where(is_far, remainder, point)  # only the remainder of such a value is kept
    decoded = kept.to(tl.float32) * tl.load(steps + code)[:, None]
    tl.store(out + block[:, None] * 256 + place, decoded, mask=coded & there)
    return point, far


@triton.jit
def _modulo_decode(
    data,
    own,
    out,
    hashes,
    bad,
    codes,
    begins,
    steps,
    inverses,
    keys,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    block, count = _rows(numel, ROWS)
    code = tl.load(codes + block, mask=count > 0, other=0).to(tl.int32)
    at = tl.load(begins + block, mask=count > 0, other=0)
    body = at + 4
    low, far = _decoded(data, own, out, body, block, count, code, steps, inverses, 0, BITS, GROUP)
    high, farther = _decoded(
        data, own, out, body, block, count, code, steps, inverses, 1, BITS, GROUP
    )
    hash_ = tl.where(code > 0, _hash(low, high, keys, block), tl.zeros_like(code).to(tl.uint64))
    tl.store(hashes + block, hash_.to(tl.int64, bitcast=True), mask=count > 0)
    sent = tl.zeros_like(code)
    for k in tl.static_range(3):
        byte = tl.load(data + at + 1 + k, mask=count > 0, other=0)
        sent = sent | (byte.to(tl.int32) << (8 * k))
    differs = (hash_ & 0xFFFFFF).to(tl.int32) != sent
    wrapped = (code > 0) & (differs | (tl.maximum(far, farther) >= TOO_FAR))
    tl.store(bad + block, wrapped.to(tl.uint8), mask=count > 0)
    place = tl.arange(0, 256)[None, :]
    here = (code == 0)[:, None] & (place < count[:, None])
    low_byte = tl.load(data + body[:, None] + 2 * place, mask=here, other=0).to(tl.int32)
    high_byte = tl.load(data + body[:, None] + 2 * place + 1, mask=here, other=0).to(tl.int32)
    raw = (low_byte << 16) | (high_byte << 24)
    value = raw.to(tl.float32, bitcast=True)
    tl.store(out + block[:, None] * 256 + place, value, mask=here)
