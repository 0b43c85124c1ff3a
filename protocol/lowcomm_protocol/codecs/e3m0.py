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

from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.codecs.blocks import BlockCodec, Kernels
from lowcomm_protocol.codecs.kernels import (
    INFINITE,
    MAGNITUDE,
    SMALLEST_SCALE,
    block_peak,
    checker,
    decoder,
    encoder,
    kernel,
    part,
    scale_bits,
    scale_holds,
    sender,
    write_scale,
)
from lowcomm_protocol.spec.names import BLOCK

BLOCK_BYTES = 4 + BLOCK // 2

LARGEST_SCALE = np.float32((2.0 - 2.0**-23) * 2.0**123)
"""The largest float32 divided by 16."""


@part
def _nibble(value: Any, scale: Any) -> Any:
    """Sign and exponent code of one value: the nearest magnitude, a tie goes to the larger one,
    zero has no sign."""
    bits = np.float32(value / scale).view(np.uint32)
    ratio = np.int32(bits & MAGNITUDE)
    # Adding half a mantissa carries into the exponent from 1.5 * 2**k on, the middle between 2**k
    # and 2**(k + 1).
    code = ((ratio + np.int32(0x00400000)) >> np.int32(23)) - np.int32(124)
    # Bits of 0.125, the middle between 0 and .25.
    nonzero = np.int32(ratio >= np.int32(0x3E000000))
    code = min(np.int32(7), max(code, nonzero))
    return np.uint8(code | (nonzero & np.int32(bits >> np.uint32(31))) << np.int32(3))


@part
def _magnitude(code: Any, scale: Any) -> Any:
    """Bits of what a nibble stands for: a power of two, made of its exponent, times the scale."""
    exponent = np.uint32(code) & np.uint32(7)
    power = (exponent + np.uint32(124)) << np.uint32(23) if exponent else np.uint32(0)
    value = np.float32(np.uint32(power).view(np.float32) * scale).view(np.uint32)
    return value | (np.uint32(code) & np.uint32(8)) << np.uint32(28)


@part
def _code(values: Vector, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any) -> bool:
    peak = np.uint32(block_peak(values.view(np.uint32)))
    if peak >= INFINITE:
        return False
    scale = np.float32(peak.view(np.float32) / np.float32(16.0))
    if scale < SMALLEST_SCALE:
        for i in range(np.uint64(BLOCK_BYTES)):
            out[at + i] = np.uint8(0)
        return True
    write_scale(out, at, scale)
    for i in range(np.uint64(BLOCK)):
        codes[i] = _nibble(values[i], scale)
    begin = at + np.uint64(4)
    for i in range(np.uint64(BLOCK // 2)):
        low, high = codes[np.uint64(2) * i], codes[np.uint64(2) * i + np.uint64(1)]
        out[begin + i] = low | high << np.uint8(4)
    return True


@part
def _holds(data: Bytes, at: Any) -> bool:
    bad, begin = np.uint8(0), at + np.uint64(4)
    for i in range(np.uint64(BLOCK // 2)):
        byte = data[begin + i]
        low, high = byte & np.uint8(0x0F), byte & np.uint8(0xF0)
        bad |= np.uint8(low == np.uint8(0x08)) | np.uint8(high == np.uint8(0x80))
    return scale_holds(scale_bits(data, at), LARGEST_SCALE) and bad == 0


@part
def _restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    scale, begin = np.uint32(scale_bits(data, at)).view(np.float32), at + np.uint64(4)
    bits = out.view(np.uint32)
    for i in range(np.uint64(BLOCK // 2)):
        byte, place = data[begin + i], start + np.uint64(2) * i
        bits[place] = _magnitude(byte & np.uint8(0x0F), scale)
        bits[place + np.uint64(1)] = _magnitude(byte >> np.uint8(4), scale)


_encode, _send = encoder(_code, BLOCK_BYTES), sender(_code, _restore, BLOCK_BYTES)
_check, _decode = checker(_holds, BLOCK_BYTES), decoder(_restore, BLOCK_BYTES)


@kernel
def e3m0_encode(values: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _encode(values, count, out)


@kernel
def e3m0_send(vector: Vector, residual: Vector, error: Vector, count: int, out: Bytes) -> Any:
    """See Kernels."""
    return _send(vector, residual, error, count, out)


@kernel
def e3m0_check(data: Bytes) -> Any:
    """See Kernels."""
    return _check(data)


@kernel
def e3m0_decode(data: Bytes, out: Vector) -> None:
    """See Kernels."""
    _decode(data, out)


class E3m0(BlockCodec):
    """About half a byte a value (132 bytes for 256)."""

    name = "e3m0"
    head, bits = 4, 4
    kernels = Kernels(e3m0_encode, e3m0_send, e3m0_check, e3m0_decode)


CODEC = E3m0()
