"""Codecs of blocks: 256 values behind a scale, each block coded by itself.

A file of a codec has four loops over whole blocks (`Kernels`). This cuts vectors for them: a last
block that is shorter is coded with zeros behind its values, and those are cut off again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lowcomm_protocol.codecs.base import Bytes, FixedCodec, Vector
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

NOTHING = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Kernels:
    """The loops of a codec for one kind of device; others must write the same bytes.

    Each takes whole blocks only. All but ``decode`` return -1, or the first block that is refused.
    """

    encode: Callable[[Any, int, Any], int]
    """``(values, count, out)``; ``count`` is 256, or the values of a last block that comes
    alone."""
    send: Callable[[Any, Any, Any, int, Any], int]
    """``(vector, residual, error, count, out)``: see ``kernels.sender``."""
    check: Callable[[Any], int]
    """``(data)``"""
    decode: Callable[[Any, Any], None]
    """``(data, out)``"""


class BlockCodec(FixedCodec):
    """``bits`` a value behind a scale of ``head`` bytes."""

    head: ClassVar[int]
    bits: ClassVar[int]
    kernels: ClassVar[Kernels]

    def send(self, vector: Vector, out: memoryview) -> int:
        """See Codec: in one pass."""
        return self.send_with_feedback(vector, NOTHING, NOTHING, out)

    def send_with_feedback(
        self, vector: Vector, residual: Vector, error: Vector, out: memoryview
    ) -> int:
        """Code ``vector + residual`` into ``out``; ``vector`` becomes what the others decode, and
        ``error`` what that lost (feedback.py).

        Both are empty, or as long as ``vector``. Returns the bytes written. Raises `CodecError` as
        ``encode`` does.
        """
        self._check_writable(vector)
        self._send(vector, residual, error, self._target(vector, out))
        return memoryview(out).nbytes

    def _send(self, vector: Vector, residual: Vector, error: Vector, out: Bytes) -> None:
        whole, end = self._cut(vector.size)
        owed = slice(0, whole if residual.size else 0)
        bad = self.kernels.send(vector[:whole], residual[owed], error[owed], BLOCK, out[:end])
        rest = vector.size - whole
        if bad < 0 and rest:
            padded, before, lost = np.zeros((3, BLOCK), dtype=np.float32)
            padded[:rest] = vector[whole:]
            before[: residual.size - owed.stop] = residual[owed.stop :]
            size, last = BLOCK if residual.size else 0, self._last()
            bad = self.kernels.send(padded, before[:size], lost[:size], rest, last)
            if bad < 0:
                vector[whole:], out[end:] = padded[:rest], last[: out.size - end]
                error[owed.stop :] = lost[: error.size - owed.stop]
        if bad >= 0:
            raise self._refuse_value(vector)

    def _size(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8 + self.head * -(-numel // BLOCK)

    def _cut(self, numel: int) -> tuple[int, int]:
        """Values in whole blocks, and their bytes."""
        whole = numel // BLOCK * BLOCK
        return whole, self._size(whole)

    def _last(self) -> Bytes:
        """Room for one block."""
        return np.zeros(self._size(BLOCK), dtype=np.uint8)

    def _encode(self, vector: Vector, out: Bytes) -> None:
        whole, end = self._cut(vector.size)
        rest = vector.size - whole
        bad = self.kernels.encode(vector[:whole], BLOCK, out[:end])
        if bad < 0 and rest:
            padded, last = np.zeros(BLOCK, dtype=np.float32), self._last()
            padded[:rest] = vector[whole:]
            padded.flags.writeable = False
            bad = self.kernels.encode(padded, rest, last)
            out[end:] = last[: out.size - end]
        if bad >= 0:
            raise self._refuse_value(vector)

    def _decode(self, data: Bytes, out: Vector) -> None:
        whole, end = self._cut(out.size)
        rest = out.size - whole
        last = self._last()
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
