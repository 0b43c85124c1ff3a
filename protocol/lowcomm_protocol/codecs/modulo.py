"""modN: lattice points modulo 2**bits, for pairs whose vectors are close to each other.

The sender counts its values in steps and sends the remainders; the receiver takes the lattice point
with that remainder that lies nearest to its own value. So absolute values travel in few bits as
long as the peers differ by less than ``2**(bits - 1)`` steps. Both ends know the sender's lattice
points exactly, so both compute the same mean (Davies et al., 2002.09268). docs/protocol.md has the
layout, the hash, and how a block that wrapped is sent again.

Steps come from the range of differences that this peer has seen in a block. A block with no known
range, or one whose range is as large as its largest value, goes as bf16, which keeps a range that
is too large from making itself larger. A peer that knows how far its own values have moved
(``expect``) provides for that much in its first exchanges: the others have moved about as far.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowcomm_protocol.codecs import modulo_kernels as kernels
from lowcomm_protocol.codecs.base import Bytes, Coder, State, Vector, read_only
from lowcomm_protocol.codecs.modulo_kernels import HEADER, MODULO_STEPS
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

MARGIN = 2.0
"""How many times the range that was seen a step provides for."""
DECAY = 0.8
"""How much of its range a block keeps after an exchange in which its peers were closer."""
MOVED = 1.5
"""How many times the own movement a young range provides for, before the margin."""
YOUNG = 4
"""Exchanges until the ranges that were seen count alone."""
TOTAL = 8
"""Bytes of the check over all blocks."""


class ModuloCoder(Coder):
    """Remembers the range of differences of each block; ``bits`` is 3, 4, 6 or 8."""

    holds_uncoded = True

    def __init__(self, bits: int, numel: int) -> None:
        self.name = f"mod{bits}"
        self.bits = bits
        self.numel = numel
        self._blocks = -(-numel // BLOCK)
        self._ranges = np.full(self._blocks, -1.0, dtype=np.float32)
        self._taught = 0
        """Exchanges that have taught ranges, or ``YOUNG`` where a checkpoint or a peer has."""
        self._moved: Vector | None = None
        """How far the vector to be coded has moved, in each block."""
        self._own: Vector | None = None
        """Our values, before they were coded."""
        self._theirs: Vector | None = None
        self._learned: Vector | None = None
        """The ranges after this exchange, if it is applied."""
        self._sent_hashes = np.zeros(self._blocks, dtype=np.uint64)
        self._hashes = np.zeros(self._blocks, dtype=np.uint64)
        self._bad: Bytes = np.zeros(self._blocks, dtype=np.uint8)
        self._codes: Bytes = np.zeros(self._blocks, dtype=np.uint8)
        """Step codes of the blocks that came."""
        self._sent_codes: Bytes = np.zeros(self._blocks, dtype=np.uint8)
        self._plain: Bytes = np.zeros(self._blocks, dtype=np.uint8)
        """Blocks of ours that were sent again as bf16."""

    @property
    def max_size(self) -> int:
        return self._size(max)

    @property
    def min_size(self) -> int:
        return self._size(min)

    def _size(self, chosen: Callable[[int, int], int]) -> int:
        """Bytes with each block as bf16 or as remainders; few values may be smaller as bf16."""
        whole, rest = divmod(self.numel, BLOCK)
        bodies = whole * chosen(2 * BLOCK, BLOCK // 8 * self.bits)
        bodies += chosen(2 * rest, -(-rest // 8) * self.bits)
        return HEADER * self._blocks + bodies + TOTAL

    @property
    def lattice_steps(self) -> Vector:
        return np.where(self._bad, np.float32(0.0), MODULO_STEPS[self._codes])

    def expect(self, before: Vector, now: Vector, gain: float) -> None:
        if self._taught >= YOUNG:
            return
        self._moved = np.zeros(self._blocks, dtype=np.float32)
        kernels.modulo_ranges(now, before, 0.0, self._moved)
        self._moved *= np.float32(MOVED * gain)

    def encode(self, vector: Vector, out: memoryview, scratch: Vector | None = None) -> int:
        target, wanted = self._begin(out, vector.size)
        own = np.empty_like(vector) if scratch is None else scratch
        hashes, codes = self._sent_hashes, self._sent_codes
        size = kernels.modulo_encode(vector, wanted, self.bits, own, target, hashes, codes)
        if size < 0:
            raise CodecError(f"{self.name}: block {-1 - size} is not finite: nothing is sent")
        self._own = own
        return self._end(target, size, self._sent_hashes, self._plain)

    def _begin(self, out: memoryview, numel: int) -> tuple[Bytes, Vector]:
        """Where to code to, and the step that each block needs."""
        target = np.frombuffer(out, dtype=np.uint8)
        if target.size < self.max_size or numel != self.numel:
            raise CodecError(
                f"{self.name}: {self.numel} values need a buffer of {self.max_size} bytes"
            )
        self._drop()
        self._learned = None
        self._plain.fill(0)
        ranges = self._ranges if self._moved is None else np.maximum(self._ranges, self._moved)
        return target, ranges * np.float32(2.0 * MARGIN / (1 << self.bits))

    def decode(self, data: memoryview, out: Vector) -> bytes:
        own, coded = self._known(), read_only(np.frombuffer(data, dtype=np.uint8))
        blocks, end = kernels.modulo_check(coded, self.numel, self.bits, self._codes)
        if blocks != self._blocks or coded.size != end + TOTAL or out.size != self.numel:
            raise CodecError(
                f"{self.name}: {coded.size} bytes are no fragment of {self.numel} values: drop "
                "this peer"
            )
        self._theirs = out
        kernels.modulo_decode(coded, own, self.bits, out, self._hashes, self._bad)
        if not self._bad.any() and self._total(self._hashes, self._bad) != bytes(coded[end:]):
            self._bad[:] = 1  # two errors that cancel: very rare, so everything comes again
        return np.packbits(self._bad).tobytes() if self._bad.any() else b""

    def resent_sizes(self, blocks: bytes) -> tuple[int, int]:
        flags = self._flags(blocks)
        count = int(flags.sum())
        last = self.numel - (self._blocks - 1) * BLOCK if self._blocks and flags[-1] else BLOCK
        whole = count - (last < BLOCK)
        digits = whole * (BLOCK // 8 * self.bits)
        values = whole * BLOCK
        if last < BLOCK:
            digits += min(2 * last, -(-last // 8) * self.bits)
            values += last
        return count + digits + TOTAL, count + 2 * values + TOTAL

    def resend(self, blocks: bytes, vector: Vector, out: memoryview) -> int:
        own = self._known()
        flags = self._flags(blocks)
        target, most = np.frombuffer(out, dtype=np.uint8), self.resent_sizes(blocks)[1]
        if target.size < most:
            raise CodecError(f"{self.name}: the blocks need a buffer of {most} bytes")
        self._plain.fill(0)
        size = kernels.modulo_resend(
            own, self._sent_codes, self.bits, flags, target, vector, self._plain
        )
        return self._end(target, size, self._sent_hashes, self._plain)

    def patch(self, data: memoryview, out: Vector) -> None:
        coded = read_only(np.frombuffer(data, dtype=np.uint8))
        body, end = coded[:-TOTAL], coded[-TOTAL:]
        size = kernels.modulo_patch(body, self._codes, self.bits, self._bad, out, self._hashes)
        if size != body.size or end.size != TOTAL:
            raise CodecError(
                f"{self.name}: what came again is not what was asked for: drop this peer"
            )
        if self._total(self._hashes, self._bad) != bytes(end):
            raise CodecError(
                f"{self.name}: the fragment does not match its check: drop this contribution"
            )

    def settle(self) -> None:
        own, self._learned = self._known(), self._ranges.copy()
        if self._theirs is not None:
            kernels.modulo_ranges(own, self._theirs, DECAY, self._learned)
        self._drop()
        self._moved = None

    def commit(self) -> None:
        if self._learned is None:
            self.settle()
        assert self._learned is not None
        self._ranges, self._learned = self._learned, None
        self._taught += 1

    def forget(self) -> None:
        self._drop()
        self._learned = self._moved = None

    def state(self) -> State:
        return {"range": self._ranges.copy()}

    shared_state = state

    def restore(self, state: State) -> None:
        ranges = state.get("range")
        if (
            ranges is None
            or ranges.shape != self._ranges.shape
            or not bool(np.isfinite(ranges).all())
        ):
            raise CodecError(f"{self.name}: expected {self._blocks} finite ranges")
        self._ranges = np.array(ranges, dtype=np.float32)
        self._taught = YOUNG if bool((ranges >= 0).all()) else 0

    def _drop(self) -> None:
        """Hold no vector."""
        self._own = self._theirs = None

    def _known(self) -> Vector:
        """Our values, before they were coded."""
        if self._own is None:
            raise CodecError(
                f"{self.name}: encode first: others are decoded next to our own vector"
            )
        return self._own

    def _flags(self, blocks: bytes) -> Bytes:
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

    def _end(self, out: Bytes, size: int, hashes: Any, bad: Bytes) -> int:
        out[size : size + TOTAL] = np.frombuffer(self._total(hashes, bad), dtype=np.uint8)
        return size + TOTAL

    def _total(self, hashes: Any, bad: Bytes) -> bytes:
        return int(kernels.modulo_total(hashes, bad)).to_bytes(TOTAL, "little")


MOD3, MOD4, MOD6, MOD8 = (partial(ModuloCoder, bits) for bits in (3, 4, 6, 8))
