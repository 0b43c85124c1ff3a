"""fp32: the values as they are.

Layout, for ``numel`` values (``4 * numel`` bytes)::

    byte 4*i .. 4*i+3    value i, IEEE 754 binary32, little-endian

NaN and infinity are refused on both sides.
"""

import math

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector, largest_magnitude
from lowcomm_protocol.errors import CodecError


class Fp32(FixedCodec):
    """Four bytes a value, exact."""

    name = "fp32"
    in_blocks = True
    is_exact = True

    def _size(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if not math.isfinite(largest_magnitude(vector)):
            raise self._refuse_value(vector)
        out.view("<f4")[:] = vector

    def _decode(self, data: Bytes, out: Vector) -> None:
        values = data.view("<f4")
        if not math.isfinite(largest_magnitude(values)):
            raise CodecError("fp32: the coded data holds NaN or infinity: drop this contribution")
        out[:] = values


CODEC = Fp32()
