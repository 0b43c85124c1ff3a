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
"""

from collections.abc import Sequence

from lowcomm_protocol.codecs.base import FixedCodec, Vector
from lowcomm_protocol.codecs.coder import State
from lowcomm_protocol.codecs.feedback import Residual
from lowcomm_protocol.errors import CodecError, PlanError
from lowcomm_protocol.spec.names import BLOCK

Bounds = tuple[tuple[int, int], ...]


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
