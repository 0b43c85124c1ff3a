"""bf16: the upper half of every float32, rounded to nearest, ties to even.

Layout, for ``numel`` values (``2 * numel`` bytes)::

    byte 2*i       value i, low byte:  last exponent bit, then 7 mantissa bits
    byte 2*i+1     value i, high byte: sign, then 7 exponent bits

NaN and infinity are refused on both sides, and so is a value that would round to infinity.
"""

import numpy as np

from lowcomm_protocol.codecs.base import CHUNK, Bytes, FixedCodec, Vector, largest_magnitude
from lowcomm_protocol.errors import CodecError

OVERFLOW = (2.0 - 2.0**-8) * 2.0**127
"""From here on a value is nearer to 2**128 than to the largest bf16 (the tie included: 2**128 is
the even one)."""

MAGNITUDE, INFINITY = np.uint16(0x7FFF), 0x7F80


class Bf16(FixedCodec):
    """Two bytes a value: 8 significant bits, the whole exponent range of float32."""

    name = "bf16"

    def _size(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if not largest_magnitude(vector) < OVERFLOW:  # "not <" catches NaN too
            raise self._refuse_value(vector, allowed=f"values below {OVERFLOW:.4g}")
        bits, codes = vector.view(np.uint32), out.view("<u2")
        for start in range(0, vector.size, CHUNK):
            part = bits[start : start + CHUNK]
            rounded = part >> 16
            rounded &= 1
            rounded += 0x7FFF
            rounded += part
            rounded >>= 16
            codes[start : start + CHUNK] = rounded

    def _decode(self, data: Bytes, out: Vector) -> None:
        codes, bits = data.view("<u2"), out.view(np.uint32)
        for start in range(0, out.size, CHUNK):
            if int((codes[start : start + CHUNK] & MAGNITUDE).max()) >= INFINITY:
                raise CodecError(
                    "bf16: the coded data holds NaN or infinity: drop this contribution"
                )
        for start in range(0, out.size, CHUNK):
            part = bits[start : start + CHUNK]
            part[:] = codes[start : start + CHUNK]
            part <<= 16


CODEC = Bf16()
