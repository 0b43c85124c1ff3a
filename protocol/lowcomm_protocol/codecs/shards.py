"""Coding of one fragment for reduce-scatter and all-gather. Every member of a group owns a shard.

With ``feedback`` a coder has two residuals: what coding has lost of our contributions, and of the
means that we sent as an owner. Each is added to what is coded next (error feedback: Seide et al.,
Interspeech 2014; Karimireddy et al., 1901.09847), within bounds (docs/protocol.md), so what can be
coded without feedback can be coded with it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import FixedCodec, State, Vector
from lowcomm_protocol.codecs.kernels import MAGNITUDE, kernel, part
from lowcomm_protocol.errors import CodecError, PlanError
from lowcomm_protocol.spec.names import BLOCK

LARGEST_WANTED = np.float32(2.0**127)
"""No codec refuses a value up to here, with its residual added."""
RESIDUAL_LIMIT = np.float32(16.0)
"""How many times the largest value of a block a residual may grow to."""
LARGEST_RESIDUAL = np.float32(2.0**126)

Range = tuple[int, int]
"""Values from the first index up to, not including, the second."""
Bounds = tuple[Range, ...]


def shard_bounds(numel: int, count: int) -> Bounds:
    """``[start, stop)`` of each shard, nearly equal, of whole blocks where there are enough.

    Raises `PlanError` for fewer values than shards.
    """
    if not 1 <= count <= numel:
        raise PlanError(f"{numel} values for {count} shards: each needs at least one")
    unit = BLOCK if numel >= count * BLOCK else 1
    units = -(-numel // unit)
    cuts = [min(numel, unit * (units * index // count)) for index in range(count)]
    return tuple(zip(cuts, [*cuts[1:], numel], strict=True))


class Residual:
    """What coding has lost of a vector of ``numel`` values: float32, zeros at first."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._values = np.zeros(numel, dtype=np.float32)
        self._pending: dict[Range, Vector] = {}

    def send(
        self,
        codec: FixedCodec,
        vector: Vector,
        start: int,
        out: memoryview,
        scratch: Vector | None = None,
    ) -> None:
        """Code ``vector + residual`` from ``start`` on; ``vector`` becomes what others decode.

        ``scratch``, as long, holds what that lost until `commit` or `forget`. Raises `CodecError`
        if ``vector`` is not finite.
        """
        residual = self._values[start : start + vector.size]
        error = np.empty_like(vector) if scratch is None else scratch
        residual_add(vector, residual, error)
        codec.send(vector, out)
        residual_keep(vector, residual, error)
        self._pending[start, start + vector.size] = error

    def commit(self, ranges: Iterable[Range]) -> None:
        """These ranges were applied: what was lost of them is their residual now."""
        for start, stop in ranges:
            if (start, stop) in self._pending:
                self._values[start:stop] = self._pending[start, stop]
        self._pending.clear()

    def forget(self) -> None:
        """Nothing was applied: the residual stays what it is."""
        self._pending.clear()

    def state(self) -> Vector:
        """A copy of the residual."""
        return self._values.copy()

    def restore(self, values: Vector) -> None:
        """Go on with what ``state`` gave. Raises `CodecError` if it does not fit."""
        fits = values.shape == (self.numel,)
        if not fits or not bool((np.abs(values) <= LARGEST_RESIDUAL).all()):
            raise CodecError(
                f"feedback: expected a residual of {self.numel} values, finite and up to 2**126"
            )
        self._values = np.array(values, dtype=np.float32)
        self._pending.clear()


class ShardCoder:
    """Codes a fragment of ``numel`` values, flat float32, for groups of changing size."""

    def __init__(self, codec: FixedCodec, numel: int, feedback: bool = False) -> None:
        self.codec = codec
        self.numel = numel
        kinds = ("contribution", "mean") if feedback else ()
        self._residuals = {kind: Residual(numel) for kind in kinds}

    @property
    def max_size(self) -> int:
        """Bytes of the coded fragment as a whole."""
        return self.codec.coded_size(self.numel)

    min_size = max_size

    def encode(
        self,
        vector: Vector,
        mine: int,
        bounds: Bounds,
        out: memoryview,
        scratch: Vector | None = None,
    ) -> list[int]:
        """Code all shards but ``mine`` into ``out``; bytes of each, 0 for ours.

        ``vector`` becomes what owners decode. ``scratch``: [numel], in use until ``commit`` or
        ``forget``. Raises `CodecError` if it is not finite.
        """
        sizes: list[int] = []
        for shard, (start, stop) in enumerate(bounds):
            size = self.codec.coded_size(stop - start)
            at = sum(sizes)
            # Ours is coded too, though nobody gets it: it enters the mean as all others do.
            target = memoryview(bytearray(size)) if shard == mine else out[at : at + size]
            part = None if scratch is None else scratch[start:stop]
            self._send("contribution", vector[start:stop], start, target, part)
            sizes.append(0 if shard == mine else size)
        return sizes

    def reduce(
        self, mean: Vector, start: int, out: memoryview, scratch: Vector | None = None
    ) -> int:
        """Code the mean of our shard; bytes written. ``mean`` becomes what members decode.

        ``scratch`` as in ``encode``, as long as ``mean``. Raises `CodecError` if it is not finite.
        """
        size = self.codec.coded_size(mean.size)
        self._send("mean", mean, start, out[:size], scratch)
        return size

    def commit(self, ranges: Sequence[Range]) -> None:
        """These shards are applied: what coding them lost comes next time."""
        for residual in self._residuals.values():
            residual.commit(ranges)

    def forget(self) -> None:
        """Nothing was applied."""
        for residual in self._residuals.values():
            residual.forget()

    def state(self) -> State:
        """Residuals, for a checkpoint."""
        return {f"{kind}-residual": lost.state() for kind, lost in self._residuals.items()}

    def shared_state(self) -> State:
        """State for another peer's coder: none, since residuals are a peer's own."""
        return {}

    def load_shared_state(self, state: State) -> None:
        """Begin without residuals. Raises `CodecError` unless ``state`` is empty."""
        if state:
            raise CodecError(f"{self.codec.name}: learns nothing, but was given {sorted(state)}")
        self._residuals = {kind: Residual(self.numel) for kind in self._residuals}

    def restore(self, state: State) -> None:
        """Go on with what ``state`` gave. Raises `CodecError` if it does not fit."""
        expected = sorted(f"{kind}-residual" for kind in self._residuals)
        if sorted(state) != expected:
            raise CodecError(
                f"{self.codec.name}: expected {expected}, but was given {sorted(state)}"
            )
        for kind, residual in self._residuals.items():
            residual.restore(state[f"{kind}-residual"])

    def _send(
        self, kind: str, vector: Vector, start: int, out: memoryview, scratch: Vector | None
    ) -> None:
        residual = self._residuals.get(kind)
        if residual is None:
            self.codec.send(vector, out)
        else:
            residual.send(self.codec, vector, start, out, scratch)


@part
def residual_limit(wanted: Vector, residual: Vector) -> Any:
    """Largest residual of a block."""
    largest, reached = np.uint32(0), np.uint32(0)
    for i in range(np.uint64(wanted.size)):
        given, kept = np.float32(wanted[i] - residual[i]), np.float32(residual[i])
        largest = np.uint32(max(largest, np.uint32(given.view(np.uint32) & MAGNITUDE)))
        reached = np.uint32(max(reached, np.uint32(kept.view(np.uint32) & MAGNITUDE)))
    most = np.float32(np.uint32(largest).view(np.float32) * RESIDUAL_LIMIT)
    limit = max(most, np.uint32(reached).view(np.float32))
    return limit if limit <= LARGEST_RESIDUAL else LARGEST_RESIDUAL  # "<=" is false for NaN too


@kernel
def residual_add(vector: Vector, residual: Vector, wanted: Vector) -> None:
    """Add the residual in place, but to values that would grow too large to code or are not finite.

    ``wanted`` gets a copy of the sum.
    """
    for i in range(np.uint64(vector.size)):
        total = np.float32(vector[i] + residual[i])
        vector[i] = total if abs(total) <= LARGEST_WANTED else vector[i]
        wanted[i] = vector[i]


@kernel
def residual_keep(sent: Vector, residual: Vector, error: Vector) -> None:
    """``error``, which holds what was to be sent, gets what is lost of it within the block's limit,
    and 0 where that is not finite.

    The limit never is below what the residual has reached: small values do not cut it.
    """
    for start in range(0, error.size, BLOCK):
        here = slice(start, min(error.size, start + BLOCK))
        wanted, arrived = error[here], sent[here]
        limit = residual_limit(wanted, residual[here])
        for i in range(np.uint64(wanted.size)):
            lost = np.float32(wanted[i] - arrived[i])
            lost = lost if abs(lost) < np.float32(np.inf) else np.float32(0.0)
            wanted[i] = max(-limit, min(limit, lost))
