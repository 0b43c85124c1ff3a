"""e3m0: 4 bits a value (1 sign bit, 3 exponent bits, no mantissa) in blocks of 256 behind a scale
of absmax / 16.

Layout: blocks stand one after the other, each ``4 + ceil(count / 2)`` bytes, where count is 256 and
less only in the last one::

    byte 0 .. 3   scale, IEEE 754 binary32, little-endian: 0, or from 2**-100 to
                  (largest float32) / 16
    byte 4 + i    low nibble (bits 0-3): value 2*i;
                  high nibble (bits 4-7): value 2*i+1, or 0 after an odd end

    nibble: bit 3 is the sign, bits 0-2 are the exponent code e
    magnitude = 0 for e = 0, else scale * 2**(e - 3):  {0, .25, .5, 1, 2, 4, 8, 16} * scale

The nearest magnitude is taken; a tie goes to the larger one. Zero has no sign: nibble 8 is never
written and refused. A block with a scale below 2**-100 is all zero bytes. Source of the format:
Streaming DiLoCo, 2501.18512.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    MAGNITUDE,
    SMALLEST_SCALE,
    kernel,
    part,
    peak_of,
    scale_bits,
    scale_holds,
    write_scale,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 4 + BLOCK // 2

LARGEST_SCALE = np.float32((2.0 - 2.0**-23) * 2.0**123)
"""The largest float32 divided by 16."""


class E3m0(FixedCodec):
    """About half a byte a value (132 bytes for 256)."""

    name = "e3m0"
    in_blocks = True

    def _size(self, numel: int) -> int:
        return (numel + 1) // 2 + 4 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if e3m0_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = e3m0_check(data, out.size)
        if block >= 0:
            raise CodecError(
                f"e3m0: block {block} holds a scale or a nibble that is not valid: drop this "
                "contribution"
            )
        e3m0_decode(data, out)


@part
def _nibble(value: Any, scale: Any) -> Any:
    """Sign and exponent code of one value: the nearest magnitude, a tie goes to the larger one,
    zero has no sign."""
    bits = np.float32(value / scale).view(np.uint32)
    ratio = np.int32(bits & MAGNITUDE)
    # adding half a mantissa carries into the exponent from 1.5 * 2**k on, the middle between 2**k
    # and 2**(k + 1)
    code = ((ratio + np.int32(0x00400000)) >> np.int32(23)) - np.int32(124)
    nonzero = ratio >= np.int32(
        0x3E000000
    )  # 0.125, the middle between 0 and .25, lies below that pattern
    code = min(np.int32(7), max(code, np.int32(nonzero)))
    return np.uint8(code | (np.int32(nonzero) & np.int32(bits >> np.uint32(31))) << np.int32(3))


@kernel
def e3m0_encode(values: Vector, out: Bytes) -> int:
    """Code all blocks; returns -1, or the first block that holds NaN or infinity."""
    bits = values.view(np.uint32)
    for block in range((values.size + BLOCK - 1) // BLOCK):
        start, stop, at = block * BLOCK, min(values.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        peak = np.uint32(peak_of(bits, start, stop))
        if peak >= INFINITE:
            return block
        scale = np.float32(peak.view(np.float32) / np.float32(16.0))
        codes = out[at + 4 : at + 4 + (stop - start + 1) // 2]
        if scale < SMALLEST_SCALE:
            out[at : at + 4 + codes.size] = 0
            continue
        write_scale(out, at, scale)
        pairs = (stop - start) // 2
        for i in range(pairs):
            low, high = (
                _nibble(values[start + 2 * i], scale),
                _nibble(values[start + 2 * i + 1], scale),
            )
            codes[i] = low | high << np.uint8(4)
        if pairs < codes.size:
            codes[pairs] = _nibble(values[stop - 1], scale)
    return -1


@kernel
def e3m0_check(data: Bytes, numel: int) -> int:
    """Returns -1, or the first block with a scale or a nibble that no encoder writes."""
    for block in range((numel + BLOCK - 1) // BLOCK):
        at, count = block * BLOCK_BYTES, min(numel - block * BLOCK, BLOCK)
        if not scale_holds(scale_bits(data, at), LARGEST_SCALE):
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
        start, stop, at = block * BLOCK, min(out.size, (block + 1) * BLOCK), block * BLOCK_BYTES
        scale = np.uint32(scale_bits(data, at)).view(np.float32)
        for code in range(1, 8):
            levels[code] = scale * np.float32(2.0 ** (code - 3))
            levels[code + 8] = -levels[code]
        for i in range((stop - start) // 2):
            byte = data[at + 4 + i]
            out[start + 2 * i] = levels[byte & 0x0F]
            out[start + 2 * i + 1] = levels[byte >> 4]
        if (stop - start) % 2:
            out[stop - 1] = levels[data[at + 4 + (stop - start) // 2] & 0x0F]


CODEC = E3m0()
