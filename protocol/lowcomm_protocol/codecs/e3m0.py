"""e3m0: 4 bits a value (1 sign bit, 3 exponent bits, no mantissa) in blocks of 256 behind a scale of absmax / 16.

Layout: blocks stand one after the other, each ``4 + ceil(count / 2)`` bytes, where count is 256 and less only in the
last one::

    byte 0 .. 3   scale, IEEE 754 binary32, little-endian: 0, or from 2**-100 to (largest float32) / 16
    byte 4 + i    low nibble (bits 0-3): value 2*i;  high nibble (bits 4-7): value 2*i+1, or 0 after an odd end

    nibble: bit 3 is the sign, bits 0-2 are the exponent code e
    magnitude = 0 for e = 0, else scale * 2**(e - 3):  {0, .25, .5, 1, 2, 4, 8, 16} * scale

The nearest magnitude is taken; a tie goes to the larger one. Zero has no sign: nibble 8 is never written and refused.
A block with a scale below 2**-100 is all zero bytes. Source of the format: Streaming DiLoCo, 2501.18512.
"""

from lowcomm_protocol.codecs.base import Bytes, Codec, Vector
from lowcomm_protocol.codecs.kernels import BLOCK, e3m0_check, e3m0_decode, e3m0_encode
from lowcomm_protocol.errors import CodecError


class E3m0(Codec):
    """About half a byte a value (132 bytes for 256)."""

    name = "e3m0"

    def _size(self, numel: int) -> int:
        return (numel + 1) // 2 + 4 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if e3m0_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = e3m0_check(data, out.size)
        if block >= 0:
            raise CodecError(f"e3m0: block {block} holds a scale or a nibble that is not valid: drop this contribution")
        e3m0_decode(data, out)
