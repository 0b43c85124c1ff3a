"""How to share out rows over parts of similar size: the arithmetic under a fragment plan, in exact
fractions."""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple


class Stack(NamedTuple):
    """``rows`` rows of ``width`` values each; a row is never cut."""

    rows: int
    width: int


class Span(NamedTuple):
    """Rows ``[start, stop)`` of stack number ``stack``."""

    stack: int
    start: int
    stop: int


def cut(stacks: Sequence[Stack], count: int) -> list[list[Span]]:
    """Cut the stacks, read as one column, at the rows nearest to equal sizes.

    No part is empty: ``count`` must be at most the number of rows.
    """
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
    """What each part takes of ``volume`` when it is poured over parts that hold ``loads``: the
    lowest fill first."""
    heights = sorted(loads)
    level = Fraction(0)
    for used in range(1, len(heights) + 1):
        level = Fraction(volume + sum(heights[:used]), used)
        if used == len(heights) or level <= heights[used]:
            break
    return [max(Fraction(0), level - load) for load in loads]


def fill(stack: Stack, left: list[Fraction]) -> list[tuple[int, int, int]]:
    """Split a stack over the room ``left``, the first part first: (part, start, stop).

    Lowers ``left``.
    """
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
