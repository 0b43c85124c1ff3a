"""modN: lattice points modulo 2**bits, for pairs whose vectors are close to each other.

The sender counts its values in steps, ``k = floor(value / step + 0.5)``, and sends the remainder
``k mod 2**bits``. The receiver takes the lattice point with that remainder that lies nearest to its
own value. So absolute values travel in few bits as long as the peers differ by less than ``2**(bits
- 1)`` steps. Both ends know the sender's lattice points exactly, so both compute the same mean.
Quantizing modulo a lattice goes back to Davies et al., 2002.09268.

Layout, for B blocks of 256 values (the last may be shorter)::

    4 * B bytes     a block's header:  byte 0       step code c: 0, or step = 2**(c // 4 - 40) * 2**((c % 4) / 4), c - 1 for c
                                       byte 1 .. 3  low 24 bits of the hash of its lattice points (0
                                       for c = 0)
    then per block  c > 0: its remainders, ``bits`` each, lowest bits first, padded with zeros to a
    byte c = 0: its values as bf16, little-endian
    8 bytes         check over the hashes of all blocks with c > 0, little-endian

A block that wrapped (a hash that does not match) is asked for again and comes as bf16; the answer
ends with the check over the other blocks. So the ends agree unless 64 bits collide. Steps come from
the range of differences that this peer has seen in a block: ``step = 2 * MARGIN * range /
2**bits``. A block with no known range, or one whose range is as large as its largest value, goes as
bf16, which keeps a range that is too large from making itself larger.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.codecs.coder import Coder, State
from lowcomm_protocol.codecs.modulo_kernels import (
    MODULO_STEPS,
    modulo_check,
    modulo_decode,
    modulo_encode,
    modulo_patch,
    modulo_ranges,
    modulo_resend,
    modulo_total,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

MARGIN = 2.0
"""How many times the range that was seen a step provides for."""
DECAY = 0.8
"""How much of its range a block keeps after an exchange in which its peers were closer."""
HEADER, TOTAL = 4, 8

Flags = npt.NDArray[np.uint8]


class ModuloCoder(Coder):
    """Remembers the range of differences of each block; ``bits`` from 2 to 8."""

    def __init__(self, bits: int, numel: int) -> None:
        self.name = f"mod{bits}"
        self.bits = bits
        self.numel = numel
        self._blocks = -(-numel // BLOCK)
        self._ranges = np.full(self._blocks, -1.0, dtype=np.float32)
        self._own: Vector | None = None
        self._theirs: Vector | None = None
        self._sent_hashes = np.zeros(self._blocks, dtype=np.uint64)
        self._hashes = np.zeros(self._blocks, dtype=np.uint64)
        self._bad: Flags = np.zeros(self._blocks, dtype=np.uint8)
        self._codes: Flags = np.zeros(self._blocks, dtype=np.uint8)

    @property
    def max_size(self) -> int:
        """See Coder."""
        return HEADER * self._blocks + 2 * self.numel + TOTAL

    @property
    def min_size(self) -> int:
        """See Coder."""
        return HEADER * self._blocks + self.numel * self.bits // 8 + TOTAL

    @property
    def lattice_steps(self) -> Vector:
        """See Coder."""
        return np.where(self._bad, np.float32(0.0), MODULO_STEPS[self._codes])

    def encode(self, vector: Vector, out: memoryview) -> int:
        """See Coder."""
        target = np.frombuffer(out, dtype=np.uint8)
        if target.size < self.max_size or vector.size != self.numel:
            raise CodecError(
                f"{self.name}: {self.numel} values need a buffer of {self.max_size} bytes"
            )
        self._own = vector.copy()
        self._theirs = None
        wanted = self._ranges * np.float32(2.0 * MARGIN / (1 << self.bits))
        size = modulo_encode(self._own, wanted, self.bits, target, vector, self._sent_hashes)
        if size < 0:
            raise CodecError(f"{self.name}: block {-1 - size} is not finite: nothing is sent")
        return self._end(target, size, self._sent_hashes, np.zeros_like(self._bad))

    def decode(self, data: memoryview, out: Vector) -> bytes:
        """See Coder."""
        own, coded = self._known(), np.frombuffer(data, dtype=np.uint8)
        end = modulo_check(coded, self.numel, self.bits)
        if end < 0 or coded.size != end + TOTAL or out.size != self.numel:
            raise CodecError(
                f"{self.name}: {coded.size} bytes are no fragment of {self.numel} values: drop "
                "this peer"
            )
        self._theirs = out
        self._codes = coded[: HEADER * self._blocks : HEADER].copy()
        wrapped = modulo_decode(coded, own, self.bits, out, self._hashes, self._bad)
        if not wrapped and self._total(self._hashes, self._bad) != bytes(coded[end:]):
            self._bad[:] = 1  # two errors that cancel: very rare, so everything comes again
            wrapped = self._blocks
        return np.packbits(self._bad).tobytes() if wrapped else b""

    def resent_size(self, blocks: bytes) -> int:
        """See Coder."""
        return 2 * self._values_of(self._flags(blocks)) + TOTAL

    def resend(self, blocks: bytes, vector: Vector, out: memoryview) -> int:
        """See Coder."""
        own, flags = self._known(), self._flags(blocks)
        target = np.frombuffer(out, dtype=np.uint8)
        if target.size < self.resent_size(blocks):
            raise CodecError(
                f"{self.name}: the blocks need a buffer of {self.resent_size(blocks)} bytes"
            )
        return self._end(
            target, modulo_resend(own, flags, target, vector), self._sent_hashes, flags
        )

    def patch(self, data: memoryview, out: Vector) -> None:
        """See Coder."""
        coded, size = np.frombuffer(data, dtype=np.uint8), 2 * self._values_of(self._bad)
        if coded.size != size + TOTAL or modulo_patch(coded, self._bad, out) >= 0:
            raise CodecError(
                f"{self.name}: what came again is not what was asked for: drop this peer"
            )
        if self._total(self._hashes, self._bad) != bytes(coded[size:]):
            raise CodecError(
                f"{self.name}: the fragment does not match its check: drop this contribution"
            )

    def commit(self) -> None:
        """See Coder."""
        own = self._known()
        if self._theirs is not None:
            modulo_ranges(own, self._theirs, DECAY, self._ranges)
        self._own = self._theirs = None

    def forget(self) -> None:
        """See Coder."""
        self._own = self._theirs = None

    def state(self) -> State:
        """See Coder."""
        return {"range": self._ranges.copy()}

    def lessons(self) -> State:
        """See Coder."""
        return self.state()

    def restore(self, state: State) -> None:
        """See Coder."""
        ranges = state.get("range")
        if (
            ranges is None
            or ranges.shape != self._ranges.shape
            or not bool(np.isfinite(ranges).all())
        ):
            raise CodecError(f"{self.name}: expected {self._blocks} finite ranges")
        self._ranges = np.array(ranges, dtype=np.float32)

    def _known(self) -> Vector:
        if self._own is None:
            raise CodecError(
                f"{self.name}: encode first: others are decoded next to our own vector"
            )
        return self._own

    def _flags(self, blocks: bytes) -> Flags:
        if len(blocks) != -(-self._blocks // 8):
            raise CodecError(
                f"{self.name}: a bitmap of {len(blocks)} bytes for {self._blocks} blocks: drop "
                "this peer"
            )
        flags = np.unpackbits(np.frombuffer(blocks, dtype=np.uint8))
        if flags[self._blocks :].any():
            raise CodecError(
                f"{self.name}: a bitmap that names blocks beyond the last: drop this peer"
            )
        return flags[: self._blocks].copy()

    def _values_of(self, flags: Flags) -> int:
        short = self._blocks * BLOCK - self.numel if self._blocks and flags[-1] else 0
        return int(flags.sum()) * BLOCK - short

    def _end(self, out: Flags, size: int, hashes: Any, bad: Flags) -> int:
        out[size : size + TOTAL] = np.frombuffer(self._total(hashes, bad), dtype=np.uint8)
        return size + TOTAL

    def _total(self, hashes: Any, bad: Flags) -> bytes:
        return int(modulo_total(hashes, bad)).to_bytes(TOTAL, "little")


MOD3, MOD4, MOD6, MOD8 = (partial(ModuloCoder, bits) for bits in (3, 4, 6, 8))
