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

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    SIGN,
    SMALLEST_SCALE_BITS,
    bf16_in,
    integers_of,
    kernel,
    peak_of,
    short_block_holds,
    short_scale,
    write_short_scale,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 2 + BLOCK // 8

LARGEST_SCALE = np.float32(255.0 * 2.0**120)
"""The largest bf16."""


class Q1(FixedCodec):
    """About an eighth of a byte a value (34 bytes for 256)."""

    name = "q1"
    in_blocks = True

    def _size(self, numel: int) -> int:
        return (numel + 7) // 8 + 2 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if q1_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = q1_check(data, out.size)
        if block >= 0:
            raise CodecError(
                f"q1: block {block} holds a scale or a bit that is not valid: drop this "
                "contribution"
            )
        q1_decode(data, out)


@kernel
def q1_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits, integers = values.view(np.uint32), np.empty(BLOCK, dtype=np.int32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        peak = np.uint32(peak_of(bits, start, stop))
        if peak >= INFINITE:
            return block
        count = stop - start
        codes = out[at + 2 : at + 2 + (count + 7) // 8]
        codes[:] = 0
        scale = np.float32(0.0)
        if peak >= SMALLEST_SCALE_BITS:
            total = integers_of(values, start, stop, peak, integers)
            scale = short_scale(total, count, peak, LARGEST_SCALE)
        write_short_scale(out, at, scale)
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
        if not short_block_holds(
            data, block * BLOCK_BYTES, min(numel - block * BLOCK, BLOCK), 1, LARGEST_SCALE
        ):
            return block
    return -1


@kernel
def q1_decode(data: Bytes, out: Vector) -> None:
    """Decode data that `q1_check` has passed."""
    bits = out.view(np.uint32)
    for block in range((out.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        scale = np.float32(bf16_in(data, at)).view(np.uint32)
        for i in range((stop - start) // 8):
            byte = np.uint32(data[at + 2 + i])
            for k in range(8):
                bits[start + 8 * i + k] = scale | (
                    byte >> np.uint32(k) & np.uint32(1)
                ) << np.uint32(31)
        for i in range((stop - start) // 8 * 8, stop - start):
            byte = np.uint32(data[at + 2 + i // 8])
            bits[start + i] = scale | (byte >> np.uint32(i % 8) & np.uint32(1)) << np.uint32(31)


CODEC = Q1()
