"""Codecs of blocks: 256 values behind a scale, each block coded by itself.

docs/protocol.md has the layout of each. `BlockCodec` cuts vectors for the loops over whole blocks
(`Kernels`): a last block that is shorter is coded with zeros behind its values, and those are cut
off again. ``count`` is 256, and less only in the last block.

int8's scale is rounded to 17 bits, so the product with a code is exact in float32. q2's scale is
fitted in three rounds of Lloyd's algorithm, or is the mean if all values would take the outer
level. So coding decoded values again gives the same bytes. Of a Gaussian q2 loses 0.117 of the mean
square: the least that four levels can do (Max, 1960) within 1 %.
"""

from typing import Any, ClassVar

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.kernels import (
    MAGNITUDE,
    SIGN,
    SMALLEST_SCALE,
    SMALLEST_SCALE_BITS,
    Kernels,
    integers_of,
    loops,
    nearest,
    part,
    scale_bits,
    scale_holds,
    short_block_holds,
    short_scale,
    write_scale,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK


class BlockCodec(FixedCodec):
    """``bits`` a value behind a scale of ``head`` bytes."""

    head: ClassVar[int]
    bits: ClassVar[int]
    kernels: ClassVar[Kernels]

    def send(self, vector: Vector, out: memoryview) -> int:
        """Code ``vector``, which becomes what the others decode."""
        self._check_vector(vector)
        self._send(vector, self._bytes(out, vector.size, writable=True))
        return memoryview(out).nbytes

    def _send(self, vector: Vector, out: Bytes) -> None:
        whole, end = self._cut(vector.size)
        bad, rest = self.kernels.send(vector[:whole], BLOCK, out[:end]), vector.size - whole
        if bad < 0 and rest:
            padded, last = np.zeros(BLOCK, dtype=np.float32), np.empty(self._size(BLOCK), np.uint8)
            padded[:rest] = vector[whole:]
            bad = self.kernels.send(padded, rest, last)
            if bad < 0:
                vector[whole:], out[end:] = padded[:rest], last[: out.size - end]
        if bad >= 0:
            raise self._refuse_value(vector)

    def _size(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8 + self.head * -(-numel // BLOCK)

    def _cut(self, numel: int) -> tuple[int, int]:
        """Values in whole blocks, and their bytes."""
        whole = numel // BLOCK * BLOCK
        return whole, self._size(whole)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        self._send(vector.copy(), out)

    def _decode(self, data: Bytes, out: Vector) -> None:
        whole, end = self._cut(out.size)
        rest = out.size - whole
        last = np.zeros(self._size(BLOCK), dtype=np.uint8)
        last[: data.size - end] = data[end:]
        last.flags.writeable = False
        bad = self.kernels.check(data[:end])
        if bad < 0 and rest:
            used = rest * self.bits % 8
            filled = used and data[-1] >> used
            bad = whole // BLOCK if filled or self.kernels.check(last) >= 0 else -1
        if bad >= 0:
            raise CodecError(
                f"{self.name}: block {bad} holds a scale or a code that is not valid: drop this "
                "contribution"
            )
        self.kernels.decode(data[:end], out[:whole])
        if rest:
            padded = np.empty(BLOCK, dtype=np.float32)
            self.kernels.decode(last, padded)
            out[whole:] = padded[:rest]


# int8

INT8_LARGEST_SCALE = np.float32(66052.0 * 2.0**105)
"""The largest float32 divided by 127, rounded to 17 significant bits: 127 times it is finite."""

INT8_SCALE_HALF, INT8_SCALE_KEPT = np.uint32(0x40), np.uint32(0xFFFFFF80)
"""Rounds a scale to 17 significant bits; codes have 7, so products fit float32."""


@part
def _int8_code(
    block: Vector, peak: Any, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any
) -> bool:
    scale = np.float32(np.uint32(peak).view(np.float32) / np.float32(127.0))
    scale = np.uint32((scale.view(np.uint32) + INT8_SCALE_HALF) & INT8_SCALE_KEPT).view(np.float32)
    if scale < SMALLEST_SCALE:
        return False
    write_scale(out, at, scale, 0)
    begin = at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        out[begin + i] = np.uint8(nearest(block[i] / scale))
    return True


@part
def _int8_holds(data: Bytes, at: Any) -> bool:
    bad, begin = np.uint8(0), at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        bad |= np.uint8(data[begin + i] == np.uint8(0x80))
    return scale_holds(scale_bits(data, at, 0), INT8_LARGEST_SCALE) and bad == 0


@part
def _int8_restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    scale, begin = np.uint32(scale_bits(data, at, 0)).view(np.float32), at + np.uint64(4)
    for i in range(np.uint64(BLOCK)):
        out[start + i] = np.float32(np.int8(data[begin + i])) * scale


class Int8(BlockCodec):
    """About one byte a value (260 bytes for 256)."""

    name = "int8"
    head, bits = 4, 8
    kernels = loops(_int8_code, _int8_holds, _int8_restore, 4 + BLOCK)


# e3m0

E3M0_LARGEST_SCALE = np.float32((2.0 - 2.0**-23) * 2.0**123)
"""The largest float32 divided by 16."""


@part
def _e3m0_nibble(value: Any, scale: Any) -> Any:
    """Sign and exponent code of the nearest magnitude; of two the larger, zero has no sign."""
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
def _e3m0_magnitude(code: Any, scale: Any) -> Any:
    """Bits of what a nibble stands for: a power of two, made of its exponent, times the scale."""
    exponent = np.uint32(code) & np.uint32(7)
    power = (exponent + np.uint32(124)) << np.uint32(23) if exponent else np.uint32(0)
    value = np.float32(np.uint32(power).view(np.float32) * scale).view(np.uint32)
    return value | (np.uint32(code) & np.uint32(8)) << np.uint32(28)


@part
def _e3m0_code(
    block: Vector, peak: Any, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any
) -> bool:
    scale = np.float32(np.uint32(peak).view(np.float32) / np.float32(16.0))
    if scale < SMALLEST_SCALE:
        return False
    write_scale(out, at, scale, 0)
    for i in range(np.uint64(BLOCK)):
        codes[i] = _e3m0_nibble(block[i], scale)
    begin = at + np.uint64(4)
    for i in range(np.uint64(BLOCK // 2)):
        low, high = codes[np.uint64(2) * i], codes[np.uint64(2) * i + np.uint64(1)]
        out[begin + i] = low | high << np.uint8(4)
    return True


@part
def _e3m0_holds(data: Bytes, at: Any) -> bool:
    bad, begin = np.uint8(0), at + np.uint64(4)
    for i in range(np.uint64(BLOCK // 2)):
        byte = data[begin + i]
        low, high = byte & np.uint8(0x0F), byte & np.uint8(0xF0)
        bad |= np.uint8(low == np.uint8(0x08)) | np.uint8(high == np.uint8(0x80))
    return scale_holds(scale_bits(data, at, 0), E3M0_LARGEST_SCALE) and bad == 0


@part
def _e3m0_restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    scale, begin = np.uint32(scale_bits(data, at, 0)).view(np.float32), at + np.uint64(4)
    bits = out.view(np.uint32)
    for i in range(np.uint64(BLOCK // 2)):
        byte, place = data[begin + i], start + np.uint64(2) * i
        bits[place] = _e3m0_magnitude(byte & np.uint8(0x0F), scale)
        bits[place + np.uint64(1)] = _e3m0_magnitude(byte >> np.uint8(4), scale)


class E3m0(BlockCodec):
    """About half a byte a value (132 bytes for 256)."""

    name = "e3m0"
    head, bits = 4, 4
    kernels = loops(_e3m0_code, _e3m0_holds, _e3m0_restore, 4 + BLOCK // 2)


# q2

Q2_LARGEST_SCALE = np.float32(146.0 * 2.0**119)
"""The largest bf16 of which 3.5 times is finite in float32."""

Q2_ROUNDS = 3
"""Rounds that fit a scale to the values; a fourth would lower the error by about 1 %."""


@part
def _q2_fitted(integers: Any, count: int, total: Any, peak: Any) -> Any:
    """Scale of the levels 1 and 3.5, by least squares for the values nearest to each.

    At first the values above the mean take the outer level.
    """
    threshold, upper, lower = total // count, total, np.int64(count)
    for _ in range(Q2_ROUNDS):
        least, outer, outside = np.int32(threshold), np.uint32(0), np.uint32(0)
        for i in range(np.uint64(BLOCK)):
            far = integers[i] > least
            outer = np.uint32(outer + np.uint32(far))
            outside = np.uint32(outside + (np.uint32(integers[i]) if far else np.uint32(0)))
        # Both sums 4 times: 4 * (inside + 3.5 * outside) over 4 * (inner + 12.25 * outer), so that
        # all stays whole.
        upper = 4 * total + 10 * np.int64(outside)
        lower = 4 * np.int64(count) + 45 * np.int64(outer)
        threshold = 9 * upper // (4 * lower)
    return short_scale(upper, lower, peak, Q2_LARGEST_SCALE)


@part
def _q2_edge(scale: Any) -> Any:
    """Bits of the middle between both levels."""
    return np.float32(scale * np.float32(2.25)).view(np.uint32)


@part
def _q2_code(
    block: Vector, peak: Any, count: int, integers: Any, codes: Bytes, out: Bytes, at: Any
) -> bool:
    bits, scale = block.view(np.uint32), np.float32(0.0)
    if peak >= SMALLEST_SCALE_BITS:
        total = integers_of(block, peak, integers)
        scale = _q2_fitted(integers, count, total, peak)
        reaching, edge = np.uint32(0), np.uint32(_q2_edge(scale))
        for i in range(np.uint64(BLOCK)):
            reaching = np.uint32(reaching + np.uint32((bits[i] & MAGNITUDE) >= edge))
        if reaching >= count:
            # All would be outer: the inner level holds them as well, and codes them again.
            scale = short_scale(total, count, peak, Q2_LARGEST_SCALE)
    if scale == 0:
        return False
    write_scale(out, at, scale, 2)
    edge = np.uint32(_q2_edge(scale))
    for i in range(np.uint64(BLOCK)):
        outer = np.uint8((bits[i] & MAGNITUDE) >= edge)
        codes[i] = outer | np.uint8(bits[i] > SIGN) << np.uint8(1)
    begin = at + np.uint64(2)
    for i in range(np.uint64(BLOCK // 4)):
        code = np.uint8(0)
        for k in range(np.uint64(4)):
            code |= codes[np.uint64(4) * i + k] << np.uint8(np.uint64(2) * k)
        out[begin + i] = code
    return True


@part
def _q2_holds(data: Bytes, at: Any) -> Any:
    return short_block_holds(data, at, 2 + BLOCK // 4, Q2_LARGEST_SCALE)


@part
def _q2_restore(data: Bytes, at: Any, out: Vector, start: Any) -> None:
    inner = np.uint32(scale_bits(data, at, 2))
    outer = np.float32(inner.view(np.float32) * np.float32(3.5)).view(np.uint32)
    bits, begin = out.view(np.uint32), at + np.uint64(2)
    for i in range(np.uint64(BLOCK // 4)):
        byte, place = np.uint32(data[begin + i]), start + np.uint64(4) * i
        for k in range(np.uint64(4)):
            code = byte >> np.uint32(np.uint64(2) * k)
            level = outer if code & np.uint32(1) else inner
            bits[place + k] = level | (code & np.uint32(2)) << np.uint32(30)


class Q2(BlockCodec):
    """About a quarter of a byte a value (66 bytes for 256)."""

    name = "q2"
    head, bits = 2, 2
    kernels = loops(_q2_code, _q2_holds, _q2_restore, 2 + BLOCK // 4)


INT8, E3M0, Q2_CODEC = Int8(), E3m0(), Q2()
