"""int8: blocks of 256 values behind a scale of absmax / 127.

Layout: blocks stand one after the other, each ``4 + count`` bytes, where count is 256 and less only
in the last one::

    byte 0 .. 3          scale, IEEE 754 binary32, little-endian: 0,
                         or from 2**-100 to 66052 * 2**105
    byte 4 .. 4+count-1  codes, two's complement, -127 .. 127 (-128 is never written and refused)

    value = code * scale

The scale is absmax / 127 rounded to 17 significant bits. So the product is exact in float32, and
coding decoded values again gives the same bytes. Codes are nearest, ties to even. A block with a
scale below 2**-100 is all zero bytes.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.codecs.blocks import BlockCodec, Kernels
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    SMALLEST_SCALE,
    block_peak,
    checker,
    decoder,
    encoder,
    kernel,
    nearest,
    part,
    scale_bits,
    scale_holds,
    sender,
    write_scale,
)
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 4 + BLOCK

LARGEST_SCALE = np.float32(66052.0 * 2.0**105)
"""The largest float32 divided by 127, rounded to 17 significant bits: 127 times it is finite."""

INT8_SCALE_HALF, INT8_SCALE_KEPT = np.uint32(0x40), np.uint32(0xFFFFFF80)
"""Rounds a scale to 17 significant bits: 7 bits of code times 17 bits of scale fit float32, so
decoding is exact. A value is 127.001 scales at most, so no code passes 127."""


@part
def _code(values: Vector, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any) -> bool:
    peak = np.uint32(block_peak(values.view(np.uint32)))
    if peak >= INFINITE:
        return False
    scale = np.float32(peak.view(np.float32) / np.float32(127.0))
    scale = np.uint32((scale.view(np.uint32) + INT8_SCALE_HALF) & INT8_SCALE_KEPT).view(np.float32)
    if scale < SMALLEST_SCALE:
        for i in range(np.uint64(BLOCK_BYTES)):
            out[at + i] = np.uint8(0)
        return True
    write_scale(out, at, scale)
    begin = at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        out[begin + i] = np.uint8(nearest(values[i] / scale))
    return True


@part
def _holds(data: Bytes, at: Any) -> bool:
    bad, begin = np.uint8(0), at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        bad |= np.uint8(data[begin + i] == np.uint8(0x80))
    return scale_holds(scale_bits(data, at), LARGEST_SCALE) and bad == 0


@part
def _restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    scale, begin = np.uint32(scale_bits(data, at)).view(np.float32), at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        out[start + i] = np.float32(np.int8(data[begin + i])) * scale


_encode, _send = encoder(_code, BLOCK_BYTES), sender(_code, _restore, BLOCK_BYTES)
_check, _decode = checker(_holds, BLOCK_BYTES), decoder(_restore, BLOCK_BYTES)


@kernel
def int8_encode(values: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _encode(values, count, out)


@kernel
def int8_send(vector: Vector, residual: Vector, error: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _send(vector, residual, error, count, out)


@kernel
def int8_check(data: Bytes) -> Any:
    """See Kernels."""
    return _check(data)


@kernel
def int8_decode(data: Bytes, out: Vector) -> None:
    """See Kernels."""
    _decode(data, out)


class Int8(BlockCodec):
    """About one byte a value (260 bytes for 256)."""

    name = "int8"
    head, bits = 4, 8
    kernels = Kernels(int8_encode, int8_send, int8_check, int8_decode)


CODEC = Int8()
