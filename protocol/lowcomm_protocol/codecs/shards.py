"""Coding of one fragment for reduce-scatter and all-gather. Every member of a group owns a shard.

    encode    own vector -> a code for each other owner; the vector becomes what owners decode,
              our own shard included
    decode    a member's contribution to our shard, or an owner's mean of its shard
    reduce    the mean of our shard -> its code; the mean becomes what all members decode, ours
              included
    commit    these shards are applied: keeps their coding errors for the next time; without it
              nothing has happened

Both legs are lossy, so with ``feedback`` both remember their errors: what we lost of our
contributions, and, of the means that we sent as an owner, what those lost. Each is added to what is
coded next (error feedback).

`Residual` holds what one vector's coding has lost:

    add      vector += residual, in place: this is what is wanted
    keep     what was wanted and what was sent of a range [start, stop): their difference waits
    commit   ranges that were applied take their difference as residual; others keep theirs

A residual does not run away. What a codec sends is nearer to the values of a block than zeros are,
and that alone bounds it. Beyond that, in each block of 256, counted from the start of its range, a
residual stays within 16 times the largest value that was given there (and 2**126): what is more is
dropped. Where the sum would exceed 2**127 a value goes without its residual, so what can be coded
without feedback can be coded with it. An error that is not finite becomes 0.

Source: Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., 1901.09847.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lowcomm_protocol.codecs.base import FixedCodec, State, Vector, scratch_for
from lowcomm_protocol.codecs.blocks import BlockCodec
from lowcomm_protocol.codecs.kernels import (
    LARGEST_RESIDUAL,
    error_of,
    kernel,
    residual_limit,
    wanted_of,
)
from lowcomm_protocol.errors import CodecError, PlanError
from lowcomm_protocol.spec.names import BLOCK

Range = tuple[int, int]
"""Values from the first index up to, not including, the second."""
Bounds = tuple[Range, ...]


def shard_bounds(numel: int, count: int) -> Bounds:
    """``[start, stop)`` of each shard, nearly equal; whole blocks of codecs where there are enough
    of them.

    Raises `PlanError` for fewer values than shards.
    """
    if not 1 <= count <= numel:
        raise PlanError(f"{numel} values for {count} shards: each needs at least one")
    unit = BLOCK if numel >= count * BLOCK else 1
    units = -(-numel // unit)
    cuts = [min(numel, unit * (units * index // count)) for index in range(count)]
    return tuple(zip(cuts, [*cuts[1:], numel], strict=True))


class ShardCoder:
    """Codes a fragment of ``numel`` values, for groups of changing size.

    Vectors are flat float32.
    """

    def __init__(self, codec: FixedCodec, numel: int, feedback: bool = False) -> None:
        self._codec = codec
        self.numel = numel
        kinds = ("contribution", "mean") if feedback else ()
        self._lost = {kind: Residual(numel) for kind in kinds}

    @property
    def max_size(self) -> int:
        """Bytes of the coded fragment as a whole."""
        return self._codec.coded_size(self.numel)

    min_size = max_size

    def coded_size(self, values: int) -> int:
        """Bytes of a coded shard of so many values."""
        return self._codec.coded_size(values)

    def encode(
        self,
        vector: Vector,
        mine: int,
        bounds: Bounds,
        out: memoryview,
        scratch: Vector | None = None,
    ) -> list[int]:
        """Code all shards but ``mine``, one after the other, into ``out``; bytes of each, 0 for
        ours. ``vector`` follows.

        ``scratch``: a vector of ``numel`` values that the coder may use until ``commit`` or
        ``forget``, in place of new ones. Raises `CodecError` if it is not finite.
        """
        sizes: list[int] = []
        for shard, (start, stop) in enumerate(bounds):
            size = self._codec.coded_size(stop - start)
            at = sum(sizes)
            # Ours is coded too, though nobody gets it: our own share enters the mean as all others
            # do.
            target = memoryview(bytearray(size)) if shard == mine else out[at : at + size]
            part = None if scratch is None else scratch[start:stop]
            self._code("contribution", vector[start:stop], start, target, part)
            sizes.append(0 if shard == mine else size)
        return sizes

    def decode(self, data: memoryview, out: Vector) -> None:
        """Decode one shard: ours from a member, or a mean from its owner.

        Raises `CodecError` for what no encoder writes.
        """
        self._codec.decode(data, out)

    def reduce(
        self, mean: Vector, start: int, out: memoryview, scratch: Vector | None = None
    ) -> int:
        """Code the mean of our shard, which begins at ``start``.

        Bytes. ``mean`` follows. ``scratch`` as in ``encode``, of as many values as ``mean``. Raises
        `CodecError`.
        """
        size = self._codec.coded_size(mean.size)
        self._code("mean", mean, start, out[:size], scratch)
        return size

    def commit(self, ranges: Sequence[tuple[int, int]]) -> None:
        """These shards are applied: what coding them lost comes next time.

        The rest is as if it had not been coded.
        """
        for lost in self._lost.values():
            lost.commit(one for one in ranges if one in lost.waiting)

    def forget(self) -> None:
        """Nothing was applied."""
        for lost in self._lost.values():
            lost.forget()

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {f"{kind}-residual": lost.state()["residual"] for kind, lost in self._lost.items()}

    def lessons(self) -> State:
        """What another peer's coder may begin with: there is nothing to learn here, and what is
        owed is not theirs."""
        return {}

    def inherit(self, lessons: State) -> None:
        """Begin beside the coder of another peer, without debts.

        Raises `CodecError` if there are lessons.
        """
        if lessons:
            raise CodecError(f"{self._codec.name}: learns nothing, but was given {sorted(lessons)}")
        self._lost = {kind: Residual(self.numel) for kind in self._lost}

    def restore(self, state: State) -> None:
        """Go on with what ``state`` gave. Raises `CodecError` if it does not fit."""
        if set(state) != set(self.state()):
            raise CodecError(
                f"{self._codec.name}: expected {sorted(self.state())}, but was given "
                f"{sorted(state)}"
            )
        for kind, lost in self._lost.items():
            lost.restore({"residual": state[f"{kind}-residual"]})

    def _code(
        self, kind: str, vector: Vector, start: int, out: memoryview, scratch: Vector | None
    ) -> None:
        lost = self._lost.get(kind)
        if lost is None:
            self._codec.send(vector, out)
        else:
            lost.send(self._codec, vector, start, out, scratch)


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
