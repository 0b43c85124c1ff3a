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

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    SMALLEST_SCALE,
    kernel,
    peak_of,
    scale_bits,
    scale_holds,
    write_scale,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 4 + BLOCK

LARGEST_SCALE = np.float32(66052.0 * 2.0**105)
"""The largest float32 divided by 127, rounded to 17 significant bits: 127 times it is finite."""

INT8_SCALE_HALF, INT8_SCALE_KEPT = np.uint32(0x40), np.uint32(0xFFFFFF80)
"""Rounds a scale to 17 significant bits: 7 bits of code times 17 bits of scale fit float32, so
decoding is exact."""


class Int8(FixedCodec):
    """About one byte a value (260 bytes for 256)."""

    name = "int8"
    in_blocks = True

    def _size(self, numel: int) -> int:
        return numel + 4 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if int8_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = int8_check(data, out.size)
        if block >= 0:
            raise CodecError(
                f"int8: block {block} holds a scale or a code that is not valid: drop this "
                "contribution"
            )
        int8_decode(data, out)


@kernel
def int8_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits = values.view(np.uint32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        peak = np.uint32(peak_of(bits, start, stop))
        if peak >= INFINITE:
            return block
        scale = np.float32(peak.view(np.float32) / np.float32(127.0))
        scale = np.uint32((scale.view(np.uint32) + INT8_SCALE_HALF) & INT8_SCALE_KEPT).view(
            np.float32
        )
        if scale < SMALLEST_SCALE:
            out[at : at + 4 + stop - start] = 0
            continue
        write_scale(out, at, scale)
        codes = out[at + 4 : at + 4 + stop - start]
        for i in range(codes.size):
            code = np.int32(np.rint(values[start + i] / scale))
            codes[i] = np.uint8(max(np.int32(-127), min(np.int32(127), code)))
    return -1


@kernel
def int8_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block with a scale or a code that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        at, count = block * BLOCK_BYTES, min(numel - block * BLOCK, BLOCK)
        if not scale_holds(scale_bits(data, at), LARGEST_SCALE):
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
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        scale = np.uint32(scale_bits(data, at)).view(np.float32)
        codes = data[at + 4 : at + 4 + stop - start]
        for i in range(codes.size):
            out[start + i] = np.float32(np.int8(codes[i])) * scale


CODEC = Int8()
