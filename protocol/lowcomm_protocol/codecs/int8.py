"""int8: blocks of 256 values behind a scale of absmax / 127.

Layout: blocks stand one after the other, each ``4 + count`` bytes, where count is 256 and less only in the last one::

    byte 0 .. 3          scale, IEEE 754 binary32, little-endian: 0, or from 2**-100 to 66052 * 2**105
    byte 4 .. 4+count-1  codes, two's complement, -127 .. 127 (-128 is never written and refused)

    value = code * scale

The scale is absmax / 127 rounded to 17 significant bits. So the product is exact in float32, and coding decoded values
again gives the same bytes. Codes are nearest, ties to even. A block with a scale below 2**-100 is all zero bytes.
"""

from lowcomm_protocol.codecs.base import Bytes, Codec, Vector
from lowcomm_protocol.codecs.kernels import BLOCK, int8_check, int8_decode, int8_encode
from lowcomm_protocol.errors import CodecError


class Int8(Codec):
    """About one byte a value (260 bytes for 256)."""

    name = "int8"

    def _size(self, numel: int) -> int:
        return numel + 4 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if int8_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = int8_check(data, out.size)
        if block >= 0:
            raise CodecError(f"int8: block {block} holds a scale or a code that is not valid: drop this contribution")
        int8_decode(data, out)
