"""fp32: the values as they are.

Layout, for ``numel`` values (``4 * numel`` bytes)::

    byte 4*i .. 4*i+3    value i, IEEE 754 binary32, little-endian

NaN and infinity are refused on both sides.
"""

from typing import Any

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import INFINITE, kernel, peak_of
from lowcomm_protocol.errors import CodecError


class Fp32(FixedCodec):
    """Four bytes a value, exact."""

    name = "fp32"
    is_exact = True

    def _size(self, numel: int) -> int:
        return 4 * numel

    def send(self, vector: Vector, out: memoryview) -> int:
        """See Codec."""
        return self.encode(vector, out)  # what others decode is the vector itself

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if not _is_finite(vector):
            raise self._refuse_value(vector)
        out.view("<f4")[:] = vector

    def _decode(self, data: Bytes, out: Vector) -> None:
        values = data.view("<f4")
        if not _is_finite(values):
            raise CodecError("fp32: the coded data holds NaN or infinity: drop this contribution")
        out[:] = values


@kernel
def _largest(bits: Any) -> Any:
    return peak_of(bits, 0, bits.size)


def _is_finite(values: Vector) -> bool:
    """Whether no value is NaN or infinite: one pass."""
    return bool(_largest(values.view("<u4")) < INFINITE)


CODEC = Fp32()
