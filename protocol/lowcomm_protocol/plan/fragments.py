"""Which rows of which tensors travel together, and when each fragment is due (Streaming DiLoCo,
2501.18512).

A plan depends only on names, shapes, roles and their order, so every peer makes the same one and
compares digests.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Literal

from lowcomm_protocol.errors import PlanError
from lowcomm_protocol.plan import partition

LIMIT = Fraction(5, 4)
"""A fragment may hold this many times the mean before an embedding or head is split to relieve
it."""

EVEN = "even"
"""The pattern that cuts rows and leaves no layer whole; releases before 0.2 do not know it."""

Role = Literal["embedding", "block", "norm", "head"]

PLACING: tuple[Role, ...] = ("block", "embedding", "norm", "head")
"""Layers are placed first, so that the others fill the gaps, and embeddings before heads: they take
the first room."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    Tensors of the same ``storage`` are tied: one memory under several names.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    role: Role
    storage: str | None = None

    @property
    def numel(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def stack(self) -> partition.Stack:
        """Its rows, which are never cut: dimension 0; a tensor without dimensions is one row."""
        return (
            partition.Stack(self.shape[0], prod(self.shape[1:]))
            if self.shape
            else partition.Stack(1, 1)
        )


@dataclass(frozen=True)
class Slice:
    """Rows ``[start, stop)`` of dimension 0 of one tensor: ``numel`` values."""

    tensor: str
    start: int
    stop: int
    numel: int


@dataclass(frozen=True)
class Fragment:
    """The slices that travel together, as one flat vector in this order."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(part.numel for part in self.slices)


@dataclass(frozen=True)
class FragmentPlan:
    """All fragments. ``digest`` is the SHA-256 (hex) of the plan: peers exchange only under the
    same one."""

    fragments: tuple[Fragment, ...]
    pattern: str
    digest: str

    @property
    def numel(self) -> int:
        """Number of values in all fragments: tied tensors count once."""
        return sum(fragment.numel for fragment in self.fragments)


def plan_fragments(tensors: Sequence[TensorSpec], count: int, pattern: str) -> FragmentPlan:
    """Cut a model into ``count`` fragments of similar size; every value lies in exactly one.

    ``strided`` gives layer i to fragment i mod count, ``sequential`` gives each fragment a run of
    layers. The embedding goes to the first fragment, norms and the head to the last; one that would
    make its fragment larger than 1.25 times the mean is split by rows instead. Layers stay whole
    unless there are fewer layers than fragments: then, and always with ``even``, the model is cut
    by rows, in the order given. Raises `PlanError`.
    """
    if pattern not in ("strided", "sequential", EVEN):
        raise PlanError(
            f"fragment pattern {pattern!r} does not exist: use 'strided', 'sequential' or 'even'"
        )
    kept = _untied(tensors)
    rows = sum(tensor.stack.rows for tensor in kept)
    if not 1 <= count <= rows:
        raise PlanError(
            f"{count} fragments of a model with {rows} rows: choose from 1 to {rows} fragments"
        )
    layers = len({tensor.layer for tensor in kept if tensor.role == "block"})
    by_rows = pattern == EVEN or layers < count
    parts = _cut_rows(kept, count) if by_rows else _whole_layers(kept, count, pattern)
    order = {tensor.name: position for position, tensor in enumerate(kept)}
    fragments = tuple(
        Fragment(index, tuple(sorted(part, key=lambda one: (order[one.tensor], one.start))))
        for index, part in enumerate(parts)
    )
    return FragmentPlan(fragments, pattern, _digest(fragments, pattern))


@lru_cache(maxsize=1024)  # asked at every inner step, and fractions are slow
def offset(index: int, count: int, interval: int) -> int:
    """Step at which fragment ``index`` of ``count`` is first due: ``round(interval * (index + 1) /
    count) % interval``.

    For the last one that is 0, where nothing is learned yet: it is first due at ``interval``. Exact
    for any size; a half is rounded to even, as Python's ``round`` does. Raises `PlanError`.
    """
    if interval < 1 or not 0 <= index < count:
        raise PlanError(
            f"fragment {index} of {count} every {interval} steps: the interval must be at least 1 "
            f"and the fragment from 0 to {count - 1}"
        )
    return round(Fraction(interval * (index + 1), count)) % interval


def sync_index(step: int, index: int, count: int, interval: int) -> int:
    """How often fragment ``index`` has come due by ``step``: it is due when this has grown since
    its last sync.

    ``floor((step - offset) / interval)``, which is -1 before the first time. Raises `PlanError`.
    """
    return (step - offset(index, count, interval)) // interval


def _untied(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors that a plan holds: of tied ones the first."""
    names: set[str] = set()
    stored: dict[str, TensorSpec] = {}
    kept: list[TensorSpec] = []
    for tensor in tensors:
        _check(tensor, names)
        names.add(tensor.name)
        first = tensor if tensor.storage is None else stored.setdefault(tensor.storage, tensor)
        if first.shape != tensor.shape:
            raise PlanError(
                f"tensors {first.name!r} {first.shape} and {tensor.name!r} {tensor.shape} share "
                f"storage {tensor.storage!r}: tied tensors must have one shape"
            )
        if first is tensor:
            kept.append(tensor)
    return kept


def _check(tensor: TensorSpec, names: set[str]) -> None:
    if tensor.name in names:
        raise PlanError(
            f"tensor {tensor.name!r} is listed twice: give every tensor a name of its own"
        )
    if any(size < 1 for size in tensor.shape):
        raise PlanError(
            f"tensor {tensor.name!r} of shape {tensor.shape} holds nothing: leave it out of the "
            "plan"
        )
    if tensor.role == "block" and tensor.layer is None:
        raise PlanError(
            f"tensor {tensor.name!r} of role 'block' has no layer: give the number of its layer"
        )


def _slice(tensor: TensorSpec, start: int, stop: int) -> Slice:
    return Slice(tensor.name, start, stop, (stop - start) * tensor.stack.width)


def _cut_rows(tensors: Sequence[TensorSpec], count: int) -> list[list[Slice]]:
    """Cut the model by rows, in the order given."""
    parts = partition.cut([tensor.stack for tensor in tensors], count)
    return [[_slice(tensors[span.stack], span.start, span.stop) for span in part] for part in parts]


def _whole_layers(tensors: Sequence[TensorSpec], count: int, pattern: str) -> list[list[Slice]]:
    """Share out whole layers, then place the embedding, norms and head, split where they would
    unbalance."""
    homes = _layer_homes(tensors, count, pattern)
    parts: list[list[Slice]] = [[] for _ in range(count)]
    loads = [0] * count
    limit = LIMIT * sum(tensor.numel for tensor in tensors) / count
    split: list[TensorSpec] = []
    for tensor in sorted(tensors, key=lambda one: PLACING.index(one.role)):
        block = tensor.role == "block"
        home = homes[tensor.layer] if block else (0 if tensor.role == "embedding" else count - 1)
        if block or loads[home] + tensor.numel <= limit:
            parts[home].append(_slice(tensor, 0, tensor.stack.rows))
            loads[home] += tensor.numel
        else:
            split.append(tensor)
    left = partition.room(loads, sum(tensor.numel for tensor in split))
    for tensor in split:
        for part, start, stop in partition.fill(tensor.stack, left):
            parts[part].append(_slice(tensor, start, stop))
    return parts


def _layer_homes(tensors: Sequence[TensorSpec], count: int, pattern: str) -> dict[int | None, int]:
    """The fragment of each layer."""
    sizes: dict[int | None, int] = {}
    for tensor in sorted(
        (one for one in tensors if one.role == "block"), key=lambda one: one.layer or 0
    ):
        sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.numel
    if pattern == "strided":
        return {layer: rank % count for rank, layer in enumerate(sizes)}
    layers = list(sizes)
    runs = partition.cut(
        [partition.Stack(1, size) for size in sizes.values()], count
    )  # a layer is one row: never cut
    return {layers[span.stack]: index for index, run in enumerate(runs) for span in run}


def _digest(fragments: Sequence[Fragment], pattern: str) -> str:
    """SHA-256 over JSON without spaces: the format's name, the pattern, and every slice in
    order."""
    rows = [
        [[one.tensor, one.start, one.stop, one.numel] for one in fragment.slices]
        for fragment in fragments
    ]
    text = json.dumps(
        ["lowcomm fragment plan 1", pattern, rows], separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(text.encode()).hexdigest()
