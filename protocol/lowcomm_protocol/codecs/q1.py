"""q1: one bit a value, its sign, in blocks of 256 behind a scale of the mean magnitude.

Layout: blocks stand one after the other, each ``2 + ceil(count / 8)`` bytes, where count is 256 and
less only in the last one::

    byte 0 .. 1   scale, bf16, little-endian: 0, or from 2**-100 to (largest bf16)
    byte 2 + i    bits 0 .. 7: values 8*i .. 8*i+7, the first in the lowest bit;
                  0 after the last value

    value = scale where the bit is 0, -scale where it is 1

No other scale has a smaller squared error for these signs. It is summed in integers, rounded to
float32 and then to bf16, nearest even. Zero counts as positive. A block with a scale below 2**-100
is all zero bytes. Coding decoded values again gives the same bytes: their mean magnitude is the
scale. Of a Gaussian 0.36 of the mean square is lost (1 - 2 / pi), so it takes error feedback.
Source: Karimireddy et al., EF-SignSGD, 1901.09847.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.codecs.blocks import BlockCodec, Kernels
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    SIGN,
    SMALLEST_SCALE_BITS,
    block_peak,
    checker,
    decoder,
    encoder,
    integers_of,
    kernel,
    part,
    sender,
    short_block_holds,
    short_scale,
    short_scale_bits,
    write_short_scale,
)
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 2 + BLOCK // 8

LARGEST_SCALE = np.float32(255.0 * 2.0**120)
"""The largest bf16."""


@part
def _code(values: Vector, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any) -> bool:
    bits = values.view(np.uint32)
    peak, scale = np.uint32(block_peak(bits)), np.float32(0.0)
    if peak >= INFINITE:
        return False
    if peak >= SMALLEST_SCALE_BITS:
        total = integers_of(values, peak, integers)
        scale = short_scale(total, count, peak, LARGEST_SCALE)
    if scale == 0:
        for i in range(np.uint64(BLOCK_BYTES)):
            out[at + i] = np.uint8(0)
        return True
    write_short_scale(out, at, scale)
    begin = at + np.uint64(2)
    for i in range(np.uint64(BLOCK // 8)):
        code = np.uint8(0)
        for k in range(np.uint64(8)):
            code |= np.uint8(bits[np.uint64(8) * i + k] > SIGN) << np.uint8(k)
        out[begin + i] = code
    return True


@part
def _holds(data: Bytes, at: Any) -> Any:
    return short_block_holds(data, at, BLOCK_BYTES, LARGEST_SCALE)


@part
def _restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    scale, begin = np.uint32(short_scale_bits(data, at)), at + np.uint64(2)
    bits = out.view(np.uint32)
    for i in range(np.uint64(BLOCK // 8)):
        byte, place = np.uint32(data[begin + i]), start + np.uint64(8) * i
        for k in range(np.uint64(8)):
            sign = byte >> np.uint32(k) & np.uint32(1)
            bits[place + k] = scale | sign << np.uint32(31)


_encode, _send = encoder(_code, BLOCK_BYTES), sender(_code, _restore, BLOCK_BYTES)
_check, _decode = checker(_holds, BLOCK_BYTES), decoder(_restore, BLOCK_BYTES)


@kernel
def q1_encode(values: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _encode(values, count, out)


@kernel
def q1_send(vector: Vector, residual: Vector, error: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _send(vector, residual, error, count, out)


@kernel
def q1_check(data: Bytes) -> Any:
    """See Kernels."""
    return _check(data)


@kernel
def q1_decode(data: Bytes, out: Vector) -> None:
    """See Kernels."""
    _decode(data, out)


class Q1(BlockCodec):
    """About an eighth of a byte a value (34 bytes for 256)."""

    name = "q1"
    head, bits = 2, 1
    kernels = Kernels(q1_encode, q1_send, q1_check, q1_decode)


CODEC = Q1()
