"""What every codec keeps: a float32 vector in, an exact number of bytes out, and the checks around both."""

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from lowcomm_protocol.errors import CodecError

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_Array = TypeVar("_Array", Vector, Bytes)

CHUNK = 1 << 16
"""Elements that a NumPy codec handles at once, so that its scratch stays small and in the cache."""


class Codec(ABC):
    """Turns a float32 vector into bytes and back, the same bytes on every machine.

    Vectors: float32, 1-D, contiguous, aligned, finite. Buffers: contiguous, exactly ``coded_size(numel)`` bytes.
    Anything else is a `CodecError`. ``decode`` checks all of the data before it writes; ``encode`` of a blockwise
    codec reads the vector once, so after an error its buffer holds nothing of use.
    A kernel for another device takes the place of ``_encode`` and ``_decode`` and must write the same bytes.
    """

    name: ClassVar[str]

    def coded_size(self, numel: int) -> int:
        """Exact number of bytes for ``numel`` values. Raises `CodecError` for a negative number."""
        if numel < 0:
            raise CodecError(f"{self.name}: a vector of {numel} values: give a number of at least 0")
        return self._size(numel)

    def encode(self, vector: Vector, out: memoryview) -> int:
        """Code ``vector`` into ``out``; returns the bytes written, ``coded_size(vector.size)``."""
        self._check_vector(vector)
        target = self._bytes(out, vector.size)
        if not target.flags.writeable:
            raise CodecError(f"{self.name}: the buffer to encode into is read-only: pass a view of a bytearray")
        self._encode(_read_only(vector), target)
        return target.size

    def decode(self, data: memoryview | bytes, out: Vector) -> None:
        """Decode ``data`` into the preallocated ``out``; its size says how many values there are."""
        self._check_vector(out)
        if not out.flags.writeable:
            raise CodecError(f"{self.name}: the vector to decode into is read-only: pass a writable array")
        self._decode(_read_only(self._bytes(data, out.size)), out)

    @abstractmethod
    def _size(self, numel: int) -> int: ...

    @abstractmethod
    def _encode(self, vector: Vector, out: Bytes) -> None: ...

    @abstractmethod
    def _decode(self, data: Bytes, out: Vector) -> None: ...

    def _check_vector(self, vector: Vector) -> None:
        if vector.dtype != np.float32 or vector.ndim != 1:
            raise CodecError(
                f"{self.name}: an array of {vector.dtype} with {vector.ndim} dimensions: pass float32, 1-D"
            )
        if not (vector.flags.c_contiguous and vector.flags.aligned):
            raise CodecError(f"{self.name}: a vector that is not contiguous and aligned: pass a copy of it")

    def _bytes(self, buffer: memoryview | bytes, numel: int) -> Bytes:
        view = memoryview(buffer)
        expected = self.coded_size(numel)
        if view.nbytes != expected or not view.c_contiguous:
            raise CodecError(
                f"{self.name}: a buffer of {view.nbytes} bytes for {numel} values: it must be contiguous and hold"
                f" exactly {expected} bytes"
            )
        return np.frombuffer(view, dtype=np.uint8)

    def _refuse_value(self, vector: Vector, allowed: str = "finite values") -> CodecError:
        """The error for a vector that holds NaN or infinity, naming the first one (or the largest value)."""
        bad = np.flatnonzero(~np.isfinite(vector))
        index = int(bad[0]) if bad.size else int(np.argmax(np.abs(vector)))
        return CodecError(
            f"{self.name}: value {index} of {vector.size} is {float(vector[index])}: only {allowed} can be coded;"
            " drop this contribution"
        )


def largest_magnitude(vector: Vector) -> float:
    """Largest absolute value, 0 for an empty vector; NaN or infinity when the vector holds one. Allocates nothing."""
    return max(abs(float(vector.max())), abs(float(vector.min()))) if vector.size else 0.0


def _read_only(array: _Array) -> _Array:
    view = array.view()
    view.flags.writeable = False  # one array type for the kernels, whatever the caller holds: compiled once
    return view
