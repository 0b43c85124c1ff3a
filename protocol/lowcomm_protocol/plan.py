"""What is due when: fragments, their schedule, and the swarm step.

A fragment plan says which rows of which tensors travel together (Streaming DiLoCo, 2501.18512). It
depends only on names, shapes, roles and their order, so every peer makes the same one and compares
digests. The swarm step is one Lamport-style clock for the schedule of the whole run: ``step += 1``
for every own inner step; on every merge ``step = max(own, partner's)``.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple

from lowcomm_protocol.errors import PlanError

LIMIT = Fraction(5, 4)
"""Largest fragment, in means, before an embedding or head is split."""

EVEN = "even"
"""The pattern that cuts rows and leaves no layer whole; releases before 0.2 do not know it."""


class Stack(NamedTuple):
    """``rows`` rows of ``width`` values each; a row is never cut."""

    rows: int
    width: int


class Span(NamedTuple):
    """Rows ``[start, stop)`` of stack number ``stack``."""

    stack: int
    start: int
    stop: int


Role = Literal["embedding", "block", "norm", "head"]

PLACING: tuple[Role, ...] = ("block", "embedding", "norm", "head")
"""Layers are placed first, so that the others fill the gaps."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model; those of the same ``storage`` are tied."""

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
    def stack(self) -> Stack:
        """Its rows, which are never cut: dimension 0; a tensor without dimensions is one row."""
        return Stack(self.shape[0], prod(self.shape[1:])) if self.shape else Stack(1, 1)


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
    """All fragments; ``digest``: SHA-256 (hex) of the plan, under which peers exchange."""

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
    make its fragment larger than 1.25 times the mean is split by rows. With fewer layers than
    fragments, and always with ``even``, the model is cut by rows, in the order given. Raises
    `PlanError`.
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
    if by_rows:
        spans = cut([tensor.stack for tensor in kept], count)
        parts = [[_slice(kept[one.stack], one.start, one.stop) for one in part] for part in spans]
    else:
        parts = _whole_layers(kept, count, pattern)
    order = {tensor.name: position for position, tensor in enumerate(kept)}
    fragments = tuple(
        Fragment(index, tuple(sorted(part, key=lambda one: (order[one.tensor], one.start))))
        for index, part in enumerate(parts)
    )
    return FragmentPlan(fragments, pattern, _digest(fragments, pattern))


@lru_cache(maxsize=1024)  # asked at every inner step, and fractions are slow
def offset(index: int, count: int, interval: int) -> int:
    """Step at which fragment ``index`` of ``count`` is first due: ``round(interval * (index + 1)
    / count) % interval``.

    That is 0 for the last one, which is first due at ``interval``. A half is rounded to even.
    Raises `PlanError`.
    """
    if interval < 1 or not 0 <= index < count:
        raise PlanError(
            f"fragment {index} of {count} every {interval} steps: the interval must be at least 1 "
            f"and the fragment from 0 to {count - 1}"
        )
    return round(Fraction(interval * (index + 1), count)) % interval


def sync_index(step: int, index: int, count: int, interval: int) -> int:
    """How often a fragment has come due by ``step``; it is due when this has grown.

    ``floor((step - offset) / interval)``, which is -1 before the first time. Raises `PlanError`.
    """
    return (step - offset(index, count, interval)) // interval


def _untied(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors that a plan holds: of tied ones the first."""
    names: set[str] = set()
    stored: dict[str, TensorSpec] = {}
    kept: list[TensorSpec] = []
    for tensor in tensors:
        if tensor.name in names:
            raise PlanError(
                f"tensor {tensor.name!r} is listed twice: give every tensor a name of its own"
            )
        if any(size < 1 for size in tensor.shape):
            raise PlanError(
                f"tensor {tensor.name!r} of shape {tensor.shape} holds nothing: leave it out of "
                "the plan"
            )
        if tensor.role == "block" and tensor.layer is None:
            raise PlanError(
                f"tensor {tensor.name!r} of role 'block' has no layer: give the number of its layer"
            )
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


def _slice(tensor: TensorSpec, start: int, stop: int) -> Slice:
    return Slice(tensor.name, start, stop, (stop - start) * tensor.stack.width)


def _whole_layers(tensors: Sequence[TensorSpec], count: int, pattern: str) -> list[list[Slice]]:
    """Share out whole layers, then place the embedding, norms and head, or split them."""
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
    left = room(loads, sum(tensor.numel for tensor in split))
    for tensor in split:
        for part, start, stop in fill(tensor.stack, left):
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
    runs = cut([Stack(1, size) for size in sizes.values()], count)  # a layer is one row: never cut
    return {layers[span.stack]: index for index, run in enumerate(runs) for span in run}


def _digest(fragments: Sequence[Fragment], pattern: str) -> str:
    """SHA-256 over JSON: the format's name, the pattern, and every slice in order."""
    rows = [
        [[one.tensor, one.start, one.stop, one.numel] for one in fragment.slices]
        for fragment in fragments
    ]
    text = json.dumps(
        ["lowcomm fragment plan 1", pattern, rows], separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(text.encode()).hexdigest()


def cut(stacks: Sequence[Stack], count: int) -> list[list[Span]]:
    """Cut the stacks, read as one column, at the rows nearest to equal sizes; none is empty."""
    first_row = [0, *accumulate(stack.rows for stack in stacks)]
    first_value = [0, *accumulate(stack.rows * stack.width for stack in stacks)]
    cuts = [0]
    for index in range(1, count):
        target = Fraction(first_value[-1] * index, count)
        at = bisect_right(first_value, target) - 1
        nearest = first_row[at] + round((target - first_value[at]) / stacks[at].width)
        cuts.append(min(max(nearest, cuts[-1] + 1), first_row[-1] - (count - index)))
    cuts.append(first_row[-1])
    return [_spans(stacks, first_row, start, stop) for start, stop in pairwise(cuts)]


def room(loads: Sequence[int], volume: int) -> list[Fraction]:
    """What each part takes of ``volume`` poured over ``loads``: the lowest fill first."""
    heights = sorted(loads)
    level = Fraction(0)
    for used in range(1, len(heights) + 1):
        level = Fraction(volume + sum(heights[:used]), used)
        if used == len(heights) or level <= heights[used]:
            break
    return [max(Fraction(0), level - load) for load in loads]


def fill(stack: Stack, left: list[Fraction]) -> list[tuple[int, int, int]]:
    """Split a stack over the room ``left``, which it lowers: (part, start, stop)."""
    taken: list[tuple[int, int, int]] = []
    row, filled = 0, Fraction(0)
    for part in range(len(left)):
        amount = min(left[part], stack.rows * stack.width - filled)
        left[part] -= amount
        filled += amount
        stop = round(filled / stack.width)
        if stop > row:
            taken.append((part, row, stop))
        row = stop
    return taken


def _spans(stacks: Sequence[Stack], first_row: Sequence[int], start: int, stop: int) -> list[Span]:
    """The rows ``[start, stop)`` of the column, by stack."""
    spans = (
        Span(index, max(start - first, 0), min(stop - first, stack.rows))
        for index, (stack, first) in enumerate(zip(stacks, first_row, strict=False))
    )
    return [span for span in spans if span.start < span.stop]


@dataclass(frozen=True)
class FragmentProgress:
    """The counters of one fragment. They never go back, except when older state is loaded."""

    version: int = 0
    """Outer steps applied."""
    merged_steps: int = 0
    """Own inner steps when the contribution of the last merge was captured."""
    merged_tokens: int = 0
    synced: int = -1
    """Sync index at the last merge or fruitless attempt; -1 before the first."""


class SyncSchedule:
    """Which fragments are due at a swarm step, which can jump."""

    def __init__(self, interval: int, progress: Sequence[FragmentProgress]) -> None:
        self.interval = interval
        self._progress = list(progress)
        self._waits_until = [0] * len(self._progress)

    def __getitem__(self, fragment: int) -> FragmentProgress:
        return self._progress[fragment]

    def __len__(self) -> int:
        return len(self._progress)

    def due(self, swarm_step: int) -> Iterable[int]:
        """The fragments that are due, the one that has waited longest first; none at step 0."""
        late = [p for p in range(len(self)) if self.due_from(p) <= swarm_step]
        return sorted(late, key=lambda p: self._progress[p].merged_steps)

    def due_from(self, fragment: int) -> int:
        """The first swarm step at which a fragment is due."""
        synced = max(self._progress[fragment].synced, self.round_of(fragment, 0))
        return max(self._sync_point(fragment, synced + 1), self._waits_until[fragment])

    def _sync_point(self, fragment: int, number: int) -> int:
        return offset(fragment, len(self), self.interval) + number * self.interval

    def round_of(self, fragment: int, swarm_step: int) -> int:
        """Which sync of this fragment a swarm step belongs to."""
        return sync_index(swarm_step, fragment, len(self), self.interval)

    def intervals_since(self, fragment: int, steps: int) -> int:
        """Intervals of own inner steps since the last merge of a fragment, rounded; 1 at least."""
        since = steps - self._progress[fragment].merged_steps
        return max(1, (2 * since + self.interval) // (2 * self.interval))

    def least_steps(self, fragment: int, least: int) -> int:
        """Own inner steps since the last merge of a fragment before another is accepted.

        Before its first merge half of those at which it is first due are enough: it may be due long
        before ``least``.
        """
        if self._progress[fragment].version:
            return least
        first = offset(fragment, len(self), self.interval) or self.interval
        return min(least, (first + 1) // 2)

    def steps_alone(self, steps: int) -> int:
        """Own inner steps since the last merge of any fragment, after ``steps`` of them."""
        return steps - max(progress.merged_steps for progress in self._progress)

    def wait(self, fragment: int, swarm_step: int, steps: int) -> None:
        """Let a fragment that is due wait for ``steps``, at most until its next sync point."""
        next_sync = self._sync_point(fragment, self.round_of(fragment, swarm_step) + 1)
        self._waits_until[fragment] = min(swarm_step + steps, next_sync)

    def skip(self, fragment: int, swarm_step: int) -> None:
        """Count a sync that found no partner: the fragment waits for its next sync point."""
        old = self._progress[fragment]
        self._progress[fragment] = replace(
            old, synced=max(old.synced, self.round_of(fragment, swarm_step))
        )

    def merged(self, fragment: int, swarm_step: int, steps: int, tokens: int) -> FragmentProgress:
        """Count a merge of a contribution captured after ``steps`` own inner steps on
        ``tokens``."""
        self.skip(fragment, swarm_step)
        old = self._progress[fragment]
        new = replace(old, version=old.version + 1, merged_steps=steps, merged_tokens=tokens)
        self._progress[fragment] = new
        return new


@dataclass
class SwarmClock:
    """The swarm step of one peer."""

    step: int = 0

    def tick(self) -> int:
        """Count one own inner step."""
        self.step += 1
        return self.step

    def observe(self, step: int) -> int:
        """Take over a partner's step if it is ahead."""
        self.step = max(self.step, step)
        return self.step


FASTER = 8
"""How many times as fast as we one peer may have trained while we merged with nobody."""


def largest_jump(interval: int, alone: int = 0) -> int:
    """How many swarm steps one peer may be ahead of all others: ten intervals, 200 at least.

    ``alone``: own inner steps since our last merge: of two peers that an outage has parted, neither
    has a third that could speak for the other.
    """
    return max(10 * interval, 200, FASTER * alone)


def is_supported(claim: int, own: int, others: Iterable[int], max_jump: int) -> bool:
    """Whether ``claim`` of one peer may move our clock: nobody alone can push the swarm ahead.

    ``others``: swarm steps of third peers; ``max_jump``: most that one may be ahead of all.
    """
    return claim <= max([own, *others]) + max_jump
