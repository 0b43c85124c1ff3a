"""q1: one bit a value, its sign, in blocks of 256 behind a scale of the mean magnitude.

Layout: blocks stand one after the other, each ``2 + ceil(count / 8)`` bytes, where count is 256 and less only in the
last one::

    byte 0 .. 1   scale, bf16, little-endian: 0, or from 2**-100 to (largest bf16)
    byte 2 + i    bits 0 .. 7: values 8*i .. 8*i+7, the first in the lowest bit; 0 after the last value

    value = scale where the bit is 0, -scale where it is 1

No other scale has a smaller squared error for these signs. It is summed in integers, rounded to float32 and then to bf16,
nearest even. Zero counts as positive. A block with a scale below 2**-100 is all zero bytes. Coding decoded values again
gives the same bytes: their mean magnitude is the scale. Of a Gaussian 0.36 of the mean square is lost (1 - 2 / pi), so it
takes error feedback. Source: Karimireddy et al., EF-SignSGD, 1901.09847.
"""

from lowcomm_protocol.codecs.base import Bytes, Codec, Vector
from lowcomm_protocol.codecs.kernels import BLOCK, q1_check, q1_decode, q1_encode
from lowcomm_protocol.errors import CodecError


class Q1(Codec):
    """About an eighth of a byte a value (34 bytes for 256)."""

    name = "q1"

    def _size(self, numel: int) -> int:
        return (numel + 7) // 8 + 2 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if q1_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = q1_check(data, out.size)
        if block >= 0:
            raise CodecError(f"q1: block {block} holds a scale or a bit that is not valid: drop this contribution")
        q1_decode(data, out)
