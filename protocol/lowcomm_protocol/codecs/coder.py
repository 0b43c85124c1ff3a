"""Coding of one fragment at one peer: a codec, and what it remembers from one exchange to the next.

    expect      how far the vector that is coded next has moved: what is not known yet is guessed
    encode      own vector -> bytes; the vector becomes what the others will decode
    decode      a member's bytes -> vector; which blocks have to be sent again (only of codecs
                that decode next to our own vector)
    resend      the blocks that a member asks for, in more bytes and safe
    patch       takes them in at the other end
    settle      nothing more comes or is asked for: the vectors are not needed any more
    commit      the exchange is applied: keeps what it taught; without it nothing has happened

One fragment is in one exchange at a time, so a coder holds at most one exchange's scratch.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lowcomm_protocol.codecs.base import Codec, Vector
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

State = Mapping[str, npt.NDArray[np.float32]]
Flags = npt.NDArray[np.uint8]


class Coder:
    """A codec that remembers nothing. Vectors are flat float32 of ``numel`` values."""

    holds_uncoded: ClassVar[bool] = False
    """Whether it holds our values as they were before coding, in a vector of their own, until
    ``settle``, ``commit`` or ``forget``."""

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self.numel = numel

    @property
    def max_size(self) -> int:
        """Most bytes that ``encode`` and ``resend`` write."""
        return self._codec.most_size(self.numel)

    @property
    def min_size(self) -> int:
        """Fewest bytes that ``encode`` writes."""
        return self._codec.least_size(self.numel)

    @property
    def lattice_steps(self) -> Vector:
        """Of the lattice of each block of 256 that was decoded last: float32.

        0 where equal values are decoded to equal ones.
        """
        return np.zeros(-(-self.numel // BLOCK), dtype=np.float32)

    def expect(self, before: Vector, now: Vector, gain: float) -> None:
        """Tell how far our values have moved since the last exchange, before ``encode``.

        ``before``, ``now``: vectors of ``numel`` values. The vector that is coded next has moved
        ``gain`` times as far. It holds until ``commit`` or ``forget``.
        """

    def encode(self, vector: Vector, out: memoryview, scratch: Vector | None = None) -> int:
        """Code into ``out``; bytes written.

        ``vector`` becomes what others decode. ``scratch``: a vector of ``numel`` values that the
        coder may use until ``settle``, ``commit`` or ``forget``, in place of a new one. Raises
        `CodecError` if not finite.
        """
        return self._codec.send(vector, out[: self.max_size])

    def decode(self, data: memoryview, out: Vector) -> bytes:
        """Decode into ``out``; a bitmap of the blocks that must be sent again, empty if there are
        none.

        Raises `CodecError` for data that no encoder writes.
        """
        self._codec.decode(data, out)
        return b""

    def resend(self, blocks: bytes, vector: Vector, out: memoryview) -> int:
        """Write the blocks of this bitmap again; bytes written.

        ``vector`` is what ``encode`` left; it becomes what others decode now.
        """
        raise CodecError(f"{self._codec.name}: nothing of it is ever sent again: drop this peer")

    def patch(self, data: memoryview, out: Vector) -> None:
        """Take in what was sent again. Raises `CodecError` if it is not what was asked for."""
        raise CodecError(f"{self._codec.name}: nothing of it is ever sent again: drop this peer")

    def resent_sizes(self, blocks: bytes) -> tuple[int, int]:
        """Fewest and most bytes that ``resend`` writes for this bitmap.

        Raises `CodecError` for a bitmap that does not fit.
        """
        raise CodecError(f"{self._codec.name}: nothing of it is ever sent again: drop this peer")

    def settle(self) -> None:
        """Both contributions are whole: hold no vector longer than ``commit`` needs it."""

    def commit(self) -> None:
        """The exchange is applied: keep what it taught."""

    def forget(self) -> None:
        """The exchange is over without being applied."""

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {}

    def lessons(self) -> State:
        """What another peer's coder may begin with: what this one has learned, not what it owes."""
        return {}

    def inherit(self, lessons: State) -> None:
        """Begin with what ``lessons`` of another peer's coder gave.

        Raises `CodecError` if it does not fit.
        """
        self.restore(lessons)

    def restore(self, state: State) -> None:
        """Go on with what ``state`` gave. Raises `CodecError` if it does not fit."""
        if state:
            raise CodecError(
                f"{self._codec.name}: remembers nothing, but was given {', '.join(state)}"
            )
