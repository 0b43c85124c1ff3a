"""A sparse codec as an experiment: the largest values of each chunk of 4096, in few bits.

Not a codec of specifications: ``sparse.py`` measures whether it should become one.

A chunk is a bf16 pair of levels, the places of the ``k`` values of the largest magnitude as an
Elias-Fano list, and a sign and a level for each. An Elias-Fano list of k places of n takes
``k * l + k + ceil(n / 2**l)`` bits with ``l = floor(log2(n / k))``: within half a bit a place of
the fewest that any code could, and its size is known before coding, as shards of a group need it.
Here only the size is of use: bytes are filled with what decoding needs, uncoded, in a table.

Source: SparseLoCo, arXiv 2508.15706; DeMo, arXiv 2411.19870.
"""

import math
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.codecs.shards import ShardCoder
from lowcomm_protocol.exchange.judging import Bound
from lowcomm_protocol.rows import scatter

CHUNK = 4096
HEAD_BITS = 32
"""Two levels, bf16."""
ROUNDS = 4
UNDER_WAY = 1500
"""Coded vectors that are remembered: more than travel at once."""
BOOK: dict[bytes, Vector] = {}
"""What was decoded of each, by the number that travels in its place."""
NUMBERS = count()


def kept(values: int, density: float) -> int:
    """How many values of a chunk travel."""
    return max(1, min(values, round(values * density)))


def chunk_bits(values: int, density: float, bits: int) -> int:
    """Size of a coded chunk of so many values, ``bits`` for each that travels."""
    k = kept(values, density)
    low = int(math.log2(values / k))
    return HEAD_BITS + k * (low + 1 + bits) + -(-values // (1 << low))


def size_of(numel: int, density: float, bits: int) -> int:
    """Bytes of a vector."""
    whole, rest = divmod(numel, CHUNK)
    total = whole * chunk_bits(CHUNK, density, bits)
    return -(-(total + (chunk_bits(rest, density, bits) if rest else 0)) // 8)


def density_for(bits_a_value: float, bits: int) -> float:
    """The largest density whose chunks take at most so many bits a value."""
    fits = [
        k for k in range(1, CHUNK) if chunk_bits(CHUNK, k / CHUNK, bits) <= bits_a_value * CHUNK
    ]
    return max(fits, default=1) / CHUNK


def sparsify(chunks: Any, k: int, bits: int) -> Any:
    """What the others decode of rows of values: the ``k`` largest of each, at one or two levels."""
    magnitude = np.abs(chunks)
    places = np.argpartition(magnitude, -k, axis=1)[:, -k:]
    largest = np.take_along_axis(magnitude, places, 1)
    if bits == 1:
        level = np.broadcast_to(largest.mean(1, keepdims=True), largest.shape)
    else:
        edge = largest.mean(1, keepdims=True)
        for _ in range(ROUNDS):
            outer = largest >= edge
            above = (largest * outer).sum(1, keepdims=True) / np.maximum(
                outer.sum(1, keepdims=True), 1
            )
            below = (largest * ~outer).sum(1, keepdims=True) / np.maximum(
                (~outer).sum(1, keepdims=True), 1
            )
            edge = (above + below) / 2
        level = np.where(largest >= edge, above, below)
    signs = np.sign(np.take_along_axis(chunks, places, 1))
    out = np.zeros_like(chunks)
    np.put_along_axis(out, places, (signs * level).astype(np.float32), 1)
    return out


class Sparse(FixedCodec):
    """The largest values of each chunk. The bytes are a stand-in of the right size: the
    simulator hands over the decoded values."""

    name = "sparse"

    def __init__(self, density: float, bits: int) -> None:
        self.density, self.bits = density, bits

    def _size(self, numel: int) -> int:
        return max(8, size_of(numel, self.density, self.bits))

    def values_of(self, vector: Vector) -> Vector:
        """What the others decode."""
        whole = vector.size - vector.size % CHUNK
        out = np.zeros_like(vector)
        if whole:
            rows = vector[:whole].reshape(-1, CHUNK)
            out[:whole] = sparsify(rows, kept(CHUNK, self.density), self.bits).ravel()
        if rest := vector.size - whole:
            out[whole:] = sparsify(vector[None, whole:], kept(rest, self.density), self.bits)[0]
        return out

    def _encode(self, vector: Vector, out: Bytes) -> None:
        number = next(NUMBERS).to_bytes(8, "little")
        BOOK[number] = self.values_of(vector)
        if len(BOOK) > UNDER_WAY:
            BOOK.pop(next(iter(BOOK)))
        out[:] = 0
        out[:8] = np.frombuffer(number, dtype=np.uint8)

    def _decode(self, data: Bytes, out: Vector) -> None:
        out[:] = BOOK[data[:8].tobytes()]


class AllOfThem(Sparse):
    """The mean leg of an all-gather: nothing is lost, and the size makes up for contributions that
    go to all others in place of one owner."""

    def __init__(self, first: Sparse, peers: int) -> None:
        super().__init__(first.density, first.bits)
        self.times = peers - 1

    def _size(self, numel: int) -> int:
        return self.times * super()._size(numel)

    def values_of(self, vector: Vector) -> Vector:
        """See Sparse."""
        return vector.copy()


class SparseShards(ShardCoder):
    """A coder whose two legs may differ in density, and whose memory of what coding lost fades."""

    def __init__(self, numel: int, legs: tuple[Sparse, Sparse], fade: float) -> None:
        super().__init__(legs[0], numel, feedback=True)
        self.legs, self.fade = legs, fade

    def reduce(
        self, mean: Vector, start: int, out: memoryview, scratch: Vector | None = None
    ) -> int:
        """See ShardCoder."""
        self._codec = self.legs[1]
        try:
            return super().reduce(mean, start, out, scratch)
        finally:
            self._codec = self.legs[0]

    def decode(self, data: memoryview, out: Vector) -> None:
        """See ShardCoder."""
        out[:] = BOOK[bytes(data[:8])]

    def _code(
        self, kind: str, vector: Vector, start: int, out: memoryview, scratch: Vector | None
    ) -> None:
        # e = fade * e_before + what is new; what is sent is taken off (SparseLoCo, algorithm 1).
        lost = self._lost[kind]
        stop = start + vector.size
        wanted = (
            vector
            + np.float32(self.fade if kind == "contribution" else 1.0) * lost._values[start:stop]
        )
        vector[:] = wanted
        self._codec.send(vector, out)
        lost._hold(start, stop, wanted - vector)


def replica(legs: tuple[Sparse, Sparse], fade: float, keeps: bool) -> type[Replica]:
    """A replica whose group exchanges are coded so.

    ``keeps``: what coding lost of its progress stays in its fast weights, and so in its next
    contribution, in place of a residual: ``theta += phi_new - phi - sent``. It goes with
    ``fade = 0`` and ``merge = "shift"``.
    """

    class SparseReplica(Replica):
        def __init__(self, *rest: Any, **named: Any) -> None:
            super().__init__(*rest, **named)
            self._coders = [SparseShards(one.numel(), legs, fade) for one in self.phi]
            self.owed: dict[int, Tensor] = {}

        def contribute(self, fragment: int) -> None:
            super().contribute(fragment)
            # Progress of many exchanges in few values is larger than what a node believes.
            self.captures[fragment].judge.bound = Bound(math.inf, math.inf)

        def outer(self, fragment: int) -> None:
            capture = self.captures[fragment]
            if keeps and not capture.realign:
                owed = capture.theta - capture.phi - capture.sent
                self.owed[fragment] = torch.zeros_like(owed)
                for start, stop in capture.ranges:
                    self.owed[fragment][start:stop] = owed[start:stop]
            super().outer(fragment)

        def merge(self, fragment: int, *rest: Any) -> None:
            super().merge(fragment, *rest)
            if (owed := self.owed.pop(fragment, None)) is not None:
                plan = self.plan.fragments[fragment]
                scatter(plan, self.fast(fragment).add_(owed), self.weights)

    return SparseReplica
