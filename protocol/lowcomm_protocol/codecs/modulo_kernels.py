"""The compiled loops of the modulo codecs (modulo.py).

Apart from it, so that the fuzzer can instrument that file.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, Vector
from lowcomm_protocol.codecs.kernels import bf16_in, bf16_out, kernel, part, peak_of
from lowcomm_protocol.spec.names import BLOCK

MODULO_STEPS = np.array(
    [0.0]
    + [
        np.float32(m) * np.float32(2.0) ** (i - 40)
        for i in range(64)
        for m in (1.0, 1.189207, 1.414214, 1.681793)
    ],
    dtype=np.float32,
)[:256]
"""Step of each code: a quarter of an octave apart, from 2**-40 on; code 0 marks a block in bf16."""

BF16_OVERFLOW = np.uint32(0x7F7F8000)
"""Bits of the smallest value that bf16 rounds to infinity."""

MODULO_FAR = np.float32(2.0**22)
"""Lattice points are counted in int32 and must be exact in float32."""


@part
def _modulo_code(wanted: Any) -> Any:
    """The code of the smallest step that is at least ``wanted``; 0 if there is none."""
    low, high = 1, 256
    while low < high:
        middle = (low + high) // 2
        if MODULO_STEPS[middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return low if low < 256 else 0


@part
def _mixed(hash_: Any, value: Any) -> Any:
    """One more lattice point into a block's 64-bit hash."""
    hash_ = (hash_ ^ np.uint64(np.uint32(value))) * np.uint64(0x9E3779B97F4A7C15)
    return hash_ ^ (hash_ >> np.uint64(29))


@part
def _modulo_bytes(code: Any, count: int, bits: int) -> int:
    return 2 * count if code == 0 else (count * bits + 7) // 8


@kernel
def modulo_encode(
    values: Vector, wanted: Vector, bits: int, out: Bytes, decoded: Vector, hashes: Any
) -> int:
    """Code all blocks with steps of at least ``wanted`` (below 0: none is known); bytes, or -1 -
    block if not finite.

    ``decoded`` gets what the others will decode, ``hashes`` the hash of each block's lattice
    points, 0 for bf16.
    """
    patterns = values.view(np.uint32)
    blocks = (values.size + BLOCK - 1) // BLOCK
    mask = np.uint32((1 << bits) - 1)
    at = 4 * blocks
    for block in range(blocks):
        start, stop = block * BLOCK, min(values.size, (block + 1) * BLOCK)
        peak_bits = np.uint32(peak_of(patterns, start, stop))
        if peak_bits >= BF16_OVERFLOW:
            return -1 - block
        peak = peak_bits.view(np.float32)
        code = 0
        if wanted[block] >= 0:
            code = _modulo_code(max(wanted[block], peak / MODULO_FAR))
            if MODULO_STEPS[code] > peak * np.float32(2.0 ** (2 - bits)):
                code = 0  # the peers differ by what they are: bf16 stops that from growing
        hash_ = np.uint64(0)
        if code == 0:
            for i in range(start, stop):
                decoded[i] = bf16_out(values[i], out, at)
                at += 2
        else:
            hash_ = np.uint64(block + 1)
            step = MODULO_STEPS[code]
            waiting, held = np.uint32(0), 0
            for i in range(start, stop):
                point = np.int32(np.floor(values[i] / step + np.float32(0.5)))
                decoded[i] = np.float32(point) * step
                hash_ = _mixed(hash_, point)
                waiting |= (np.uint32(point) & mask) << np.uint32(held)
                held += bits
                while held >= 8:
                    out[at] = np.uint8(waiting & np.uint32(0xFF))
                    at += 1
                    waiting >>= np.uint32(8)
                    held -= 8
            if held > 0:
                out[at] = np.uint8(waiting & np.uint32(0xFF))
                at += 1
        hashes[block] = hash_
        out[4 * block] = code
        for k in range(3):
            out[4 * block + 1 + k] = np.uint8((hash_ >> np.uint64(8 * k)) & np.uint64(0xFF))
    return at


@kernel
def modulo_check(data: Bytes, numel: int, bits: int) -> int:
    """Bytes of the header and all blocks, or -1 if the data is shorter or holds what no encoder
    writes."""
    blocks = (numel + BLOCK - 1) // BLOCK
    at = 4 * blocks
    if data.size < at:
        return -1
    for block in range(blocks):
        count = min(numel - block * BLOCK, BLOCK)
        size = _modulo_bytes(data[4 * block], count, bits)
        if at + size > data.size:
            return -1
        if data[4 * block] == 0:
            for i in range(at + 1, at + size, 2):
                if (data[i] & 0x7F) == 0x7F and data[i - 1] & 0x80:
                    return -1
            if data[4 * block + 1] | data[4 * block + 2] | data[4 * block + 3]:
                return -1
        elif count * bits % 8 and data[at + size - 1] >> (count * bits % 8):
            return -1
        at += size
    return at


@kernel
def modulo_decode(data: Bytes, own: Vector, bits: int, out: Vector, hashes: Any, bad: Any) -> int:
    """Decode data that `modulo_check` has passed, each block next to ``own``.

    Returns how many blocks wrapped; ``bad`` marks them.
    """
    blocks = (own.size + BLOCK - 1) // BLOCK
    size, half = np.int32(1 << bits), np.int32(1 << (bits - 1))
    mask = np.uint32(size - 1)
    at, wrapped = 4 * blocks, 0
    for block in range(blocks):
        start, stop = block * BLOCK, min(own.size, (block + 1) * BLOCK)
        bad[block] = 0
        hashes[block] = np.uint64(0)
        if data[4 * block] == 0:
            for i in range(start, stop):
                out[i] = bf16_in(data, at)
                at += 2
            continue
        step = MODULO_STEPS[data[4 * block]]
        end = at + _modulo_bytes(data[4 * block], stop - start, bits)
        hash_, waiting, held, far = np.uint64(block + 1), np.uint32(0), 0, False
        for i in range(start, stop):
            while held < bits:
                waiting |= np.uint32(data[at]) << np.uint32(held)
                at += 1
                held += 8
            code = np.int32(waiting & mask)
            waiting >>= np.uint32(bits)
            held -= bits
            place = np.floor(own[i] / step + np.float32(0.5))
            far |= not abs(place) < MODULO_FAR + MODULO_FAR
            near = np.int32(max(-MODULO_FAR - MODULO_FAR, min(MODULO_FAR + MODULO_FAR, place)))
            apart = (code - near) & np.int32(mask)
            if apart >= half:
                apart -= size
            point = near + apart
            out[i] = np.float32(point) * step
            hash_ = _mixed(hash_, point)
        at = end
        hashes[block] = hash_
        sent = np.uint64(0)
        for k in range(3):
            sent |= np.uint64(data[4 * block + 1 + k]) << np.uint64(8 * k)
        if far or (hash_ & np.uint64(0xFFFFFF)) != sent:
            bad[block] = 1
            wrapped += 1
    return wrapped


@kernel
def modulo_total(hashes: Any, bad: Any) -> Any:
    """One 64-bit check over the blocks that are not ``bad``."""
    total = np.uint64(1)
    for block in range(hashes.size):
        if not bad[block]:
            total = (total ^ hashes[block]) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(32)
    return total


@kernel
def modulo_resend(values: Vector, bad: Any, out: Bytes, decoded: Vector) -> int:
    """Write the ``bad`` blocks in bf16, and note in ``decoded`` what the other end has now.

    Returns the bytes written.
    """
    at = 0
    for block in range(bad.size):
        if bad[block]:
            for i in range(block * BLOCK, min(values.size, (block + 1) * BLOCK)):
                decoded[i] = bf16_out(values[i], out, at)
                at += 2
    return at


@kernel
def modulo_patch(data: Bytes, bad: Any, out: Vector) -> int:
    """Read blocks that were sent again; -1, or the first that is not finite."""
    at = 0
    for block in range(bad.size):
        if bad[block]:
            for i in range(block * BLOCK, min(out.size, (block + 1) * BLOCK)):
                if (data[at + 1] & 0x7F) == 0x7F and data[at] & 0x80:
                    return block
                out[i] = bf16_in(data, at)
                at += 2
    return -1


@kernel
def modulo_ranges(own: Vector, theirs: Vector, decay: Any, ranges: Vector) -> None:
    """Move each block's range to what was seen now, or slowly down to it."""
    for block in range(ranges.size):
        seen = np.float32(0.0)
        for i in range(block * BLOCK, min(own.size, (block + 1) * BLOCK)):
            seen = max(seen, abs(own[i] - theirs[i]))
        ranges[block] = max(seen, ranges[block] * np.float32(decay), np.float32(2.0**-60))
