"""What every codec keeps: a float32 vector in, bytes out, and the checks around both."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
State = Mapping[str, Vector]
"""Vectors by name that a coder keeps in a checkpoint."""
_Array = TypeVar("_Array", Vector, Bytes)


class FixedCodec(ABC):
    """Turns a float32 vector into ``coded_size(numel)`` bytes and back, the same on every
    machine.

    Vectors: float32, 1-D, contiguous, aligned, finite. Buffers: contiguous, of that size. Anything
    else is a `CodecError`. ``decode`` checks all of the data before it writes; after an error the
    buffer of ``encode`` holds nothing of use.
    """

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    """Whether coding loses nothing."""

    def coded_size(self, numel: int) -> int:
        """Exact number of bytes for ``numel`` values. Raises `CodecError` for a negative number."""
        if numel < 0:
            raise CodecError(
                f"{self.name}: a vector of {numel} values: give a number of at least 0"
            )
        return self._size(numel)

    def encode(self, vector: Vector, out: memoryview) -> int:
        """Code ``vector`` into ``out``; bytes written."""
        self._check_vector(vector, writable=False)
        target = self._bytes(out, vector.size, writable=True)
        self._encode(read_only(vector), target)
        return target.size

    def send(self, vector: Vector, out: memoryview) -> int:
        """Code ``vector`` as ``encode`` does; it becomes what the others decode."""
        size = self.encode(vector, out)
        if not self.is_exact:
            self.decode(out, vector)
        return size

    def decode(self, data: memoryview | bytes, out: Vector) -> None:
        """Decode ``data`` into the preallocated ``out``."""
        self._check_vector(out)
        self._decode(read_only(self._bytes(data, out.size)), out)

    @abstractmethod
    def _size(self, numel: int) -> int: ...

    @abstractmethod
    def _encode(self, vector: Vector, out: Bytes) -> None: ...

    @abstractmethod
    def _decode(self, data: Bytes, out: Vector) -> None:
        """Decode. Raises `CodecError`, before it writes, for data that ``_encode`` never writes."""

    def _check_vector(self, vector: Vector, writable: bool = True) -> None:
        flags = vector.flags
        fits = vector.dtype == np.float32 and vector.ndim == 1
        if not (fits and flags.c_contiguous and flags.aligned and flags.writeable >= writable):
            raise CodecError(
                f"{self.name}: an array of {vector.dtype} with {vector.ndim} dimensions: pass "
                "float32, 1-D, contiguous, aligned and, to decode into it, writable"
            )

    def _bytes(self, buffer: memoryview | bytes, numel: int, writable: bool = False) -> Bytes:
        view, size = memoryview(buffer), self.coded_size(numel)
        if view.nbytes != size or not view.c_contiguous or (writable and view.readonly):
            raise CodecError(
                f"{self.name}: a buffer of {view.nbytes} bytes for {numel} values: it must be "
                f"contiguous, hold exactly {size} bytes and, to encode into it, be writable"
            )
        return np.frombuffer(view, dtype=np.uint8)

    def _refuse_value(self, vector: Vector, allowed: str = "finite values") -> CodecError:
        """The error for a vector with NaN or infinity (or too large a value)."""
        bad = np.flatnonzero(~np.isfinite(vector))
        index = int(bad[0]) if bad.size else int(np.argmax(np.abs(vector)))
        return CodecError(
            f"{self.name}: value {index} of {vector.size} is {float(vector[index])}: only "
            f"{allowed} can be coded; drop this contribution"
        )


class Coder:
    """Coding of one fragment at one peer: a codec, and what it remembers between exchanges.

    That is nothing here. Nothing is remembered without ``commit``. One fragment is in one exchange
    at a time, so a coder holds at most one exchange's scratch. Vectors are flat float32 [numel].
    """

    holds_uncoded: ClassVar[bool] = False
    """Whether it holds our values before coding until ``settle``, ``commit`` or ``forget``."""

    def __init__(self, codec: FixedCodec, numel: int) -> None:
        self._codec = codec
        self.numel = numel

    @property
    def max_size(self) -> int:
        """Most bytes that ``encode`` and ``resend`` write."""
        return self._codec.coded_size(self.numel)

    min_size = max_size
    """Fewest bytes that ``encode`` writes."""

    @property
    def lattice_steps(self) -> Vector:
        """Lattice steps of each decoded block of 256, float32; 0: equal values stay equal."""
        return np.zeros(-(-self.numel // BLOCK), dtype=np.float32)

    def expect(self, before: Vector, now: Vector, gain: float) -> None:
        """Note how far our values have moved since the last exchange, before ``encode``.

        The vector that is coded next has moved ``gain`` times as far as from ``before`` to ``now``.
        """

    def encode(self, vector: Vector, out: memoryview, scratch: Vector | None = None) -> int:
        """Code into ``out``; bytes written. ``vector`` becomes what others decode.

        ``scratch``: [numel], in use until ``settle``, ``commit`` or ``forget``. Raises `CodecError`
        if not finite.
        """
        return self._codec.send(vector, out[: self.max_size])

    def decode(self, data: memoryview, out: Vector) -> bytes:
        """Decode into ``out``; a bitmap of the blocks that must be sent again, or nothing.

        Raises `CodecError` for data that no encoder writes.
        """
        self._codec.decode(data, out)
        return b""

    def resend(self, blocks: bytes, vector: Vector, out: memoryview) -> int:
        """Write these blocks again; bytes written. ``vector`` becomes what others decode now."""
        raise self._sends_nothing_again()

    def patch(self, data: memoryview, out: Vector) -> None:
        """Take in what was sent again. Raises `CodecError` if it is not what was asked for."""
        raise self._sends_nothing_again()

    def resent_sizes(self, blocks: bytes) -> tuple[int, int]:
        """Fewest and most bytes of ``resend``. Raises `CodecError` for a bitmap that does not
        fit."""
        raise self._sends_nothing_again()

    def _sends_nothing_again(self) -> CodecError:
        return CodecError(f"{self._codec.name}: nothing of it is ever sent again: drop this peer")

    def settle(self) -> None:
        """Both contributions are whole: hold no vector longer than ``commit`` needs it."""

    def commit(self) -> None:
        """The exchange is applied: keep what it taught."""

    def forget(self) -> None:
        """The exchange is over without being applied."""

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {}

    def shared_state(self) -> State:
        """What another peer's coder may begin with."""
        return {}

    def load_shared_state(self, state: State) -> None:
        """Begin with another coder's ``shared_state``. Raises `CodecError` if it does not fit."""
        self.restore(state)

    def restore(self, state: State) -> None:
        """Go on with what ``state`` gave. Raises `CodecError` if it does not fit."""
        if state:
            raise CodecError(
                f"{self._codec.name}: remembers nothing, but was given {', '.join(state)}"
            )


def read_only(array: _Array) -> _Array:
    """View for kernels: of one array type, whatever the caller holds, so they compile once."""
    view = array.view()
    view.flags.writeable = False
    return view
