"""q2: 2 bits a value, its sign and one of two magnitudes, in blocks of 256 behind a scale that fits them best.

Layout: blocks stand one after the other, each ``2 + ceil(count / 4)`` bytes, where count is 256 and less only in the
last one::

    byte 0 .. 1   scale, bf16, little-endian: 0, or from 2**-100 to 146 * 2**119
    byte 2 + i    values 4*i .. 4*i+3, 2 bits each, the first in the lowest bits; 0 after the last value

    2 bits: the high one is the sign, the low one says which magnitude
    magnitude = scale for 0, 3.5 * scale for 1

The nearest magnitude is taken; a tie goes to the larger one. Zero counts as positive. The scale is fitted in three rounds
of Lloyd's algorithm: at first values above the mean magnitude take the outer level, then each takes the nearest, and the
scale is that of least squares. It is summed in integers and rounded to float32 and then to bf16, nearest even. If all
values would take the outer level, the scale is their mean. So coding decoded values again gives the same bytes: the mean
lies between the levels, and the fit is exact. A block with a scale below 2**-100 is all zero bytes.

Of a Gaussian 0.117 of the mean square is lost: the least that four levels can do (Max, 1960) within 1 %. Heavier tails
lose less with a ratio of 3.5 than with the Gaussian's 3.34.
"""

from lowcomm_protocol.codecs.base import Bytes, Codec, Vector
from lowcomm_protocol.codecs.kernels import BLOCK, q2_check, q2_decode, q2_encode
from lowcomm_protocol.errors import CodecError


class Q2(Codec):
    """About a quarter of a byte a value (66 bytes for 256)."""

    name = "q2"

    def _size(self, numel: int) -> int:
        return (numel + 3) // 4 + 2 * -(-numel // BLOCK)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if q2_encode(vector, out) >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        block = q2_check(data, out.size)
        if block >= 0:
            raise CodecError(f"q2: block {block} holds a scale or a code that is not valid: drop this contribution")
        q2_decode(data, out)
