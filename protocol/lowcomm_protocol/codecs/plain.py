"""Codecs without scales: fp32 and bf16 (docs/codecs.md). NaN and infinity are refused."""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import CHUNK, Bytes, FixedCodec, Vector, largest_magnitude
from lowcomm_protocol.codecs.kernels import INFINITE, kernel, peak_of
from lowcomm_protocol.errors import CodecError


class Fp32(FixedCodec):
    """Four bytes a value, exact: IEEE 754 binary32, little-endian."""

    name = "fp32"
    is_exact = True

    def _size(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if _largest(vector.view("<u4")) >= INFINITE:
            raise self._refuse_value(vector)
        out.view("<f4")[:] = vector

    def _decode(self, data: Bytes, out: Vector) -> None:
        values = data.view("<f4")
        if _largest(values.view("<u4")) >= INFINITE:
            raise CodecError("fp32: the coded data holds NaN or infinity: drop this contribution")
        out[:] = values


@kernel
def _largest(bits: Any) -> Any:
    return peak_of(bits, 0, bits.size)


OVERFLOW = (2.0 - 2.0**-8) * 2.0**127
"""From here on a value is as near to 2**128 as to the largest bf16, or nearer."""

BF16_MAGNITUDE, BF16_INFINITY = np.uint16(0x7FFF), 0x7F80


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
            if int((codes[start : start + CHUNK] & BF16_MAGNITUDE).max()) >= BF16_INFINITY:
                raise CodecError(
                    "bf16: the coded data holds NaN or infinity: drop this contribution"
                )
        for start in range(0, out.size, CHUNK):
            part = bits[start : start + CHUNK]
            part[:] = codes[start : start + CHUNK]
            part <<= 16


FP32, BF16 = Fp32(), Bf16()
