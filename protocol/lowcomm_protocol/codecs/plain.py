"""Codecs without scales: fp32 and bf16 (docs/protocol.md). NaN and infinity are refused."""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import BF16_OVERFLOW, INFINITE, bf16_of, kernel, peak_of
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


@kernel
def _rounded(values: Vector, codes: Any) -> None:
    for i in range(np.uint64(values.size)):
        codes[i] = np.float32(bf16_of(values[i])).view(np.uint32) >> np.uint32(16)


class Bf16(FixedCodec):
    """Two bytes a value: 8 significant bits, the whole exponent range of float32."""

    name = "bf16"

    def _size(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, vector: Vector, out: Bytes) -> None:
        if _largest(vector.view("<u4")) >= BF16_OVERFLOW:
            most = float(BF16_OVERFLOW.view(np.float32))
            raise self._refuse_value(vector, allowed=f"values below {most:.4g}")
        _rounded(vector, out.view("<u2"))

    def _decode(self, data: Bytes, out: Vector) -> None:
        codes, bits = data.view("<u2"), out.view(np.uint32)
        positive, negative = codes.view("<i2").max(initial=0), codes.max(initial=0)
        if positive >= 0x7F80 or negative >= 0xFF80:
            raise CodecError("bf16: the coded data holds NaN or infinity: drop this contribution")
        bits[:] = codes
        bits <<= 16


FP32, BF16 = Fp32(), Bf16()
