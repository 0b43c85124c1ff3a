"""Error feedback: what coding lost in one exchange is added to what is sent in the next.

    add      vector += residual, in place: this is what is wanted
    keep     what was wanted and what was sent of a range [start, stop): their difference waits
    commit   ranges that were applied take their difference as residual; others keep theirs

`Residual` holds one vector's residual; `FeedbackCoder` uses it around a `Coder`, a group exchange
may use it shard by shard.

A residual does not run away. What a codec sends is nearer to the values of a block than zeros are,
and that alone bounds it; but with q1 a value that stands far above its block and keeps its sign
gathers up to 128 times itself before the scale is up to it, and everything else then jumps by as
much. So in each block of 256, counted from the start of its range, a residual stays within 16 times
the largest value that was given there (and 2**126): what is more is dropped. That cuts q1 where
gradients hardly change from one exchange to the next; no other codec comes near it but q2, with 10
to 16. Where the sum would exceed 2**127 a value goes without its residual, so what can be coded
without feedback can be coded with it. An error that is not finite becomes 0.

Source: Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., 1901.09847.
"""

from collections.abc import Iterable

import numpy as np

from lowcomm_protocol.codecs.base import FixedCodec, Vector, scratch_for
from lowcomm_protocol.codecs.blocks import BlockCodec
from lowcomm_protocol.codecs.coder import Coder, State
from lowcomm_protocol.codecs.kernels import (
    LARGEST_RESIDUAL,
    error_of,
    kernel,
    residual_limit,
    wanted_of,
)
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

Range = tuple[int, int]
"""Values from the first index up to, not including, the second."""


class Residual:
    """What has not been sent yet of a vector of ``numel`` values: float32, zeros at first."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._values = np.zeros(numel, dtype=np.float32)
        self._pending: dict[Range, Vector] = {}

    def add(self, vector: Vector, start: int, stop: int) -> None:
        """Add the residual of [start, stop) to ``vector``, which holds those values, in place.

        Raises `CodecError` for a range or a vector that does not fit.
        """
        self._check(start, stop, vector)
        if not vector.flags.writeable:
            raise CodecError("feedback: a vector that is read-only: pass a writable array")
        residual_add(vector, self._values[start:stop])

    def keep(self, wanted: Vector, sent: Vector, start: int, stop: int) -> None:
        """Hold ``wanted - sent`` of [start, stop) until `commit` or `forget`; in place of what this
        range held before.

        ``wanted``: what `add` made. ``sent``: what the others decode. Both can be changed
        afterwards. Raises `CodecError` for a range or vectors that do not fit, and for a range that
        overlaps another one that waits.
        """
        self._check(start, stop, wanted, sent)
        error = np.empty(stop - start, dtype=np.float32)
        residual_keep(_read_only(wanted), _read_only(sent), self._values[start:stop], error)
        self._hold(start, stop, error)

    def send(
        self,
        codec: FixedCodec,
        vector: Vector,
        start: int,
        out: memoryview,
        scratch: Vector | None = None,
    ) -> None:
        """Add the residual to ``vector``, whose values begin at ``start``, code it into ``out`` and
        hold what that lost, as `add` and `keep` do; ``vector`` becomes what the others decode.

        ``scratch``: a vector as long, which is in use until `commit` or `forget`. Raises
        `CodecError` as these do, and if ``vector`` is not finite.
        """
        stop = start + vector.size
        if isinstance(codec, BlockCodec):
            self._check(start, stop, vector)
            error = scratch_for("feedback", vector.size, scratch)
            codec.send_with_feedback(vector, self._values[start:stop], error, out)
            self._hold(start, stop, error)
        else:
            self.add(vector, start, stop)
            wanted = vector.copy()
            codec.send(vector, out)
            self.keep(wanted, vector, start, stop)

    def _hold(self, start: int, stop: int, error: Vector) -> None:
        for other in self._pending:
            if other != (start, stop) and start < other[1] and other[0] < stop:
                raise CodecError(
                    f"feedback: the range {(start, stop)} overlaps {other}, which waits: forget "
                    "that first"
                )
        self._pending[start, stop] = error

    @property
    def waiting(self) -> tuple[Range, ...]:
        """The ranges that were kept, and neither committed nor forgotten."""
        return tuple(self._pending)

    def commit(self, ranges: Iterable[Range]) -> None:
        """These ranges were applied: what waits for them is their residual now. What waits for
        others is forgotten.

        Raises `CodecError`, and changes nothing, for a range that was not kept.
        """
        applied = list(ranges)
        for one in applied:
            if one not in self._pending:
                raise CodecError(
                    f"feedback: nothing waits for the range {one}: keep it before it is committed"
                )
        for start, stop in applied:
            self._values[start:stop] = self._pending[start, stop]
        self._pending.clear()

    def forget(self) -> None:
        """Nothing was applied: the residual stays what it is."""
        self._pending.clear()

    def state(self) -> State:
        """What a checkpoint keeps; not what waits."""
        return {"residual": self._values.copy()}

    def restore(self, state: State) -> None:
        """Go on with what ``state`` gave.

        Raises `CodecError` if it does not fit; other keys are left alone.
        """
        values = state.get("residual")
        if (
            values is None
            or values.shape != (self.numel,)
            or not bool((np.abs(values) <= LARGEST_RESIDUAL).all())
        ):
            raise CodecError(
                f"feedback: expected a residual of {self.numel} values, finite and up to 2**126"
            )
        self._values = np.array(values, dtype=np.float32)
        self._pending.clear()

    def _check(self, start: int, stop: int, *vectors: Vector) -> None:
        if not 0 <= start <= stop <= self.numel:
            raise CodecError(
                f"feedback: the range {(start, stop)} does not lie within {self.numel} values"
            )
        for vector in vectors:
            flat = vector.dtype == np.float32 and vector.flags.c_contiguous and vector.flags.aligned
            if not flat or vector.shape != (stop - start,):
                raise CodecError(
                    f"feedback: an array of {vector.dtype} and shape {vector.shape}: pass "
                    f"{stop - start} values, float32, 1-D, contiguous and aligned"
                )


class FeedbackCoder(Coder):
    """A coder that sends in each exchange what ``inner`` lost in those before, and does else what
    ``inner`` does.

    The vector given to ``encode`` must stay as others decode it (``resend`` changes it) until
    ``commit`` or ``forget``.
    """

    holds_uncoded = True

    def __init__(self, inner: Coder) -> None:
        self.inner = inner
        self.numel = inner.numel
        self._residual = Residual(inner.numel)
        self._wanted: Vector | None = None
        self._sent: Vector | None = None

    @property
    def max_size(self) -> int:
        """See Coder."""
        return self.inner.max_size

    @property
    def min_size(self) -> int:
        """See Coder."""
        return self.inner.min_size

    @property
    def lattice_steps(self) -> Vector:
        """See Coder."""
        return self.inner.lattice_steps

    def expect(self, before: Vector, now: Vector, gain: float) -> None:
        """See Coder."""
        self.inner.expect(before, now, gain)

    def encode(self, vector: Vector, out: memoryview, scratch: Vector | None = None) -> int:
        """See Coder."""
        self._drop()
        self._residual.add(vector, 0, self.numel)
        wanted = scratch_for("feedback", self.numel, scratch)
        np.copyto(wanted, vector)
        size = self.inner.encode(vector, out)
        self._wanted = wanted
        self._sent = vector
        return size

    def decode(self, data: memoryview, out: Vector) -> bytes:
        """See Coder."""
        return self.inner.decode(data, out)

    def resend(self, blocks: bytes, vector: Vector, out: memoryview) -> int:
        """See Coder."""
        return self.inner.resend(blocks, vector, out)

    def patch(self, data: memoryview, out: Vector) -> None:
        """See Coder."""
        self.inner.patch(data, out)

    def resent_sizes(self, blocks: bytes) -> tuple[int, int]:
        """See Coder."""
        return self.inner.resent_sizes(blocks)

    def settle(self) -> None:
        """See Coder."""
        self.inner.settle()

    def commit(self) -> None:
        """See Coder."""
        self.inner.commit()
        if self._wanted is not None and self._sent is not None:
            self._residual.keep(self._wanted, self._sent, 0, self.numel)
            self._residual.commit([(0, self.numel)])
        self._drop()

    def forget(self) -> None:
        """See Coder."""
        self._drop()
        self.inner.forget()

    def state(self) -> State:
        """See Coder."""
        return {**self.inner.state(), **self._residual.state()}

    def lessons(self) -> State:
        """See Coder."""
        return self.inner.lessons()

    def inherit(self, lessons: State) -> None:
        """See Coder."""
        self.inner.inherit(lessons)
        self._drop()
        self._residual = Residual(self.numel)

    def restore(self, state: State) -> None:
        """See Coder."""
        residual = Residual(self.numel)
        residual.restore(state)
        self.inner.restore({name: values for name, values in state.items() if name != "residual"})
        self._drop()
        self._residual = residual

    def _drop(self) -> None:
        self._wanted = self._sent = None


def _read_only(vector: Vector) -> Vector:
    view = vector.view()
    view.flags.writeable = (
        False  # one array type for the kernel, whatever the caller holds: compiled once
    )
    return view


@kernel
def residual_add(vector: Vector, residual: Vector) -> None:
    """Add the residual in place.

    A value that would grow too large to code, or is not finite, stays as it is.
    """
    for i in range(vector.size):
        vector[i] = wanted_of(vector[i], residual[i])


@kernel
def residual_keep(wanted: Vector, sent: Vector, residual: Vector, error: Vector) -> None:
    """``error`` gets wanted - sent within the block's limit, and 0 where that is not finite.

    The limit comes from the values as they were without the residual, but is never below what the
    residual has reached: values that become small do not cut what is still owed.
    """
    for start in range(0, wanted.size, BLOCK):
        stop = min(wanted.size, start + BLOCK)
        limit = residual_limit(wanted[start:stop], residual[start:stop])
        for i in range(start, stop):
            error[i] = error_of(wanted[i], sent[i], limit)
